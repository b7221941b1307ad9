"""Find unidiomatic English in the README, the guides, docstrings, comments, messages and help texts.

The number of findings per folder is a ratchet: CI fails if a folder has more findings than
`prose_budget.json` allows, and the budget only falls.

    python -m tests.helpers.prose                      # compare the repository with its budget, as CI does
    python -m tests.helpers.prose docs README.md       # print every finding in files and folders
    python -m tests.helpers.prose --update             # lower the budget to the current number of findings

A suggestion names the usual words. Rewrite the whole sentence instead of replacing the words that matched.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.helpers.prose_text import SUFFIXES, passages

ROOT = Path(__file__).parents[2]
BUDGET = Path(__file__).with_name("prose_budget.json")
CHECKED = (
    "README.md", "CONTRIBUTING.md", "cluster.yaml", "docs", "mixednuts_dist", "jobs", "examples", "benchmarks", "tools",
    "tests",
)  # fmt: skip

# nouns around "a" in the sense of "per", as in `one worker a GPU`
NOUN = """
    accelerator argument attack bar batch beta bias bool call candidate cell class classifier column connection core
    corruption device draw element entry file folder form GPU gradient grid group image iteration key kind label layer
    line list machine minute model name network node norm number object page panel part partition pass phase picture
    piece pixel point process query receipt record replica request round row run score second seed session severity slab
    slot split stage start step target task test thread trial try value vector version weight worker
