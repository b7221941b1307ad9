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


def test_the_command_prints_it_and_the_docs_show_it() -> None:
    printed = CliRunner().invoke(main, ["schema", "--markdown"])
    assert printed.exit_code == 0
    assert printed.stdout == config_reference() + "\n"
    assert config_reference() in PAGE.read_text(), f"put the output of `mixednuts schema --markdown` into {PAGE.name}"
