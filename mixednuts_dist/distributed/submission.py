"""Runs as Ray jobs, through a cluster's dashboard.

With a job travels the current folder (the configuration, classifier files, a checkout's package), without what
`.gitignore` names; an installed package travels beside it. Its dependencies are the nodes' own, or `uv run` makes them
from pyproject.toml. No environment variable travels: the jobs API shows them to everyone, so credentials belong to the
nodes' roles. Ray refuses a submission id that was used before, so none is given: a run is identified by its run id and
resumed from its storage.
"""

import asyncio
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.job_submission import JobStatus, JobSubmissionClient

from ..errors import ClusterError

_PACKAGE = Path(__file__).parents[1]
_STAYS = [".git", ".venv", "runs"]  # beside what .gitignore names
_UV = ("uv", "run", "--no-dev")


def submit_job(address: str, arguments: Sequence[str], *, folder: Path, run_id: str, with_uv: bool) -> str:
    """Start `mixednuts ARGUMENTS` on the cluster whose dashboard answers at `address`; returns the submission id.

    Raises:
        ClusterError: where nothing answers, the upload is refused, or uv has no project to install.
    """
    if with_uv and not (folder / "pyproject.toml").is_file():
        raise ClusterError(f"--install-deps installs what {folder}/pyproject.toml declares, and there is no such file")
    command = [*(_UV if with_uv else ()), "python", "-m", _PACKAGE.name, *arguments]
    entrypoint, declared, metadata = shlex.join(command), runtime_env(folder), {"run_id": run_id}
    return str(
        _asked(
            address, lambda client: client.submit_job(entrypoint=entrypoint, runtime_env=declared, metadata=metadata)
        )
    )


def runtime_env(folder: Path) -> dict[str, Any]:
    """What the job's driver and workers find: `folder`, and the package where it does not lie in there."""
    declared: dict[str, Any] = {"working_dir": str(folder), "excludes": _STAYS}
    if not (folder / _PACKAGE.name / "__init__.py").is_file():
        declared["py_modules"] = [str(_PACKAGE)]
    return declared


def follow_job(address: str, submission_id: str, show: Callable[[str], None]) -> bool:
    """Show the job's log until it ends; True where it succeeded."""

    async def follow(client: JobSubmissionClient) -> None:
        async for text in client.tail_job_logs(submission_id):
            show(text)

    _asked(address, lambda client: asyncio.run(follow(client)))
    status: JobStatus = _asked(address, lambda client: client.get_job_status(submission_id))
    return status == JobStatus.SUCCEEDED


def _asked(address: str, question: Callable[[JobSubmissionClient], Any]) -> Any:
    try:
        return question(JobSubmissionClient(address))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"the cluster's dashboard at {address}: {error}") from error