"""
NOUN = f"(?:{'|'.join(NOUN.split())})"

# (id, pattern, suggestion). In a pattern, a space also matches a line break, and "@" matches only where a passage,
# paragraph, sentence, clause, list item, or table cell begins. The case of letters is ignored.
RULES = [
    ("reader", r"\bwhoever\b|(?:@|: )for who\b|\bwho asks\b|@after this page\b", "say what the page shows; 'you'"),
    (
        "person",
        r"\b(?:any|some|no|every)body\b(?:'s)?|\bstrangers?\b(?:'s)?",
        "'another user', 'third-party', 'untrusted', 'not tested'",
    ),
    (
        "of-own",
        r"\bof (?:yours|ours|theirs|one's own|(?:its|their|his|your|our) own|a (?:user|caller)'s)\b",
        "'your X', 'its own X', 'a separate X'",
    ),
    (
        "told",
        r"\b(?:is|are|was|were|be) (?:\w+ )?told\b(?! (?:apart|from|the|(?:not )?to)\b)"
        r"|[|,;:] told\b|\btells? (?:that|it|of)\b|\btold (?:at once|in|with|by|its)\b",
        "name the program: 'X reports ...', 'X rejects ...'",
    ),
    (
        "answered",
        r"\b(?:is|are|was|were) answered (?:with|by|from)\b|\banswers (?:with|NaN|for(?! ever))\b"
        r"|\bto answer for\b",
        "'returns', 'responds with'",
    ),
    (
        "asked",
        r"\b(?:is|are|was|were|be|been) (?:(?:not|only|first|once) )?asked\b"
        r"|(?<!user\s)(?<!caller\s)(?<!you\s)\basked for\b",
        "'requested', or name what requests it",
    ),
    (
        "refused",
        r"(?<!connection\s)(?<!connections\s)\b(?:is|are|was|were) refused\b",
        "'X rejects ...', 'X raises ...'",
    ),
    (
        "says",
        r"(?<!people\s)(?<!paper\s)(?<!you\s)(?<!authors\s)(?<!to\s)(?<!can\s)(?<!,\s)(?<!let\Ws\s)(?<!being\s)"
        r"\b(?:says?|said|saying)\b",
        "'reports', 'prints', 'shows', 'states'",
    ),
    (
        "stand",
        r"(?<!-)\b(?:stands?|stood|standing)\b(?!-| (?:for|out|alone|by)\b)",
        "'remains robust', 'is', 'appears'",
    ),
    (
        "fall",
        r"\b(?:images?|ones?|digits?|attacked|certified|what|may) (?:falls?|fell|fallen)\b"
        r"(?! (?:below|back|short|into|within|behind|with|by|under|from|on|then)\b| to (?:\d|as))",
        "'is misclassified under attack', 'is broken'",
    ),
    (
        "border",
        r"\ba hair\b|\b(?:at|near|nearer|nearest|next to|nearest to|away from|from) the border\b",
        "'with a small margin', 'near the decision boundary'",
    ),
    (
        "takes",
        r"\bwhat (?:no|each|an|the) attack (?:\w+ )?(?:takes?|took|leaves?|left)\b|\battack can take\b",
        "'images broken by X', 'robust accuracy after X'",
    ),
    (
        "per",
        rf"(?<!in\s)(?<!of\s)(?<!for\s)(?<!under\s)\b(?:(?:one|two|three|four|five|ten|several|many|most|\d[\d,]*) "
        rf"(?:[\w.-]+ )?{NOUN}s?|an? {NOUN}|images|rows|GPUs|cores|workers|threads|seconds|pixels|accelerators|parts|"
        rf"files|partitions|requests|queries) an? {NOUN}\b(?!'s| (?:of|time|copy|has|is|can|will|takes|moves)\b)"
        rf"|\bonce an? {NOUN}\b(?= (?:and|or|in|on)\b|[.,;:)|])",
        "'per': 'one worker per GPU'",
    ),
    ("beside", r"\bbeside\b", "'next to', 'in addition to', 'compared with', 'alongside'"),
    (
        "behind",
        r"(?<!left\s)(?<!leaves\s)(?<!leave\s)(?<!and\s)(?<!fall\s)(?<!falls\s)\bbehind\b"
        r"(?![.,;:)]| (?:HTTP|an? (?:\w+ )?(?:interface|proxy|flag|firewall)|one's back|an? figure)\b)",
        "'after', 'preceded by'",
    ),
    ("in-place-of", r"\bin (?:the )?place of\b", "'instead of'"),
    ("but-for", r"(?<!,\s)\bbut for\b", "'except for'"),
    (
        "where",
        r"\b[A-Z]\w+(?:Error:?|(?:Artifact|Mismatch|Failed|Schema|Lost|File|Storage):) where\b"
        r"|\bwhere there (?:is|are|was)\b|\bwhere (?:(?-i:none)|nothing|neither|(?:it|they|that) cannot)\b"
        r"|\b(?:None|empty|nothing|infinity|itself) where\b|@where (?!_|\w_|[b-z]\b|\w+ = )(?=[^.:;?|(]{3,110}, "
        r"(?!and|or|in|by|on|from|of|with|read|for|as|which|where|moves|\()\w)",
        "'if', 'when'",
    ),
    ("for-what", r"\b[A-Z]\w+(?:Error|Mismatch|Artifact): for what\b|\bfor what is no\b", "'if X is not a ...'"),
    (
        "is-there",
        r"(?<!there\s)\b(?:is|are|was|were) (?:(?:all|already|not) )?there\b"
        r"(?! (?:an?|any\w*|no|to|is|are|because)\b)",
        "'exists', 'is present', 'is available'",
    ),
    (
        "dated",
        r"\banew\b|\bmend(?:s|ed|ing)?\b|\bdear(?:er|est)?\b|\bin vain\b|\bfor good\b(?!-| \w)"
        r"|\bfor ever\b|\bfor want of\b|\beventual\b(?! consist)|(?<!are\s)(?<!is\s)\ball the same(?=[.,;:]|\Z)",
        "'again', 'fix', 'expensive', 'unnecessarily', 'permanently', 'for lack of', 'last', 'anyway'",
    ),
    ("go-on", r"\b(?:goes|go|went|gone) on\b(?! (?:to|top)\b)|\bgoing on (?:from|with)\b", "'resume', 'continue'"),
    (
        "come-back",
        r"\b(?:logits|results?|rows|points?|partition|(?:classifier|choice) that) comes? back\b",
        "'return', 'is returned'",
    ),
    ("set-aside", r"\bset(?:s|ting)? (?:\w+ ){0,3}aside\b", "'quarantine', 'move'"),
    (
        "take-over",
        r"\b(?:is|are|was|were|has|rows|stage) (?:not )?taken over\b(?! the)"
        r"|\btakes? over (?:each other's |the )?rows\b",
        "'reuse'",
    ),
    (
        "very",
        r"\b(?:the|its|this|their) very (?!first|last|end|beginning|same|few|small|large|long|short|high|low)\w+",
        "'exactly the', 'the same'",
    ),
    ("so-many", r"\bso many\b(?! (?:\w+ ){0,2}that\b)|\bat (?:most|least) so\b", "'this many', 'N times', 'at most X'"),
    (
        "available",
        r"(?<!task\s)(?<!problem\s)(?<!case\s)\bat hand\b|\b(?:be|is|are) had\b",
        "'available', 'current', 'can be obtained', 'is within reach'",
    ),
    (
        "ends-in",
        r"\b(?:ends?|ended|ending) in (?:the|an?|one|another|its|their|this|random)\b(?! ['\"_])"
        r"|\bcomes? to (?:equal|the same|the results|another)\b",
        "'produces', 'exits with', 'results in'",
    ),
    (
        "held-against",
        r"\bheld against\b|\bholds? (?:\w+ ){1,6}against\b",
        "'compared with', 'checked against', 'verify'",
    ),
    (
        "phrasal",
        r"@take in\b|\btaken in\b(?! (?:the|that|order|float|bf))"
        r"|\bhand(?:s|ed)? in\b|(?<!and\s)\bgo(?:es)? with (?:it|each|them)\b|\bas (?:it|they) comes?\b(?! to)",
        "'accept', 'submit', 'accompany', 'on arrival'",
    ),
    ("stops-to", r"\b(?:stop|stops|stopped) to\b|\blets? (?:say|expect)\b", "'stops growing', 'no longer holds'"),
    ("none-of", r"(?<!there\s)\b(?:is|are|was|were) (?-i:none)\b(?! of the)", "'is not one', 'does not depend on'"),
    (
        "lies",
        r"\b(?:lies?|lay) (?:beside|in _|on a file|in (?:the|its|their|a|this|that) (?:\w+ )?(?:folder|file|room|"
        r"directory|bucket|storage|run)\b)|\bwhere (?:\w+ ){1,4}(?:lies?|lay)\b(?! (?:on|above|below|between)\b)",
        "'is', 'is stored in', 'is located in'",
    ),
    ("by-itself", r"\bby (?:itself|themselves)\b", "'automatically', 'separately', 'alone'"),
    ("by-hand", r"\bby hand\b", "'manually', 'handwritten'"),
    ("made-up", r"\bmade-up\b", "'synthetic'"),
    ("company", r"\bcompany\b", "'batch composition'"),
    ("bill", r"\bbills?\b", "'cost', 'cost table'"),
    ("card", r"(?<!model\s)(?<!image\s)(?<!design\s)\b(?:a|the|one|that|simulated) card(?:'s)?\b", "'GPU'"),
    (
        "room",
        r"\brooms\b|\b(?:its|this|each|every|same|register's|own|a) room\b(?! for)|\bthe room (?:that|of)\b",
        "'package'",
    ),
    (
        "work-unit",
        r"\bpieces?\b(?! of (?:code|text|information|advice))|\breceipts?\b|\bfingerprints?\b",
        "'partition' or 'work unit' (piece), 'summary' (receipt), 'content hash' (fingerprint)",
    ),
    ("lane", r"\blanes?\b", "'queue', 'batch of runs'"),
    (
        "coarse",
        r"\bcoarse(?:r|st)? (?:passes|phases|gradients|arithmetic|precision|ones|steps)\b|\bare coarse\b",
        "'low-precision'",
    ),
    ("judge", r"\bjudge[sd]?\b(?! by)|\bverdicts?\b", "'verify in float32', 'float32 verification', 'verified result'"),
    ("opinion", r"\bsecond opinion\b", "'cross-check'"),
    ("demo", r"\bthe main job\b|\ba real pair\b|\bpoison\b", "'the demo run', 'an image that crashes the worker'"),
    ("cutoff", r"\bcutoffs?\b", "'margin threshold'"),
    (
        "mixture",
        r"(?<!beta\s)\bmixtures?\b(?! (?:model|of two|distribution|supermartingale|martingale))",
        "'the mixed classifier'",
    ),
    (
        "role",
        r"(?<![\w:/\".(=-])(?<!mean\sand\s)(?:rob|std)(?:'s)?\b(?![\w:=/\"(-])(?!\.\w)",
        "'the robust (accurate) base classifier'; keys and columns in code font",
    ),
    (
        "what",
        r"(?<!\|\s)@(?-i:What) (?![^.?!\n]*\?|is new\b|to do\b|happens (?:if|when)\b)\w+"
        r"|; what (?:is|was|has|it|does) (?:\w+ ){1,3}(?:is|are|takes)\b",
        "a noun phrase, a verb, or an 'if' clause",
    ),
    (
        "genitive",
        r"@of (?!course\b|note\b|the \d|these \d|\d)\w+|@as of (?:any|every|a|the|two)\b",
        "'Seed of all random starts', not 'of every random start'",
    ),
    (
        "no-noun",
        r"(?<!here\s)\b(?:is|are|was|were) no (?!(?:longer|more|worse|less|need|doubt|\w+er)\b)[a-z]\w*",
        "negate the verb: 'is not a ...'",
    ),
    ("else", r"[,;] else\b(?! (?:if|\d|None)\b)|\b[01] else(?=[.;]|\Z)", "'otherwise'"),
    ("less", r"\bless (?:one|the|that of|those of)\b", "'minus'"),
    ("percent", r"(?:\b\d[\d.,]*|_)(?: |\u00a0)%(?![\w(%])(?! \d)", "no space: '95%'"),
    ("decimal", r"(?<![\w.)\]/\\])\.\d+\b(?![\w.]*\.\w)", "leading zero: '0.25'"),
    ("semicolons", r";(?:[^;.:|\n]|\n(?![\n*-]))+;(?:[^;.:|\n]|\n(?![\n*-]))+;", "split the sentence or use a list"),
    (
        "spelling",
        r"(?<!\.)\b(?:defence|licence|colour|behaviour|neighbour|grey|centre|labell|modell|"
        r"quantis|normalis|optimis(?!m|t)|randomis|initialis|serialis|parallelis|linearis|maximis|minimis|synchronis|"
        r"recognis|summaris|organis(?!m)|generalis|analys(?=e[ds]?\b|ing)|learnt\b)\w*",
        "American spelling",
    ),
]

SPACE = r"(?: +|\n)"
START = r"(?:\A\n*|(?<=\n\n)|(?<=[.:;?!|]\s)|(?<=^[-*]\s)|(?<=^#\s)|(?<=^##\s)|(?<=^###\s)|(?<=\d\.\s)|(?<=\*\*))"
COMPILED = [
    (rule, re.compile(pattern.replace(" ", SPACE).replace("@", START), re.I | re.M), advice)
    for rule, pattern, advice in RULES
]


class Finding(NamedTuple):
    """A match of a rule at a line of a file, whose path is relative to the repository."""

    path: str
    line: int
    rule: str
    match: str
    advice: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: {self.rule}: "{self.match}" -> {self.advice}'


def check(path: Path) -> list[Finding]:
    """Return the findings in a file, in the order of its lines."""
    found = []
    for _, line, text in passages(path, path.read_text(encoding="utf-8")):
        for rule, pattern, advice in COMPILED:
            for match in pattern.finditer(text):
                words = match.group().strip()
                first = line + text.count("\n", 0, text.index(words, match.start()))
                name = path.relative_to(ROOT).as_posix()
                found.append(Finding(name, first, rule, " ".join(words.split()), advice))
    return sorted(found, key=lambda finding: finding.line)


def files_in(paths: list[Path]) -> Iterator[Path]:
    """Yield the files to check."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SUFFIXES and file.is_file():
                yield file


