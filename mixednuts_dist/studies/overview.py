"""The page `studies/index.html`: every finished study of a run, with its figure, findings and files."""

import json
from typing import Any

from markupsafe import Markup

from ..config.register import STUDIES
from ..config.run_config import RunConfig
from ..errors import MissingArtifact
from ..reports.templates import rendered
from ..storage.store import Store

INDEX = "studies/index.html"
FILES = ("table.csv", "table.tex", "study.json", "figure.svg", "figure.pdf")


def write_overview(store: Store, config: RunConfig) -> str:
    """Write the page of all finished studies of the run and return its address; the page links their files."""
    there = {name for name in store.names("studies") if name != INDEX.rpartition("/")[2]}
    known = [*(name for name in STUDIES.names() if name in there), *sorted(there - set(STUDIES.names()))]
    found = {name: content for name in known if (content := _study(store, name)) is not None}
    figures = {name: Markup(store.read(f"studies/{name}/figure.svg").decode()) for name in found}
    page = rendered(
        "studies", "overview.html",
        run_id=config.run_id(), name=config.name, studies=found, figures=figures, files=FILES,
    )  # fmt: skip
    store.write(INDEX, page.encode())
    return store.address(INDEX)


def _study(store: Store, name: str) -> dict[str, Any] | None:
    """Return what a study has stored as JSON, or None if it is not finished."""
    try:
        content = json.loads(store.read(f"studies/{name}/study.json"))
    except (MissingArtifact, ValueError):
        return None
    return content if isinstance(content, dict) else None
