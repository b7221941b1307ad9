"""Measure the seconds and memory that each command needs on a run of very many images.

Run `python -m benchmarks.scale -n 1000000`. The default is 10,000 images. `--data s3://bucket/prefix` stores the run in
a bucket. With `--classes 1000`, the logits are as wide as those of ImageNet (28 GB per million images). The rows are
synthetic, because only their number matters. A few blocks of random logits are repeated and written with their
summaries and index, as the stages write them. Each command then runs as a separate process, and the system reports its
wall-clock and CPU seconds and its peak memory. `run` on a finished run does what a resumed run does before its first
partition.

With `--data`, all files are kept, and the same command continues with the steps that are not finished. For a run in a
bucket, the images, the configuration and the numbers are in a temporary folder, whose path is printed first.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from mixednuts_dist.attacks.budget import WARM_START
from mixednuts_dist.config.run_config import RunConfig, digest, load_config, parse_config
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.stages.red_flags import FLAGS
from mixednuts_dist.stages.runs import Run, finished_partitions, open_run
from mixednuts_dist.stages.search_result import evaluate_content_hash, read_search_result
from mixednuts_dist.storage.index import IndexWriter
from mixednuts_dist.storage.partitions import Partition, rows_folder
from mixednuts_dist.storage.records import PartitionSummary
from mixednuts_dist.storage.store import concurrently
from mixednuts_dist.storage.tables import FLAG, SURVIVED, encode_table

_PARTITION_SIZE = 100
_BLOCKS = 16  # distinct blocks of logits; ten thousand partitions repeat them
_WIDE = """
import torch

def net(classes, seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))
"""
# A separate small process, because Linux counts the peak memory of the starting process for the started one too.
_LAUNCHER = """
import json, os, subprocess, sys, time
started = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
seconds, cpu_seconds = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": usage.ru_maxrss / 1024}))
sys.exit(os.waitstatus_to_exitcode(status))
"""
_LIFT = 4.0  # added to the labeled class's logit, so that most synthetic images are right and some are not


def run(n_images: int = 10_000, data: str | None = None, classes: int = 10) -> dict[str, Any]:
    """Print one line per command to stderr, and return all numbers.

    Args:
        data: where the synthetic run is stored: a folder or any fsspec URI; a temporary folder by default.
        classes: width of the logits; 10, or any number from 11 on.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if data:
            beside = (
                Path(tempfile.gettempdir()) / f"mixednuts-scale-{digest({'data': data})}"
                if "://" in data
                else Path(data)
            )
            folder = beside / f"{n_images}-{classes}"
            sys.stderr.write(f"{folder}\n")
        folder.mkdir(parents=True, exist_ok=True)
        config_file, kept = folder / "scale.yaml", folder / "measured.json"
        if not config_file.exists():
            storage = data if data and "://" in data else f"{folder}/runs"
            config = _configuration(folder, n_images, classes, storage)
            config_file.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        opened = open_run(load_config(str(config_file)))
        result: dict[str, Any] = {"images": n_images, "classes": classes, "partitions": len(opened.partitions)}
        result |= json.loads(kept.read_text()) if kept.exists() else {}
        steps: dict[str, Callable[[], Any]] = {
            "write_attack_seconds": lambda: _write_attack(opened),
            "status": lambda: _measured("status", config_file),
            "search": lambda: _measured("search", config_file),
            "write_evaluate_seconds": lambda: _write_evaluate(opened),
            "status_of_all": lambda: _measured("status", config_file),
            "report": lambda: _measured("report", config_file),
            "resume": lambda: _measured("run", config_file),
            "verify": lambda: _measured("status", config_file, "--verify"),
        }
        for name in [name for name in steps if name not in result]:
            result[name] = steps[name]()
            kept.write_text(json.dumps(result))
    return result


def _configuration(folder: Path, n_images: int, classes: int, storage: str) -> RunConfig:
    """Write images and return a configuration of the demo classifiers, or of random ones with more classes.

    The grid is small, and there are no refinement rounds, because these would run a real attack.
    """
    draw = np.random.default_rng(0)
    digits = open_dataset("digits")
    images, labels = digits.read(0, len(digits))
    chosen = draw.integers(len(labels), size=n_images)
    pixels = (images.numpy() * 255).astype(np.uint8)[chosen].transpose(0, 2, 3, 1)
    np.savez(folder / "images.npz", images=pixels, labels=labels.numpy()[chosen])
    (folder / "wide.py").write_text(_WIDE, encoding="utf-8")
    wide = [f"py:{folder}/wide.py:net?classes={classes}&seed={seed}" for seed in (0, 1)]
    std, rob = ("demo:std", "demo:rob") if classes == len(set(labels.tolist())) else wide
    return parse_config({
        "name": f"scale-{n_images}", "data": {"uri": f"npz:{folder}/images.npz"}, "std": std, "rob": rob,
        "threat": {"eps": 0.15}, "partition_size": _PARTITION_SIZE, "storage": storage,
        "search": {
            "beta": 0.95, "betas": [0.95, 0.9], "rounds": 0,
            "scales": [0.5, 5.0], "powers": [1.0, 3.0], "biases": [-0.5, 0.0],
        },
    })  # fmt: skip


