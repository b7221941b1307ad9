"""The content hashes of the search and evaluate stages, and the stored result of the search."""

from ..config.run_config import digest
from ..errors import ContentHashMismatch, MissingArtifact
from ..storage.damage import read_signed_json
from ..storage.records import SearchResult, from_plain
from ..storage.tables import damaged
from .runs import Run

SELECTED = "search/selected.json"


def search_content_hash(opened: Run) -> str:
    """Return 8 hex digits of everything that determines the search's files."""
    return digest({"attack": opened.attack_content_hash, "search": opened.config.determinants()["search"]})


def evaluate_content_hash(opened: Run, search: SearchResult | None) -> str:
    """Return 8 hex digits of everything that determines the evaluate stage's rows.

    Args:
        search: the result that names the deployed mixed classifier; None for AutoAttack on `rob` alone.
    """
    values = opened.config.determinants()
    if search is None:
        keys = ("version", "data", "rob", "threat", "seed", "partition_size", "precision", "evaluate")
        return digest({**{key: values[key] for key in keys}, "checksums": opened.inputs.checksums})
    return digest({
        "attack": opened.attack_content_hash,
        "deployed": deployed_settings(search),
        "evaluate": values["evaluate"],
        "rounds": [done.content_hash for done in search.rounds],
        "warm_start_on": opened.config.search.first if values["evaluate"]["warm_start"] else 0,
    })  # fmt: skip


def deployed_settings(search: SearchResult) -> dict[str, object]:
    """Return plain values that are equal only for the same deployed mixed classifier."""
    return {"alpha_d": search.surrogate_alpha, **search.deployed().settings()}


def read_search_result(opened: Run) -> SearchResult:
    """Read `search/selected.json`.

    Raises:
        MissingArtifact: if the search has not run.
        DamagedFile: if the file has changed since it was written. This function does not rename it.
        ContentHashMismatch: if the file belongs to another run.
    """
    address = opened.store.address(SELECTED)
    try:
        written = opened.store.read(SELECTED)
    except MissingArtifact as error:
        raise MissingArtifact(
            f"the run has not been searched yet: {address} does not exist. Run: mixednuts search with the same "
            "configuration, or mixednuts run for all that is missing"
        ) from error
    try:
        content = read_signed_json(written)
        result, content_hash = from_plain(SearchResult, content["result"]), content["content_hash"]
    except (ValueError, LookupError) as error:
        raise damaged(address, error, written) from error
    if content_hash != search_content_hash(opened):
        raise ContentHashMismatch(
            f"{address} has the content hash {content_hash}, this run has {search_content_hash(opened)}; delete it and "
            "search again"
        )
    return result
