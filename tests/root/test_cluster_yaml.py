"""cluster.yaml against Ray's own schema and resource checks, and the KubeRay manifest, offline."""

import copy
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml
from ray.scripts.symmetric_run import symmetric_run

from mixednuts_dist.cli import run
from mixednuts_dist.config.run_config import load_config

ROOT = Path(__file__).parents[2]
PATH = ROOT / "cluster.yaml"
CONTENT: dict[str, Any] = yaml.safe_load(PATH.read_text())
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "jobs" / "kuberay.yaml").read_text())


def test_rays_launcher_accepts_it() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(CONTENT)))


def test_the_head_may_start_workers() -> None:
    """Ray's default role may not pass the workers' role, and its autoscaler imports boto3."""
    assert CONTENT["available_node_types"]["head"]["node_config"]["IamInstanceProfile"]
    assert "iam:PassRole" in PATH.read_text()
    (install,) = [command for command in CONTENT["setup_commands"] if "pip install" in command]
    assert install.startswith("PIP_BREAK_SYSTEM_PACKAGES=1 ") and "--break-system-packages" not in install
    assert any("--extra aws" in command for command in CONTENT["setup_commands"])
    assert 'aws = ["boto3' in (ROOT / "pyproject.toml").read_text()


def test_the_rayjob_has_what_kuberay_asks_for() -> None:
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("ray.io/v1", "RayJob")
    spec = MANIFEST["spec"]
    rules = spec["deletionStrategy"]["deletionRules"]
    assert {rule["condition"]["jobStatus"] for rule in rules} == {"SUCCEEDED", "FAILED"}
    assert {rule["policy"] for rule in rules} == {"DeleteCluster"}  # with autoscaling
    assert not {"shutdownAfterJobFinishes", "ttlSecondsAfterFinished"} & set(spec), "excluded by deletionRules"
    assert 0 < spec["preRunningDeadlineSeconds"] < spec["activeDeadlineSeconds"]
    cluster = MANIFEST["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "pyproject.toml").read_text()
    assert cluster["enableInTreeAutoscaling"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert (workers["replicas"], workers["minReplicas"]) == (0, 0)
    for group in (head, workers):
        assert group["template"]["spec"]["restartPolicy"] == "Never"  # autoscaler v2 refuses anything else
        (container,) = group["template"]["spec"]["containers"]
        assert container["name"]
        assert not container["image"].endswith(":latest")
        (volume,) = group["template"]["spec"]["volumes"]
        assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"]]
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_rayjobs_command_is_one_that_runs() -> None:
    python, script, config, *options = shlex.split(MANIFEST["spec"]["entrypoint"])
    assert python == "python"
    assert (ROOT / script.removeprefix("/app/")).is_file()
    assert options[::2] == ["--set"] * (len(options) // 2)
    loaded = load_config(ROOT / config.removeprefix("/app/"), options[1::2])
    assert loaded.storage.startswith("s3://")
    assert loaded.compute.num_gpus == 1
    (workers,) = MANIFEST["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert loaded.compute.num_workers == workers["maxReplicas"]


def test_the_sbatch_script_is_sound_and_its_commands_exist() -> None:
    path = ROOT / "jobs" / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", text, re.MULTILINE))
    assert {"requeue", "open-mode", "signal", "nodes", "ntasks-per-node"} <= set(options)
    assert options["ntasks-per-node"] == "1"
    assert {"account", "partition"} <= set(re.findall(r"^##SBATCH --([\w-]+)=", text, re.MULTILINE))
    assert "uv sync --no-dev" in text
    assert "UV_NO_SYNC=1" in text
    assert "export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600" in text
    command = shlex.split(text[text.index("srun ") :].partition("&\n")[0].replace("\\\n", " "))
    ray, ours = command[: command.index("--")], command[command.index("--") + 1 :]
    offered = symmetric_run.params
    assert {"--address", "--min-nodes"} <= {name for option in offered for name in option.opts}
    assert ray[ray.index("ray") + 1] == "symmetric-run"
    assert ours[:4] == ["uv", "run", "mixednuts", "run"]
    assert {option for option in ours if option.startswith("--")} <= {name for o in run.params for name in o.opts}


def test_the_skypilot_task_runs_a_command_of_ours() -> None:
    task = yaml.safe_load((ROOT / "jobs" / "skypilot.yaml").read_text())
    assert {"name", "resources", "num_nodes", "workdir", "envs", "setup", "run"} == set(task)
    assert (ROOT / task["envs"]["CONFIG"]).is_file()
    assert task["envs"]["STORAGE"] is None, "it must be given at launch"
    command = shlex.split(task["run"])
    assert command[:5] == ["uv", "run", "--no-dev", "mixednuts", "run"]
    assert command[5:] == ["$CONFIG", "--set", "storage=$STORAGE"]
