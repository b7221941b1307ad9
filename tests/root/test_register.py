"""The register of extension points: names without imports, entries from files outside the package."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist.config import register
from mixednuts_dist.config.register import REGISTERS, Register, import_file, load_extensions
from mixednuts_dist.errors import ConfigError, InvalidInputError


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Register[Any]:
    """An empty register that extensions find under the name TOYS."""
    toys: Register[Any] = Register("TOYS", "toy", "no_such_room")
    monkeypatch.setattr(register, "TOYS", toys, raising=False)
    return toys


def extension(tmp_path: Path, text: str, name: str = "mine.py") -> str:
    path = tmp_path / name
    path.write_text("from mixednuts_dist.config.register import TOYS\n" + text)
    return str(path)


def test_an_extension_registers_itself(tmp_path: Path, toys: Register[Any]) -> None:
    load_extensions([extension(tmp_path, '@TOYS("ball", order=1)\ndef ball():\n    "round."\n    return 7\n')])
    assert toys.names() == ("ball",)
    assert toys.entries()["ball"].describes == "round"
    assert toys.get("ball")() == 7
    with pytest.raises(InvalidInputError, match=r"toy 'bal' is not known; did you mean 'ball'\? Valid names: ball"):
        toys.check("bal")


def test_two_files_cannot_take_one_name(tmp_path: Path, toys: Register[Any]) -> None:
    first = extension(tmp_path, '@TOYS("drum", describes="loud")\ndef drum(): ...\n', "first.py")
    second = extension(tmp_path, '@TOYS("drum", describes="louder")\ndef drum(): ...\n', "second.py")
    load_extensions([first])
    with pytest.raises(ConfigError, match="choose another name"):
        load_extensions([second])
    assert toys.entries()["drum"].describes == "loud"


def test_an_edited_file_takes_the_place_of_what_it_was(tmp_path: Path, toys: Register[Any]) -> None:
    text = '@TOYS("ball", describes="{}")\ndef ball(): return "{}"\n'
    first = load_extensions([extension(tmp_path, text.format("round", "round"))])
    second = load_extensions([extension(tmp_path, text.format("oval", "oval"))])
    assert first != second
    assert (toys.names(), toys.entries()["ball"].describes, toys.get("ball")()) == (("ball",), "oval", "oval")


def test_an_edit_in_the_same_second_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "edited.py"
    for value in (1, 2):
        path.write_text(f"VALUE = {value}\n")
        os.utime(path, (0, 0))
        assert value == import_file("edited", path).VALUE
    assert list(tmp_path.iterdir()) == [path]


def test_extension_dataclasses_pickle(tmp_path: Path, toys: Register[Any]) -> None:
    text = 'import dataclasses\n@TOYS("box", describes="square")\n@dataclasses.dataclass\nclass Box:\n    side: int\n'
    path = Path(extension(tmp_path, text))
    path.write_text("from __future__ import annotations\n" + path.read_text())
    load_extensions([str(path)])
    assert pickle.loads(pickle.dumps(toys.get("box")(3))) == toys.get("box")(3)


@pytest.mark.parametrize("found", REGISTERS, ids=lambda found: found.constant)
def test_every_built_in_entry_can_be_had_by_its_name(found: Register[Any]) -> None:
    for name, entry in found.entries().items():
        assert found.get(name) is not None
        assert entry.describes
        assert "\n" not in entry.describes
