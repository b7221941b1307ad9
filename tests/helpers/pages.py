"""The README, the pages of docs/ and their code blocks."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    """A fenced block with the comment above it: `<!-- tested: FILE -->` or `<!-- not run in CI: REASON -->`."""

    page: str
    state: str
    reason: str
    language: str
    text: str


def without_directives(page: Path) -> str:
    """Return the page without the site's directives (test_site.py builds those)."""
    return re.sub(r"^```\{.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def blocks_of(page: Path) -> list[Block]:
    fenced = re.compile(r"(?:<!-- (tested|not run in CI): (.+?) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [Block(page.name, *found) for found in fenced.findall(without_directives(page))]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
