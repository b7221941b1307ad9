"""A run against an S3 server with expiring tokens, wrong clocks, slow answers and many other objects."""

import json
import re
from pathlib import Path

import pytest
import s3fs
import yaml
from click.testing import CliRunner

from mixednuts_dist import pipeline
from mixednuts_dist.cli import main
from mixednuts_dist.distributed.debug import DebugExecutor
from mixednuts_dist.errors import StoreError
from mixednuts_dist.storage import outages
from mixednuts_dist.storage.store import Store, concurrently
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.object_store import ObjectStore
from tests.helpers.runs import MakeConfig

EXPIRED = (400, "ExpiredToken", "the access token has expired .*Renew it and run the same command again")
SKEWED = (403, "RequestTimeTooSkewed", r"this machine's clock or the server's is wrong .*Here it is 20\d\d-")


@pytest.mark.parametrize(
    ("call", "status", "code", "message"),
    [("read", *SKEWED), *((call, *EXPIRED) for call in ("exists", "read", "write", "create", "names", "delete"))],
)
def test_expired_token_and_wrong_clock_raise_at_once(
    object_store: ObjectStore, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, call: str, status: int,
    code: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(outages.time, "sleep", lambda _: pytest.fail("it waits"))
    store = Store(object_store.uri("trouble"))
    fault_proxy.refuse(status, code)
    content = (b"x",) if call in ("write", "create") else ()
    with pytest.raises(StoreError, match=message) as caught:
        getattr(store, call)("a/file", *content)
    assert object_store.secret not in str(caught.value)


def test_rewritten_token_file_is_read_again(
    object_store: ObjectStore, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """External tools renew `~/.aws/credentials`, which botocore reads only once."""

    def give(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {object_store.secret}\n")

    file = tmp_path / "credentials"
    Store(object_store.uri("file")).write("there", b"1")
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    give("expired")
    fault_proxy.refuse(*EXPIRED[:2], after=1 << 60)
    fault_proxy.refused_key = "expired"
    store = Store(object_store.uri("file"))
    with pytest.raises(StoreError, match="the access token has expired"):
        store.read("there")
    give("tests")

    assert concurrently(lambda i: store.create(f"new-{i}", b"2"), range(4)) == [True] * 4
    assert store.read("there") == b"1"


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_run_sends_few_requests_to_a_slow_server(
    object_store: ObjectStore, fault_proxy: FaultProxy, local_executor: DebugExecutor, tiny: MakeConfig,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A partition takes nine requests; everything else is a fixed number, whatever else lies under the prefix."""
    here = pipeline.run(tiny(), executor=local_executor).to_json()
    root, file, sent = Store(object_store.uri("slow")), tmp_path / "slow.yaml", {}
    concurrently(lambda i: root.write(f"beside-{i}", b""), range(1100))
    assert len(root.names("")) == 1100, "more than one listing holds"
    for size in (8, 3):  # 3 partitions, then 8
        before, config = fault_proxy.n_requests, tiny(name=f"slow-{size}", partition_size=size, storage=root.uri)
        fault_proxy.delay = 0.02
        there = pipeline.run(config, executor=local_executor).to_json()
        fault_proxy.delay, sent[size] = 0.0, fault_proxy.n_requests - before
        assert there["accuracy"] == here["accuracy"]
    assert sent[8] < 165
    assert sent[3] - sent[8] <= 9 * (8 - 3)
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    before = fault_proxy.n_requests
    assert CliRunner().invoke(main, ["status", str(file)]).exit_code == 0
    assert fault_proxy.n_requests - before < 25


GONE = (404, "NoSuchBucket", r"there is no such place .*Create the bucket")


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("refusal", "at", "written"),
    [
        (EXPIRED, "run.yaml", (0, 0)), (EXPIRED, "attack/.*part-00001", (1, 0)), (EXPIRED, "evaluate/.*part-", (3, 0)),
        (GONE, "attack/.*part-00001", (1, 0)),
    ],
    ids=["token at the start", "token in the attack", "token in the evaluation", "bucket in the attack"],
)  # fmt: skip
def test_storage_error_in_mid_run_ends_it_resumably(
    object_store: ObjectStore, fault_proxy: FaultProxy, tmp_path: Path, tiny: MakeConfig,
    refusal: tuple[int, str, str], at: str, written: tuple[int, int],
) -> None:  # fmt: skip
    """The server refuses every request from one write on: at the start, in the attack or in the evaluation."""
    status, code, message = refusal
    config = tiny(name=f"gone-{code}-{at[:3]}".lower(), compute={"executor": "debug"})
    file = tmp_path / "gone.yaml"
    file.write_text(yaml.safe_dump(config.with_changes(storage=object_store.uri("gone")).model_dump(mode="json")))
    fault_proxy.refuse(status, code, at=at)
    ended = CliRunner().invoke(main, ["run", str(file)])
    assert ended.exit_code == 1
    last = " ".join(ended.stderr.split())
    assert re.search(message, last), last
    assert "Traceback" not in last
    fault_proxy.pass_on()
    store = Store(object_store.uri("gone")).child(config.name)
    stages = [path.split("/")[0] for path in store.all_files() if path.endswith(".parquet")]
    assert (stages.count("attack"), stages.count("evaluate")) == written, "the fault fell in another stage"
    again = CliRunner().invoke(main, ["run", "--json", str(file)])
    assert again.exit_code == 0, again.stderr
    here = pipeline.run(config, executor=DebugExecutor()).to_json()
    assert json.loads(again.stdout)["accuracy"] == here["accuracy"]