def _write_attack(opened: Run) -> float:
    labels_N = torch.from_numpy(open_dataset(opened.config.data.uri).labels)

    def columns(part: Partition, noise: list[Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        labels_B = labels_N[part.start : part.stop]
        clean_BK, attacked_BK, std_BK = map(_logits, noise, [labels_B] * 3, (_LIFT, _LIFT / 2, 2 * _LIFT))
        broken_B = attacked_BK.argmax(dim=1) != labels_B
        margin_B = attacked_BK.softmax(dim=1).amax(dim=1).double()
        values = {
            "sample_id": torch.arange(part.start, part.stop), "label": labels_B, "rob_clean": clean_BK,
            "rob_attacked": attacked_BK, "margin": margin_B, "log_one_minus_margin": torch.log1p(-margin_B),
            "rob_broken": broken_B, "x_adv": torch.zeros(len(part), *opened.inputs.image_shape),
            "std_clean": std_BK, "std_attacked": -std_BK, "std_broken": torch.ones_like(broken_B),
            "std_at_rob_attacked": std_BK,
        }  # fmt: skip
        return values, clean_BK.argmax(dim=1) == labels_B, ~broken_B

    return _write(opened, "attack", opened.attack_content_hash, columns)


def _write_evaluate(opened: Run) -> float:
    labels_N = torch.from_numpy(open_dataset(opened.config.data.uri).labels)
    attacks = (WARM_START, *opened.config.evaluate.attacks)

    def columns(part: Partition, noise: list[Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        labels_B = labels_N[part.start : part.stop]
        clean_BK, attacked_BK = map(_logits, noise, [labels_B] * 2, (_LIFT, _LIFT / 2))
        right_B = clean_BK.argmax(dim=1) == labels_B
        robust_B = right_B & (attacked_BK.argmax(dim=1) == labels_B)
        values = {
            "sample_id": torch.arange(part.start, part.stop), "label": labels_B, "mixed_clean": clean_BK,
            "mixed_attacked": attacked_BK, "clean": right_B, "robust": robust_B,
            **{f"{SURVIVED}{attack}": robust_B for attack in attacks},
            **{f"{FLAG}{flag}": torch.zeros_like(robust_B) for flag in FLAGS},
            "x_adv": torch.zeros(len(part), *opened.inputs.image_shape),
        }  # fmt: skip
        return values, right_B, robust_B

    return _write(opened, "evaluate", evaluate_content_hash(opened, read_search_result(opened)), columns)


def _logits(noise_BK: Tensor, labels_B: Tensor, lift: float) -> Tensor:
    """Return random logits, with that of the labeled class lifted by a random part of `lift`."""
    logits_BK = noise_BK[: len(labels_B)].clone()
    rows_B = torch.arange(len(labels_B))
    logits_BK[rows_B, labels_B] += lift * logits_BK[:, -1].sigmoid()
    return logits_BK


def _write(opened: Run, stage: str, content_hash: str, columns: Any) -> float:
    """Write the missing files and the index as worker and driver do, and return the seconds taken."""
    started, generator = time.perf_counter(), torch.Generator().manual_seed(0)
    finished = finished_partitions(opened, stage, content_hash)
    todo = [partition for partition in opened.partitions if partition not in finished]
    shape = 3, _PARTITION_SIZE, opened.inputs.n_classes
    noise = [list(torch.randn(shape, generator=generator)) for _ in range(_BLOCKS)]
    index = IndexWriter(opened.rows, stage, content_hash, finished)

    def write(part: Partition) -> PartitionSummary:
        values, right_B, robust_B = columns(part, noise[part.index % _BLOCKS])
        summary = PartitionSummary(
            stage=stage, partition=part.index, start=part.start, stop=part.stop, clean_correct=int(right_B.sum()),
            robust=int(robust_B.sum()), seconds=1.0, n_forward=len(part), n_backward=len(part), node="made-up",
            finished=time.time(), classifier="rob" if stage == "attack" else "mixed",
        )  # fmt: skip
        content = encode_table(values, content_hash, summary)
        opened.rows.write(f"{rows_folder(stage, content_hash)}/{part.file_name}", content)
        return replace(summary, n_bytes=len(content))

    for start in range(0, len(todo), 1000):
        for summary in concurrently(write, todo[start : start + 1000]):
            index.add(summary)
    index.flush()
    return time.perf_counter() - started


def _measured(command: str, config: Path, *options: str) -> dict[str, float]:
    """Run a command, and return its seconds, its CPU seconds and the peak memory of its process in MiB."""
    asked = [sys.executable, "-m", "mixednuts_dist", command, str(config), *options]
    told = subprocess.run([sys.executable, "-c", _LAUNCHER, *asked], capture_output=True, text=True, check=False)
    if told.returncode:
        raise RuntimeError(f"mixednuts {' '.join([command, *options])}: {told.stderr[-2000:]}")
    found: dict[str, float] = json.loads(told.stdout)
    line = "{seconds:8.1f} s {cpu_seconds:8.1f} s of CPU {peak_mib:8.0f} MiB".format(**found)
    sys.stderr.write(f"{' '.join([command, *options]):16} {line}\n")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", dest="n_images", type=int, default=10_000, help="how many images")
    parser.add_argument("--data", help="where the run is stored: a folder or any fsspec URI")
    parser.add_argument("--classes", type=int, default=10, help="width of the logits")
    print(json.dumps(run(**vars(parser.parse_args())), indent=2))
