"""Find unidiomatic English in the README, the guides, docstrings, comments, messages and help texts.

    python -m tests.helpers.prose                  # check the whole repository, as CI does
    python -m tests.helpers.prose docs README.md   # check files and folders

A suggestion names the usual words. Rewrite the whole sentence instead of replacing the words that matched. The rules
are in `prose_rules.yaml`. Before a file is searched, everything that is not prose is overwritten with spaces, so that
line numbers stay the same; code and values inside a sentence become underscores, which read as one word.
"""

import ast
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
CHECKED = (
    "README.md", "CONTRIBUTING.md", "cluster.yaml", "docs", "mixednuts_dist", "jobs", "examples", "benchmarks", "tools",
    "tests",
)  # fmt: skip
SUFFIXES = {".md", ".py", ".yaml", ".yml", ".j2"}

NOUN = """
    accelerator argument attack bar batch beta bias bool call candidate cell class classifier column connection core
    corruption device draw element entry file folder form GPU gradient grid group image iteration key kind label layer
    line list machine minute model name network node norm number object page panel part partition pass phase picture
    piece pixel point process query receipt record replica request round row run score second seed session severity slab
    slot split stage start step target task test thread trial try value vector version weight worker
"""
SPACE = r"(?: +|\n)"
START = r"(?:\A\n*|(?<=\n\n)|(?<=[.:;?!|]\s)|(?<=^[-*]\s)|(?<=^#\s)|(?<=^##\s)|(?<=^###\s)|(?<=\d\.\s)|(?<=\*\*))"

INLINE_CODE = re.compile(r"(`+)(?!`)(?:[^`\n]|\n(?!\s*\n))+(?<!`)\1(?!`)")
FENCE = re.compile(r"^[ >]*(`{3,}|~{3,}).*?(?:^[ >]*\1[`~]* *$|\Z)", re.M | re.S)
HTML = re.compile(r"<!--.*?-->|<(style|script)\b.*?</\1>|</?[a-zA-Z][^<>]*>", re.S)
LINK_TARGET = re.compile(r"(?<=\])\([^)\n]*\)|^ *\[[^\]\n]+\]: .*$|\bhttps?://[^\s)>]+", re.M)
JINJA_TAG = re.compile(r"\{#.*?#\}|\{%.*?%\}", re.S)
JINJA_VALUE = re.compile(r"\{\{.*?\}\}", re.S)
DOCTEST = re.compile(r"^ *>>>.*?(?:^ *$|\Z)", re.M | re.S)
LITERAL_BLOCK = re.compile(r"(?<=::\n)(?: *\n)*( +)\S.*\n(?:\1.*\n| *\n)*")
QUOTES = re.compile(r"""["']\s*\n\s*[rbfu]*["']|^[rbfu]*(?:"{3}|'{3}|["'])|(?:"{3}|'{3}|["'])$""", re.I)
REPLACEMENT_FIELD = re.compile(r"\{\{|\}\}|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
YAML_COMMENT = re.compile(r"""\"[^"\n]*"|'[^'\n]*'|(?:^|(?<=\s))#(.*)""")
DIRECTIVE = re.compile(r"#!|#\s*(?:type|noqa|pragma|fmt|mypy|ruff|pylint)\b")

Passage = tuple[int, str]  # the number of the first line of a text, and the text


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of `prose_rules.yaml`."""
    pattern = pattern.replace("NOUN", f"(?:{'|'.join(NOUN.split())})")
    return re.compile(pattern.replace(" ", SPACE).replace("@", START), re.I | re.M)


RULES = [
    (name, compiled("|".join(rule["find"])), rule["say"])
    for name, rule in yaml.safe_load(Path(__file__).with_name("prose_rules.yaml").read_text()).items()
]


def mask(text: str, pattern: re.Pattern[str], filler: str = " ") -> str:
    """Overwrite each match of a pattern, except for its line breaks."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", filler, match.group()), text)


def markdown(text: str) -> str:
    """Mask code, HTML, and link targets in Markdown."""
    lines = mask(mask(text, FENCE), HTML).split("\n")
    in_list = in_code = False
    for number, line in enumerate(lines):
        if line.strip():
            in_list = bool(re.match(r" {0,3}(?:[-*+]|\d+[.)])\s", line)) or (in_list and line.startswith(" "))
            after_blank = number == 0 or not lines[number - 1].strip()
            in_code = line.startswith("    ") and not in_list and (after_blank or in_code)
            lines[number] = "" if in_code else line
    return mask(mask("\n".join(lines), INLINE_CODE, "_"), LINK_TARGET)


