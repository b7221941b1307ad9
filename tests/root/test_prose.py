"""The prose of the repository: no folder has more unidiomatic phrases than its budget, which only falls."""

from pathlib import Path

from tests.helpers import prose


def test_a_new_phrase_is_found_with_its_line(tmp_path: Path, monkeypatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("A sentence.\n\nThe report tells whoever reads it.\n")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (finding,) = prose.check(page)
    assert (finding.path, finding.line, finding.rule) == ("page.md", 3, "reader")


def test_an_update_lowers_budgets_and_never_raises_them(tmp_path: Path, monkeypatch) -> None:
    budget = tmp_path / "budget.json"
    budget.write_text('{"docs": 3, "tests": 1}')
    monkeypatch.setattr(prose, "BUDGET", budget)
    counts = {"docs/a.md": 1, "tests/a.py": 2, "jobs/a.py": 1}
    found = [prose.Finding(path, 1, "told", "told", "") for path, n in counts.items() for _ in range(n)]
    prose.update(found)
    assert prose.json.loads(budget.read_text()) == {"docs": 1, "tests": 1}
    assert set(prose.over_budget(found)) == {"tests", "jobs"}
