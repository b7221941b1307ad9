"""Any file at all, given as a configuration: one line for each mistake, a non-zero exit, nothing written."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mixednuts_dist.cli import main
from mixednuts_dist.config.run_config import RunConfig, load_config
from mixednuts_dist.errors import ConfigError, MixedNutsError
from tests.helpers.runs import tiny_content, with_key

FILES = {
    "3,000 brackets": b"name: " + b"[" * 3000,
    "a reference": b"name: &a tiny\nstorage: *a\n",
    "a list that holds itself": b"name: &a [*a]",
    "latin-1": "name: Müller\n".encode("latin-1"),
    "utf-16": "name: tiny\n".encode("utf-16"),
    "binary": bytes(range(256)),
    "200 kB": b"# a comment\n" * 20_000,
    "empty": b"",
    "a key twice": b"name: a\nseed: 1\nname: b\n",
    "a tab": b"name: a\n\tseed: 1\n",
    "two documents": b"name: a\n---\nname: b\n",
    "a Python object": b"name: !!python/object/apply:os.system [ls]\n",
    "an impossible date": b"name: 2001-99-99\n",
    "an empty integer": b"seed: !!int ''\n",
    "a hexadecimal number of 36,000 bits": b"seed: 0x" + b"f" * 9000,
    "a list as a key": b"{[1]: 2}\n",
    "an unknown alias": b"name: *nobody\n",
    "a list": b"- 1\n",
    "an open list": b"a: [1",
}
VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, -0.0, 10**12, -(10**30), 10**400, 1e308, float("inf"), float("nan"), "", " ", "true",
    "8/255", "1/0", "x" * 5000, "\x1b[31m", "\u202e", "a\nb", "../..", "s3://", "demo:", [], [[]], [None], [True], {},
    {"min": 1}, {"min": 2, "max": 1}, {"min": 0, "max": 1, "spacing": "log"}, {"min": 1, "max": 2, "count": 10**11},
    {"a": {"b": {}}}, list(range(2000)), "2001-01-01", b"bytes", {"": 0}, {1: 2},
]  # fmt: skip


def paths(content: dict[str, Any], before: str = "") -> list[str]:
    """The path of each key."""
    found = []
    for key, value in content.items():
        found.append(before + key)
        if isinstance(value, dict):
            found += paths(value, f"{before}{key}.")
    return found


SOUND = tiny_content(Path("runs"))
OTHER_KEYS = ["sead", "data2", "x" * 300, "a b", "\x07", "1"]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A sound file with a changed value, perhaps an unknown key, and perhaps some overwritten bytes."""
    content = with_key(SOUND, draw(st.sampled_from(paths(SOUND))), draw(st.sampled_from(VALUES)))
    for key in draw(st.lists(st.sampled_from(OTHER_KEYS), max_size=1)):
        content = with_key(content, key, draw(st.sampled_from(VALUES)))
    text = bytearray(yaml.safe_dump(content).encode())
    for place, byte in draw(st.lists(st.tuples(st.integers(0, len(text) - 1), st.integers(0, 255)), max_size=4)):
        text[place] = byte
    return bytes(text)


def told(content: bytes, folder: Path) -> str | None:
    """Return the error message of a configuration of these bytes, or None if it is valid."""
    path = folder / "c.yaml"
    path.write_bytes(content)
    began = time.process_time()
    try:
        assert isinstance(load_config(path), RunConfig)
    except (ConfigError, MixedNutsError) as error:
        for line in str(error).splitlines():
            assert line.startswith((str(path), "extensions: "))
            assert len(line) < 1200
            assert line.isprintable(), line
        assert len(str(error).splitlines()) <= 13
        return str(error)
    finally:
        assert time.process_time() - began < 10
    return None


@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
def test_invalid_file_exits_with_one_line(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(content, tmp_path) is not None
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(main, ["run", "c.yaml"])
    assert shown.exit_code == 1
    assert shown.output.startswith("ConfigError: c.yaml: ")
    assert "Traceback" not in shown.output
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.one_of(damaged(), st.binary(max_size=300), st.text(max_size=300).map(str.encode)))
def test_any_bytes_are_told(content: bytes, tmp_path: Path) -> None:
    told(content, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]