def docstring(source: str) -> str:
    """Mask the quotes, doctests, and literal blocks in the source of a docstring."""
    first, _, rest = mask(source, QUOTES).partition("\n")
    return mask(mask(f"{first.strip()}\n{textwrap.dedent(rest)}", DOCTEST), LITERAL_BLOCK)


def message(source: str) -> str:
    """Mask the quotes and replacement fields in the source of a string literal, which may have several parts."""
    return mask(mask(source, QUOTES), REPLACEMENT_FIELD, "_").replace(r"\n", "  ")


def strings_in(*roots: ast.AST) -> Iterator[ast.expr]:
    """Yield the string literals below some nodes; an f-string is one literal."""
    for root in roots:
        if isinstance(root, ast.JoinedStr) or (isinstance(root, ast.Constant) and isinstance(root.value, str)):
            yield root
        else:
            yield from strings_in(*ast.iter_child_nodes(root))


def literals(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the node of each docstring, help text, and message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None and isinstance(node.body[0], ast.Expr):
                yield node.body[0].value
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from strings_in(*node.exc.args)
        elif isinstance(node, ast.Call):
            owner = getattr(getattr(node.func, "value", None), "id", "")
            if owner in ("warnings", "logger", "logging", "log", "_logger"):
                yield from strings_in(*node.args)
            texts = [k.value for k in node.keywords if k.arg in ("help", "short_help", "description", "describes")]
            yield from strings_in(*texts)


def python(source: str) -> Iterator[Passage]:
    """Yield the texts in a Python file; a comment and the comment lines below it in its column are one passage."""
    rows = source.encode().split(b"\n")
    for node in dict.fromkeys(literals(ast.parse(source))):
        lines = rows[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]  # in bytes; the end first, because both may be on one line
        lines[0] = lines[0][node.col_offset :]
        text = b"\n".join(lines).decode()
        yield node.lineno, docstring(text) if '"""' in text else message(text)
    comments: list[tuple[int, int, list[str]]] = []  # first row, column, lines
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            row, column = token.start
            alone = not token.line[:column].strip()
            if not (alone and comments and (row, column) == (comments[-1][0] + len(comments[-1][2]), comments[-1][1])):
                comments.append((row, column, []))
            comments[-1][2].append(token.string[1:])
    yield from ((row, "\n".join(lines)) for row, _, lines in comments)


def passages(path: Path) -> Iterator[Passage]:
    """Yield the prose of a file, without indentation."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        found = python(text)
    elif path.suffix in (".yaml", ".yml"):
        rows = enumerate(text.split("\n"), 1)
        found = ((number, match[1]) for number, row in rows for match in YAML_COMMENT.finditer(row) if match[1])
    elif path.suffix == ".j2":
        text = mask(mask(text, JINJA_TAG), JINJA_VALUE, "_")
        found = iter([(1, markdown(text) if ".md" in path.suffixes else mask(text, HTML))])
    else:
        found = iter([(1, markdown(text))])
    for line, text in found:
        yield line, re.sub(r"^[ \t]+|[ \t]+$", "", mask(text, INLINE_CODE, "_"), flags=re.M)


class Finding(NamedTuple):
    """A match of a rule at a line of a file."""

    line: int
    path: Path
    rule: str
    match: str
    advice: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: {self.rule}: "{self.match}" -> {self.advice}'


def check(path: Path) -> list[Finding]:
    """Return the findings in a file or in the files of a folder, in the order of their lines."""
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.suffix in SUFFIXES and file.is_file()]
        return [finding for file in files for finding in check(file)]
    found = []
    for line, text in passages(path):
        for rule, pattern, advice in RULES:
            for match in pattern.finditer(text):
                words = match.group().strip()
                first = line + text.count("\n", 0, text.index(words, match.start()))
                found.append(Finding(first, path, rule, " ".join(words.split()), advice))
    return sorted(found, key=lambda finding: finding.line)


if __name__ == "__main__":
    found = [finding for name in sys.argv[1:] or CHECKED for finding in check(ROOT / name)]
    print(*found, f"{len(found)} findings", sep="\n")
    sys.exit(bool(found))
