"""The check of the repository's prose finds unidiomatic phrases; `.ci/run` runs it."""

from pathlib import Path

from tools import prose


def test_check_finds_a_phrase_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A sentence.\n\nThe report tells whoever reads it.\n")
    assert list(prose.check(tmp_path)) == [f"{page}:3: \"whoever\" -> say what the page shows; 'you'"]
