"""Write the mixed classifier of a run and its results as a folder that others can load (`mixednuts export`)."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..config.config_file import read_json
from ..config.uris import ClassifierSource
from ..errors import DamagedFile, InvalidInputError, StoreError, reason_of
from ..reports.templates import rendered
from ..storage.code_files import code_of
from .loading import DeployedRun, StoredBase, write_folder

CARD = "README.md"
_RESULTS = "report/results.json"
_CURVE = "tradeoff.svg"


def export_run(run: DeployedRun, folder: Path, *, address: str = "") -> list[str]:
    """Write the weights, parameters and model card of a run's mixed classifier, and return the file names.

    Args:
        address: the argument of `load_pretrained` in the model card, such as `hf:ORG/NAME`; by default the folder.

    Raises:
        BaseClassifierError, ContentHashMismatch: as in `DeployedRun.base`.
        InvalidInputError: if the folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"--to {folder} is a file; give the name of a folder")
    mixed, inputs, store = run.classifier(), run.stored.inputs, run.stored.store
    code = _code_files(run)
    bases = {
        role: StoredBase(
            source.written, None if source.is_black_box else f"{role}.safetensors", inputs.checksums[role],
            code[role][1] if role in code else None,
        )
        for role, source in run.stored.config.classifiers.items()
    }  # fmt: skip
    about = {
        "run": {
            "id": run.run_id, "beta": run.chosen.beta, "threat": run.stored.config.threat.model_dump(mode="json")
        },
        "images": {"shape": list(inputs.image_shape), "classes": inputs.n_classes},
    }  # fmt: skip
    write_folder(mixed, folder, bases, about)
    for kept, name in code.values():
        (folder / name).write_bytes(code_of(store, kept))
    curve = _CURVE if run.is_deployed and store.exists(f"report/{_CURVE}") else None
    if curve is not None:
        (folder / curve).write_bytes(store.read(f"report/{curve}"))
    card = model_card(run, address=address or str(folder), curve=curve)
    (folder / CARD).write_text(card, encoding="utf-8")
    return sorted(path.name for path in folder.iterdir())


def _code_files(run: DeployedRun) -> dict[str, tuple[str, str]]:
    """Return the Python files that build base classifiers: role -> path in the run and name in the exported folder.

    If two different files have the same name, the second name begins with digits of the file's hash.
    """
    found = dict[str, tuple[str, str]]()
    for role, source in run.stored.config.classifiers.items():
        if kept := run.code.get(ClassifierSource(source.written).code_file):
            _, sha256, name = kept.split("/")
            is_taken = any(other == name and path != kept for path, other in found.values())
            found[role] = kept, f"{sha256}_{name}" if is_taken else name
    return found


def require_token(name: str) -> None:
    """Check that an upload to the hub is possible.

    Raises:
        InvalidInputError: if `name` is not of the form ORG/NAME.
        StoreError: if there is no token.
    """
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InvalidInputError(f"--to hf:{name} is not of the form hf:ORG/NAME")
    if get_token() is None:
        raise StoreError(f"hf:{name}: there is no token to upload with; run `hf auth login`, or set HF_TOKEN")


def upload(folder: Path, name: str) -> str:
    """Upload a folder to the Hugging Face hub as the model `name`, and return its address.

    Raises:
        StoreError: if the hub rejects the upload or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="MixedNUTS classifier"))
    except OSError as error:  # HfHubHTTPError and connection errors alike
        raise StoreError(f"hf:{name}: the upload failed ({reason_of(error)}); the folder is {folder}") from error


def model_card(run: DeployedRun, *, address: str, curve: str | None) -> str:
    """Return the model card in Markdown; `address` is what a reader loads, `curve` the file of the trade-off figure."""
    results = measured_results(run)
    front = _card_data(run, results).to_yaml()
    config, code = run.stored.config, _code_files(run)
    elsewhere = any(uri.written.startswith("py:") and role not in code for role, uri in config.classifiers.items())
    return rendered(
        "deployment", "model_card.md",
        run=run, config=config, inputs=run.stored.inputs, data=config.data.uri.written,
        threat=config.threat.threat_model(), results=results, front=front, address=json.dumps(address), curve=curve,
        code=[*dict.fromkeys(name for _, name in code.values())], code_elsewhere=elsewhere,
    )  # fmt: skip


def measured_results(run: DeployedRun) -> dict[str, Any] | None:
    """Return the content of the run's `report/results.json`; None if this beta was not attacked or no report exists."""
    store = run.stored.store
    if not run.is_deployed or not store.exists(_RESULTS):
        return None
    try:
        results: dict[str, Any] = read_json(store.read(_RESULTS))
        return results if "mixed" in results.get("accuracy", {}) else None
    except (ValueError, AttributeError, TypeError) as error:
        address = store.address(_RESULTS)
        raise DamagedFile(f"{address} is damaged ({error}): `mixednuts report` writes it again", address) from error


def _card_data(run: DeployedRun, results: dict[str, Any] | None) -> ModelCardData:
    """Return the front matter with the measured accuracies."""
    config, found = run.stored.config, []
    dataset, threat = config.data.uri.written, config.threat.threat_model()
    if results is not None:
        mixed = results["accuracy"]["mixed"]
        measured = {"clean accuracy": mixed["clean"], f"robust accuracy ({threat})": mixed["robust"]}
        found = [
            EvalResult(
                task_type="image-classification", dataset_type=dataset.partition(":")[0], dataset_name=dataset,
                metric_type="accuracy", metric_name=name, metric_value=round(count["percent"], 2),
            )
            for name, count in measured.items()
        ]  # fmt: skip
    return ModelCardData(
        library_name="mixednuts-dist",
        pipeline_tag="image-classification",
        tags=["adversarial-robustness", "mixednuts", "image-classification"],
        model_name=run.run_id if found else None,
        eval_results=found or None,
    )
