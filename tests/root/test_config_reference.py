"""The configuration reference: made from the models, complete, and the one that docs/ shows."""

from pathlib import Path

from click.testing import CliRunner

from mixednuts_dist.cli import main
from mixednuts_dist.cli.setup import config_reference, fields_of
from mixednuts_dist.config.run_config import config_with_stages, stages_with_keys

CONFIG = config_with_stages(stages_with_keys())
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_every_key_says_what_it_means() -> None:
    fields = dict(fields_of(CONFIG))
    assert {"data.uri", "threat.eps", "search.scales", "compute.batch_size"} <= set(fields)
    assert [path for path, field in fields.items() if not field.description] == []


def test_the_reference_has_one_line_a_key_with_type_and_default() -> None:
    lines = config_reference().splitlines()
    assert len(lines) == 2 + len(dict(fields_of(CONFIG)))
    assert "| `name` | text | required | Name of the run, with which its run ID begins. |" in lines
    assert any(line.startswith('| `threat.norm` | `Linf`, `L2`, `L1` | `"Linf"` |') for line in lines)
    assert any(line.startswith("| `search.scales` | {min, max, count, spacing} or list of number |") for line in lines)
    assert any(line.startswith("| `names` | map of `std`, `rob`, `mixed` to text | `{}` |") for line in lines)
    assert not [line for line in lines if "typing." in line or "dict[" in line or "list[" in line]
    assert all(line.replace("\\|", "").count("|") == 5 for line in lines)


def test_the_command_prints_it_and_the_docs_show_it() -> None:
    printed = CliRunner().invoke(main, ["schema", "--markdown"])
    assert printed.exit_code == 0
    assert printed.stdout == config_reference() + "\n"
    assert config_reference() in PAGE.read_text(), f"put the output of `mixednuts schema --markdown` into {PAGE.name}"
