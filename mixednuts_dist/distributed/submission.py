"""Submit runs as Ray jobs through a cluster's dashboard.

Ray uploads the working folder (the configuration, classifier files, and perhaps a checkout of this package) without the
files that `.gitignore` names. If the folder does not contain this package, the package is uploaded separately. Its
dependencies must be installed on the nodes. No environment variables are sent, because the jobs API shows them to all
users; give the credentials to the roles of the nodes instead. No submission id is set, because Ray rejects an id that
was used before. A run is identified by its run id, and resumes from its storage.
"""

import asyncio
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from ..errors import ClusterError

_PACKAGE = Path(__file__).parents[1]
_STAYS = [".git", ".venv", "runs"]  # not uploaded, in addition to the names in .gitignore
_MOST_BYTES = 100 << 20  # the limit of the dashboard


def submit_job(address: str, arguments: Sequence[str], *, folder: Path, run_id: str) -> str:
    """Start `mixednuts ARGUMENTS` on the cluster whose dashboard answers at `address`; returns the submission id.

    Raises:
        ClusterError: if the dashboard is unreachable or rejects the upload.
    """
    _require_small(folder)
    command = ["python", "-m", _PACKAGE.name, *arguments]
    entrypoint, declared, metadata = shlex.join(command), runtime_env(folder), {"run_id": run_id}
    return str(
        _call(address, lambda client: client.submit_job(entrypoint=entrypoint, runtime_env=declared, metadata=metadata))
    )


def _require_small(folder: Path) -> None:
    """Raise ClusterError, which names the largest files, if the folder is too large for Ray's dashboard."""
    sizes = {path: path.stat().st_size for path in _travelling(folder)}
    total = sum(sizes.values())
    if total > _MOST_BYTES:
        largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:3]
        named = ", ".join(f"{path.relative_to(folder)} ({sizes[path] >> 20:,} MiB)" for path in largest)
        raise ClusterError(
            f"{folder} holds {total >> 20:,} MiB, and a job's folder may hold {_MOST_BYTES >> 20} MiB; the largest "
            f"files are {named}. Name them in .gitignore, and give weights and images as URIs or paths that every node "
            "can read (docs/run-on-a-cluster.md)"
        )


def _travelling(folder: Path) -> list[Path]:
    """Return the files that are uploaded: those that git lists or, without a repository, all except `_STAYS`."""
    try:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout.decode().split("\0")
        files = [folder / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        files = [*folder.rglob("*")]
    return [path for path in files if path.is_file() and path.relative_to(folder).parts[0] not in _STAYS]


def runtime_env(folder: Path) -> dict[str, Any]:
    """Return the runtime environment of a job: `folder` and, if the folder does not contain it, this package."""
    declared: dict[str, Any] = {"working_dir": str(folder), "excludes": _STAYS}
    if not (folder / _PACKAGE.name / "__init__.py").is_file():
        declared["py_modules"] = [str(_PACKAGE)]
    return declared


def follow_job(address: str, submission_id: str, show: Callable[[str], None]) -> bool:
    """Show the job's log until it ends; returns whether it succeeded."""

    async def follow(client: JobSubmissionClient) -> None:
        async for text in client.tail_job_logs(submission_id):
            show(text)

    _call(address, lambda client: asyncio.run(follow(client)))
    status: JobStatus = _call(address, lambda client: client.get_job_status(submission_id))
    return status == JobStatus.SUCCEEDED


def _call(address: str, request: Callable[[JobSubmissionClient], Any]) -> Any:
    try:
        return request(JobSubmissionClient(address))
    except AuthenticationError as error:
        raise ClusterError(
            f"the cluster at {address} requires a token. Set RAY_AUTH_MODE=token, and put the token into "
            "~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from error
    except (OSError, RuntimeError, ValueError, RayError) as error:  # the exceptions of requests are OSErrors
        raise ClusterError(f"the cluster's dashboard at {address}: {error}") from error
