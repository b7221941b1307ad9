"""Runs as Ray jobs on a real local head: status, logs, stop, and the same run again from what is written."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from mixednuts_dist.distributed.submission import runtime_env, submit_job
from mixednuts_dist.errors import ClusterError
from mixednuts_dist.images.datasets import open_dataset
from tests.helpers.local_head import Head, awaited, job_of, stop
from tests.helpers.runs import tiny_content

ROOT = Path(__file__).parents[2]
CONFIG = "jobs/configs/digits.yaml"
N_IMAGES = 24

pytestmark = pytest.mark.alone


def overrides(storage: Path) -> list[str]:
    """The digits run, made tiny."""
    tiny = tiny_content(storage, name="digits")
    settings = {"data.n": N_IMAGES, "partition_size": 1, "attack.n_iter": 120, "attack.n_target_classes": 6}
    settings |= {f"search.{key}": value for key, value in tiny["search"].items()}
    settings |= {f"evaluate.{key}": value for key, value in tiny["evaluate"].items()}
    settings |= {"storage": str(storage), "compute.num_workers": 2}
    return [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]


def written(storage: Path) -> dict[Path, int]:
    """The finished partitions of the attack, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in storage.glob("*/attack/*/part-*.parquet")}


@pytest.mark.timeout(420)
def test_a_stopped_job_goes_on_as_another_one(cluster: Head, tmp_path: Path) -> None:
    address = ["--address", cluster.dashboard]
    plain = cluster.command(
        "ray", "job", "submit", *address, "--no-wait", "--working-dir", str(ROOT),
        "--", "python", "jobs/run.py", CONFIG, *overrides(tmp_path),
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    first = re.search(r"raysubmit_\w+", plain.stdout + plain.stderr)
    assert first is not None
    awaited(lambda: bool(written(tmp_path)), "the first partition")
    assert job_of(cluster, first[0])["status"] == "RUNNING"
    stop(cluster, first[0])
    awaited(lambda: job_of(cluster, first[0])["status"] == "STOPPED", "the job to end")
    assert f"attack   0/{N_IMAGES} images" in job_of(cluster, first[0], "/logs")["logs"]
    kept = written(tmp_path)
    assert 0 < len(kept) < N_IMAGES

    again = cluster.command("mixednuts", "submit", CONFIG, *address, *overrides(tmp_path), cwd=ROOT)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"attack   {N_IMAGES}/{N_IMAGES} images" in again.stdout
    assert kept.items() <= written(tmp_path).items()
    assert sorted(pq.read_table(sorted(written(tmp_path)))["sample_id"].to_pylist()) == list(range(N_IMAGES))
    second = re.search(r"is job (raysubmit_\w+)", again.stderr)
    assert second is not None
    assert second[1] != first[0]
    assert job_of(cluster, second[1])["status"] == "SUCCEEDED"

    run_id = next(tmp_path.glob("*/runs/*")).name
    assert run_id in again.stderr
    logs = [
        json.loads(line)
        for path in cluster.folder.glob("session_latest/logs/worker-*.err")
        for line in path.read_text().splitlines()
        if line.startswith("{")
    ]
    partitions = [line for line in logs if line.get("run") == run_id and "partition" in line]
    assert {line["partition"] for line in partitions} == set(range(N_IMAGES))
    assert all(line["node"] and line["seconds"] > 0 for line in partitions)


def test_a_job_that_fails_says_so(cluster: Head, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(tiny_content(tmp_path / "runs", std="py:nets.py:std")))
    (tmp_path / "nets.py").write_text("def std():\n    raise RuntimeError('no weights here')\n")
    shown = cluster.command("mixednuts", "submit", "bad.yaml", "--address", cluster.dashboard, cwd=tmp_path)
    assert shown.returncode == 1
    assert "no weights here" in shown.stdout
    assert re.search(r"ClusterError: job raysubmit_\w+ did not succeed", shown.stderr)


@pytest.mark.timeout(420)
def test_driver_finds_files_next_to_its_configuration(cluster: Head, tmp_path: Path) -> None:
    """Classifiers and images are named relative to the configuration, the run relative to where one types."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    images, labels = open_dataset("digits").read(0, 24)
    np.savez(home / "images.npz", images=images.numpy(), labels=labels.numpy())
    (home / "nets.py").write_text("from mixednuts_dist.classifiers.factories import demo_rob, demo_std\n")
    named = {"std": "py:nets.py:demo_std", "rob": "py:nets.py:demo_rob", "data": {"uri": "npz:images.npz", "n": 16}}
    (home / "mine.yaml").write_text(yaml.safe_dump({**tiny_content(Path("runs"), **named), "storage": "runs"}))
    shown = cluster.command("mixednuts", "run", "../home/mine.yaml", "--address", cluster.address, cwd=elsewhere)
    assert shown.returncode == 0, shown.stderr
    (results,) = elsewhere.glob("runs/*/runs/*/report/results.json")
    assert json.loads(results.read_text())["accuracy"]["mixed"]["robust"]["total"] == 16
    assert not (home / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "storage='runs' would be in the job's temporary folder"),
        (["--set", "storage=/tmp"], "the cluster's dashboard at http://127.0.0.1:1: "),
    ],
)
def test_a_submission_that_cannot_work_is_refused_in_words(tmp_path: Path, arguments: list[str], message: str) -> None:
    import subprocess
    import sys

    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**tiny_content(tmp_path), "storage": "runs"}))
    command = [sys.executable, "-m", "mixednuts_dist", "submit", "tiny.yaml", "--address", "http://127.0.0.1:1"]
    shown = subprocess.run(
        [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert shown.returncode == 1
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_the_package_travels_where_the_folder_does_not_hold_it(tmp_path: Path) -> None:
    assert runtime_env(ROOT) == {"working_dir": str(ROOT), "excludes": [".git", ".venv", "runs"]}
    declared = runtime_env(tmp_path)
    assert declared["py_modules"] == [str(ROOT / "mixednuts_dist")]
    assert "env_vars" not in declared


def test_submit_rejects_a_large_folder_with_its_largest_files(tmp_path: Path) -> None:
    for name, n_mib in (("std.pth", 90), ("images.npz", 20), (".venv/big", 500)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(n_mib << 20)
    with pytest.raises(ClusterError, match=r"holds 110 MiB.* 100 MiB; .*std\.pth \(90 MiB\).*every node can read"):
        submit_job("http://127.0.0.1:1", ["run", "mine.yaml"], folder=tmp_path, run_id="mine")
