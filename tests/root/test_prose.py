"""The check of the repository's prose finds unidiomatic phrases; `.ci/run` runs it."""

from pathlib import Path

from tests.helpers import prose


def test_check_finds_a_phrase_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("A sentence.\n\nThe report tells whoever reads it.\n")
    (finding,) = prose.check(tmp_path)
    assert (finding.path.name, finding.line, finding.rule) == ("page.md", 3, "reader")
