"""The documentation lists every study."""

from pathlib import Path

from mixednuts_dist.config.register import STUDIES

PAGE = Path(__file__).parents[2] / "docs" / "studies.md"


def test_the_page_lists_every_study() -> None:
    page = PAGE.read_text()
    ours = [entry for entry in STUDIES.entries().values() if entry.home.startswith("mixednuts_dist")]
    for entry in ours:
        assert f"| `{entry.name}` | {entry.facts['section']} | {entry.describes} |" in page
