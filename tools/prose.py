"""Find unidiomatic English in the README, the guides, docstrings, comments, messages and help texts.

    python -m tools.prose                  # check the whole repository, as CI does
    python -m tools.prose docs README.md   # check files and folders

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

import yaml

ROOT = Path(__file__).parents[1]
CHECKED = (
    "README.md", "CONTRIBUTING.md", "cluster.yaml", "docs", "mixednuts_dist", "jobs", "examples", "benchmarks", "tools",
    "tests",
)  # fmt: skip
SUFFIXES = {".md", ".py", ".yaml", ".yml", ".j2"}

SPACE = r"(?: +|\n)"
START = r"(?:\A\n*|(?<=\n\n)|(?<=[.:;?!|]\s)|(?<=^[-*]\s)|(?<=^#\s)|(?<=^##\s)|(?<=^###\s)|(?<=\d\.\s)|(?<=\*\*))"

INLINE_CODE = re.compile(r"(`+)(?!`)(?:[^`\n]|\n(?!\s*\n))+(?<!`)\1(?!`)")
FENCE = re.compile(r"^[ >]*(`{3,}|~{3,}).*?(?:^[ >]*\1[`~]* *$|\Z)", re.M | re.S)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
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


def rules() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the advice and the pattern of each rule."""
    content = yaml.safe_load(Path(__file__).with_name("prose_rules.yaml").read_text())
    nouns = "|".join(content.pop("NOUN").split())
    for advice, patterns in content.items():
        pattern = "|".join(patterns).replace("NOUN", f"(?:{nouns})").replace(" ", SPACE).replace("@", START)
        yield advice, re.compile(pattern, re.I | re.M)


RULES = tuple(rules())


def mask(text: str, pattern: re.Pattern[str], filler: str = " ") -> str:
    """Overwrite each match of a pattern, except for its line breaks."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", filler, match.group()), text)


def markdown(text: str) -> str:
    """Mask code, HTML, and link targets in Markdown."""
    blocks = mask(mask(mask(text, FENCE), INDENTED), HTML)
    return mask(mask(blocks, INLINE_CODE, "_"), LINK_TARGET)


def literal(source: str) -> str:
    """Mask the quotes in the source of a docstring or a message, and what is not prose in it."""
    text = mask(source, QUOTES)
    if '"""' not in source:
        return mask(text, REPLACEMENT_FIELD, "_").replace(r"\n", "  ")
    first, _, rest = text.partition("\n")
    return mask(mask(f"{first.strip()}\n{textwrap.dedent(rest)}", DOCTEST), LITERAL_BLOCK)


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
            if getattr(getattr(node.func, "value", None), "id", "") in ("warnings", "logger", "_logger"):
                yield from strings_in(*node.args)
            texts = [k.value for k in node.keywords if k.arg in ("help", "short_help", "description", "describes")]
            yield from strings_in(*texts)


def python(source: str) -> Iterator[Passage]:
    """Yield the texts in a Python file; a comment and the comment lines below it in its column are one passage."""
    for node in dict.fromkeys(literals(ast.parse(source))):
        yield node.lineno, literal(ast.get_source_segment(source, node) or "")
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
    """Yield the prose of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from python(text)
    elif path.suffix in (".yaml", ".yml"):
        rows = enumerate(text.split("\n"), 1)
        yield from ((number, match[1]) for number, row in rows for match in YAML_COMMENT.finditer(row) if match[1])
    else:
        text = mask(mask(text, JINJA_TAG), JINJA_VALUE, "_")
        yield 1, markdown(text) if ".md" in path.suffixes else mask(text, HTML)


def check(path: Path) -> Iterator[str]:
    """Yield a line for each match of a rule in a file or in the files of a folder."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        for line, text in passages(file) if file.suffix in SUFFIXES else ():
            prose = re.sub(r"^[ \t]+|[ \t]+$", "", mask(text, INLINE_CODE, "_"), flags=re.M)
            for advice, pattern in RULES:
                for match in pattern.finditer(prose):
                    words = match.group().strip()
                    first = line + prose.count("\n", 0, prose.index(words, match.start()))
                    yield f'{file}:{first}: "{" ".join(words.split())}" -> {advice}'


if __name__ == "__main__":
    found = [finding for name in sys.argv[1:] or CHECKED for finding in check(ROOT / name)]
    print(*found, f"{len(found)} findings", sep="\n")
    sys.exit(bool(found))
