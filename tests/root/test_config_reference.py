"""The configuration reference: made from the models, complete, and the one that docs/ shows."""

from pathlib import Path

from mixednuts_dist.config.run_config import config_with_stages, stages_with_keys
from tools.config_reference import config_reference, fields_of

CONFIG = config_with_stages(stages_with_keys())
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_every_key_says_what_it_means() -> None:
    fields = dict(fields_of(CONFIG))
    assert {"data.uri", "threat.eps", "search.scales", "compute.batch_size"} <= set(fields)
    assert [path for path, field in fields.items() if not field.description] == []


def test_docs_contain_the_reference() -> None:
    assert config_reference() in PAGE.read_text(), f"put the output of tools/config_reference.py into {PAGE.name}"
