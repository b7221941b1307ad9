"""`mixednuts status` in words and as JSON, and the speed, time left and hours that it computes from summaries."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from mixednuts_dist.cli import main
from mixednuts_dist.cli.status import WINDOW_SECONDS, RunStatus, StageStatus, print_status, stage_status
from mixednuts_dist.storage.records import PartitionSummary
from tests.helpers.object_store import ObjectStore
from tests.helpers.runs import Finished, tiny_file

ATTACK = StageStatus(
    "attack", "rob", 9, 12, 900, 700, 450, 5400.0,
    images_left=300, images_per_second=2.5, seconds_left=120.0, last_finished_seconds_ago=8.0,
    gpu_hours=1.5, gpu_hours_left=0.5, core_hours=0.0, core_hours_left=0.0,
)  # fmt: skip


def test_a_running_stage_has_age_speed_time_left_and_its_bill(capsys: pytest.CaptureFixture[str]) -> None:
    failed, name = ("s3://b/c10-3f2a1c9e/errors/00004.txt",), "c10-3f2a1c9e"
    found = RunStatus(
        name, f"s3://b/{name}", (ATTACK,), searched=False, reported=False, started=True, failed=failed, notes=()
    )
    print_status(found, Console(width=200))
    shown = capsys.readouterr().out.splitlines()
    assert any("9/12" in line and "50.0" in line and "[46.7, 53.3]" in line for line in shown)
    pace = "last images finished 8.0 s ago · 2.5 images/s, about 2 min 00 s to go"
    assert f"attack   {pace} · 1.5 GPU-hours, about 30 GPU-minutes to go" in shown
    assert shown[-1] == "failed   s3://b/c10-3f2a1c9e/errors/00004.txt"


def test_a_run_that_was_just_submitted_has_not_started(tmp_path: Path) -> None:
    config = tiny_file(tmp_path)
    shown = CliRunner().invoke(main, ["status", str(config)])
    assert shown.exit_code == 0
    assert "has not started" in shown.stdout
    assert "mixednuts attack" not in shown.stdout  # it would start a second driver
    found = json.loads(CliRunner().invoke(main, ["status", str(config), "--json"]).stdout)
    assert (found["started"], found["searched"], found["stages"]) == (False, False, [])
    alone = json.loads(CliRunner().invoke(main, ["status", str(config), "--json", "--set", "std=null"]).stdout)
    assert (alone["started"], alone["searched"]) == (False, None)


def test_a_deleted_bucket_is_not_a_run_that_has_not_started(tmp_path: Path, object_store: ObjectStore) -> None:
    config = tiny_file(tmp_path, storage="s3://no-such-bucket/runs")
    shown = CliRunner().invoke(main, ["status", str(config)])
    assert shown.exit_code == 1
    assert "s3://no-such-bucket: there is no such place" in shown.stderr
    assert object_store.secret not in shown.stderr


def test_a_look_at_a_finished_run_imports_neither_ray_nor_torch(tiny_run: Finished, tmp_path: Path) -> None:
    """Each takes seconds of CPU, which is most of what the command would take."""
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny_run.config.model_dump(mode="json")))
    looked = "import sys; from mixednuts_dist.cli import main; main(sys.argv[1:], standalone_mode=False); "
    told = "print(*{'ray', 'torch', 'numpy'}.intersection(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", looked + told, "status", str(config)], capture_output=True, text=True, check=True
    )
    assert "evaluate 3/3" in " ".join(shown.stdout.split())
    assert shown.stdout.splitlines()[-1] == "numpy"  # what reads Parquet


def test_verify_ignores_the_files_of_ray_tune(copied_run: Finished) -> None:
    state = copied_run.folder / "search" / "tune" / "0" / "basic-variant-state.json"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"\x80\x04pickled")
    shown = CliRunner().invoke(main, ["status", str(copied_run.folder), "--verify"])
    assert (shown.exit_code, "no checksum differs" in shown.stdout) == (0, True)
    state.rename(copied_run.folder / "search" / "selected.json")
    shown = CliRunner().invoke(main, ["status", str(copied_run.folder), "--verify"])
    assert (shown.exit_code, "1 of " in shown.stdout) == (1, True)


def summary(start: int, stop: int, finished: float, seconds: float, **changes: object) -> PartitionSummary:
    fields = {"clean_correct": 0, "robust": 0, "n_forward": 0, "n_backward": 0, "node": "a", **changes}
    return PartitionSummary("attack", 0, start, stop, seconds=seconds, finished=finished, **fields)


def status_at(now: float, n_images: int, *summaries: PartitionSummary) -> StageStatus:
    return stage_status("attack", "rob", SimpleNamespace(n_images=n_images, partitions=[]), summaries, now)


def test_speed_counts_recent_images() -> None:
    now = 10_000.0
    old = summary(0, 100, now - WINDOW_SECONDS - 1, 50.0)
    found = status_at(now, 220, old, summary(100, 110, now - 60, 40.0), summary(110, 120, now - 20, 30.0))
    assert found.images_per_second == pytest.approx(20 / 100)
    assert found.seconds_left == pytest.approx(100 / 0.2)
    assert found.last_finished_seconds_ago == 20
    assert found.core_hours == pytest.approx(120 / 3600)
    assert found.core_hours_left == pytest.approx(120 / 3600 * 100 / 120)
    assert found.gpu_hours == found.gpu_hours_left == 0


def test_shares_of_an_accelerator_count_as_what_they_are() -> None:
    half = summary(0, 10, 1.0, 3600.0, device="H200", n_devices=0.5)
    found = status_at(2.0, 40, half, summary(10, 20, 1.0, 3600.0, n_devices=4.0))
    assert (found.gpu_hours, found.core_hours) == (found.gpu_hours_left, found.core_hours_left) == (0.5, 4.0)


def test_a_run_without_workers_has_an_age_and_no_speed() -> None:
    found = status_at(1000.0 + 2 * WINDOW_SECONDS, 20, summary(0, 10, 1000.0, 5.0))
    assert (found.images_per_second, found.seconds_left) == (None, None)
    assert found.last_finished_seconds_ago == 2 * WINDOW_SECONDS
    nothing = status_at(1000.0, 20)
    assert (nothing.last_finished_seconds_ago, nothing.images_left) == (None, 20)


def test_speed_ignores_clocks_that_are_ahead() -> None:
    found = status_at(1000.0, 40, summary(0, 10, 2190.0, 5.0), summary(10, 20, 2200.0, 5.0))
    assert found.images_per_second == pytest.approx(20 / 15)
    assert found.last_finished_seconds_ago == 0
