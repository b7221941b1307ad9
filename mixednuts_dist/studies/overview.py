"""`studies/index.html`: every finished study of a run on one page, with its figure, findings and files."""

import json
from typing import Any

from ..config.register import STUDIES
from ..config.run_config import RunConfig
from ..errors import MissingArtifact
from ..reports.drawing import PAPER
from ..reports.templates import rendered
from ..storage.store import Store

INDEX = "studies/index.html"
_FILES = ("table.csv", "table.tex", "table.md", "study.json", *(f"figure-{frame.name}.pdf" for frame in PAPER))


def write_overview(store: Store, config: RunConfig) -> str:
    """Write the page anew from the studies that lie in the run's folder; returns its address.

    Figures and files are linked by relative paths, so the page opens from the folder or from a copy of it.
    """
    there = {name for name in store.names("studies") if name != INDEX.rpartition("/")[2]}
    known = [*(name for name in STUDIES.names() if name in there), *sorted(there - set(STUDIES.names()))]
    found = {name: content for name in known if (content := _study(store, name)) is not None}
    page = rendered("studies", "overview.html", run_id=config.run_id(), name=config.name, studies=found, files=_FILES)
    store.write(INDEX, page.encode())
    return store.address(INDEX)


def _study(store: Store, name: str) -> dict[str, Any] | None:
    """What a study has stored as JSON; None for what is no finished study."""
    try:
        content = json.loads(store.read(f"studies/{name}/study.json"))
    except (MissingArtifact, ValueError):
        return None
    return content if isinstance(content, dict) else None
