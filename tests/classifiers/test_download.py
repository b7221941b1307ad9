"""Fetching: from a real server on loopback that breaks off, refuses and sends other files."""

import hashlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from mixednuts_dist.classifiers.checkpoints import fetch
from mixednuts_dist.cli import main
from mixednuts_dist.config.uris import ClassifierSource, Missing, Source
from mixednuts_dist.errors import BaseClassifierError
from tests.helpers.loopback import serving
from tests.helpers.runs import tiny_content

CONTENT = hashlib.shake_256(b"weights").digest(3_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """Serves `content`; the next answer ends after `breaks_after` bytes, if it is not None."""

    url: str

    def __init__(self) -> None:
        self.content, self.status, self.n_asked = CONTENT, 200, 0
        self.breaks_after: int | None = None

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        self.n_asked += 1
        if self.status != 200:
            request.send_error(self.status)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(self.content)))
        request.end_headers()
        request.wfile.write(self.content[: self.breaks_after])


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with serving(made) as made.url:
        yield made


def missing(server: Server, path: Path, sha256: str = "") -> Missing:
    return Missing("the weights of x", str(path), "by hand: curl", f"{server.url}/{path.name}", sha256)


def test_fetch_puts_only_whole_files_into_place(server: Server, tmp_path: Path) -> None:
    server.breaks_after, path = 1_200_000, tmp_path / "deep" / "w.pt"
    with pytest.raises(BaseClassifierError, match=r"the weights of x cannot be fetched from .*IncompleteRead"):
        fetch(missing(server, path, SHA256[:8]))
    assert not path.exists()
    server.breaks_after = None
    assert fetch(missing(server, path, SHA256[:8])) == SHA256
    assert path.read_bytes() == CONTENT
    assert [one.name for one in path.parent.iterdir()] == ["w.pt"]


@pytest.mark.parametrize(
    ("content", "sha256", "message"),
    [(CONTENT[:-1], SHA256[:8], "It was deleted"), (b"<html>quota exceeded", "", "web page"), (b"", "", "empty")],
    ids=["other bytes", "a page", "nothing"],
)
def test_what_is_not_the_file_is_not_put_into_place(
    server: Server, tmp_path: Path, content: bytes, sha256: str, message: str
) -> None:
    server.content, path = content, tmp_path / "w.pt"
    with pytest.raises(BaseClassifierError, match=message):
        fetch(missing(server, path, sha256))
    assert not path.exists()


def test_a_refusal_is_told_with_what_to_do_by_hand(server: Server, tmp_path: Path) -> None:
    server.status = 403
    with pytest.raises(BaseClassifierError, match=r"the weights of x cannot be fetched from .*403.*by hand: curl"):
        fetch(missing(server, tmp_path / "w.pt"))
    assert server.n_asked == 1
    with pytest.raises(BaseClassifierError, match="copy it there"):
        fetch(Missing("file", str(tmp_path / "w.pt"), "copy it there"))


def test_file_of_a_library_is_its_own_download(tmp_path: Path) -> None:
    (tmp_path / "cached").write_bytes(CONTENT)
    item = Missing("weights", str(tmp_path), "by hand: curl", get=lambda: tmp_path / "cached")
    assert fetch(item) == SHA256
    (tmp_path / "cached").unlink()
    with pytest.raises(BaseClassifierError, match=r"weights cannot be fetched from its library.*cached.*by hand: curl"):
        fetch(item)


def test_check_fetch_downloads_missing_files(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny_content(tmp_path / "runs")))
    by_hand = Missing("file", str(tmp_path / "rob.pt"), "copy it there")
    wanted = [("std", missing(server, tmp_path / "std.pt", SHA256)), ("rob", by_hand)]
    monkeypatch.setattr(
        Source,
        "missing",
        lambda _, key: [item for role, item in wanted if role == key and not Path(item.path).exists()],
    )
    shown = CliRunner().invoke(main, ["check", "--fetch", str(tmp_path / "mine.yaml")])
    assert shown.exit_code == 1, shown.output
    assert f"sha256 {SHA256}  {tmp_path / 'std.pt'}" in shown.output
    assert "copy it there" in shown.output
    (tmp_path / "rob.pt").touch()
    shown = CliRunner().invoke(main, ["check", str(tmp_path / "mine.yaml"), "--fetch"])
    assert shown.exit_code == 0
    assert "nothing is missing. Next: mixednuts run" in shown.output


def test_published_std_comes_from_its_authors(tmp_path: Path) -> None:
    uri = f"robustbench:Bai2024MixedNUTS?dataset=cifar10&part=std&model_dir={tmp_path}"
    (item,) = ClassifierSource(uri).missing("std")
    assert item.url.startswith("https://huggingface.co/Bai-YT/MixedNUTS/") and "gdown" in item.command
    Path(item.path).parent.mkdir(parents=True)
    Path(item.path).write_bytes(CONTENT)
    assert ClassifierSource(uri).missing("std") == []