def findings(paths: list[Path] | None = None) -> list[Finding]:
    """Return the findings in the given files and folders, by default in the whole repository."""
    chosen = paths or [ROOT / name for name in CHECKED if (ROOT / name).exists()]
    return [finding for path in files_in(chosen) for finding in check(path.resolve())]


def folder_of(finding: Finding) -> str:
    """Return the folder that the finding counts for: a top-level file or folder, or a package of `mixednuts_dist`."""
    parts = finding.path.split("/")
    return "/".join(parts[:2]) if parts[0] == "mixednuts_dist" and len(parts) > 2 else parts[0]


def over_budget(found: list[Finding]) -> dict[str, str]:
    """Map each folder with more findings than its budget to a report that lists them."""
    budget, counts = json.loads(BUDGET.read_text()), Counter(map(folder_of, found))
    return {
        folder: f"{folder}: {count} findings, {budget.get(folder, 0)} allowed\n"
        + "\n".join(str(finding) for finding in found if folder_of(finding) == folder)
        for folder, count in counts.items()
        if count > budget.get(folder, 0)
    }


def update(found: list[Finding]) -> None:
    """Lower the budgets to the current counts. A budget never rises, and a new folder gets none."""
    budget, counts = json.loads(BUDGET.read_text()), Counter(map(folder_of, found))
    lowered = {folder: min(allowed, counts[folder]) for folder, allowed in budget.items()}
    BUDGET.write_text(json.dumps({folder: n for folder, n in sorted(lowered.items()) if n}, indent=2) + "\n")


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="Find unidiomatic English in the prose of the repository.")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders of which every finding is printed")
    parser.add_argument("--update", action="store_true", help="lower the budgets to the current number of findings")
    options = parser.parse_args()
    found = findings(options.paths)
    if options.update:
        update(findings())
        return 0
    lines = [str(finding) for finding in found] if options.paths else list(over_budget(found).values())
    print("\n".join([*lines, f"{len(found)} findings"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
