"""`mixednuts export`: a run's mixture as a folder that others can load, with what was measured of it."""

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import InvalidInputError, StoreError
from ..uris import is_black_box
from .card import model_card
from .graphs import export_graphs
from .loading import ROLES, DeployedRun
from .pretrained import StoredBase, write_folder

CARD = "README.md"
_CURVE = "tradeoff.png"
_CURVE_SOURCES = ("report/tradeoff-5.5in.png", "report/tradeoff.png")  # the second of the release before


def export_run(run: DeployedRun, folder: Path, *, formats: Sequence[str] = (), address: str = "") -> list[str]:
    """Write safetensors, parameters, graphs and the model card of a run's mixture; returns the files' names.

    Args:
        formats: of graphs beside the weights: "torch", "onnx" or both.
        address: what a reader will load it as, `hf:ORG/NAME` for instance; the folder itself by default.

    Raises:
        BaseClassifierError, FingerprintMismatch: as in `DeployedRun.base`.
        InvalidInputError: for a folder that is a file, or a format that these classifiers cannot have.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"--to {folder} is a file; give the name of a folder")
    black = [role for role in ROLES if is_black_box(run.config[role])]
    if formats and black:
        raise InvalidInputError(
            f"{black[0]}={run.config[black[0]]!r} is a black box, of which there is no graph; leave --format out"
        )
    mixed = run.classifier()
    bases = {
        role: StoredBase(run.config[role], None if role in black else f"{role}.safetensors", run.checksums[role])
        for role in ROLES
    }
    about = {
        "run": {"id": run.run_id, "beta": run.chosen.beta, "threat": run.config["threat"]},
        "images": {"shape": list(run.image_shape), "classes": run.n_classes},
    }
    write_folder(mixed, folder, bases, about)
    differences = export_graphs(mixed, run.image_shape, folder, tuple(formats)) if formats else {}
    source = next((path for path in _CURVE_SOURCES if run.is_deployed and run.store.exists(path)), None)
    if source is not None:
        (folder / _CURVE).write_bytes(run.store.read(source))
    curve = _CURVE if source is not None else None
    card = model_card(run, address=address or str(folder), differences=differences, curve=curve)
    (folder / CARD).write_text(card, encoding="utf-8")
    return sorted(path.name for path in folder.iterdir())


def require_token(name: str) -> None:
    """Refuse to export for the hub where nothing could be uploaded afterwards.

    Raises:
        InvalidInputError: for what is no ORG/NAME.
        StoreError: where nobody is logged in.
    """
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InvalidInputError(f"--to hf:{name} is not of the form hf:ORG/NAME")
    if get_token() is None:
        raise StoreError(f"hf:{name}: there is no token to upload with; run `hf auth login`, or set HF_TOKEN")


def upload(folder: Path, name: str) -> str:
    """Put a folder on the Hugging Face hub as the model `name`, made if need be; returns its address.

    Raises:
        StoreError: where the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="MixedNUTS classifier"))
    except OSError as error:  # HfHubHTTPError and connection errors alike
        reason = " ".join(str(error).split())[:300]
        raise StoreError(f"hf:{name}: the upload failed ({reason}); the folder is {folder}") from error
