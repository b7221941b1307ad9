"""The content hashes of the search and evaluate stages, and the stored result of the search."""

from ..config.config_file import read_json
from ..config.run_config import digest
from ..errors import ContentHashMismatch, DamagedFile, MissingArtifact
from ..storage.records import SearchResult
from ..storage.store import Store
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
        DamagedFile: if the file is not as written; it remains in its place.
        ContentHashMismatch: if the file belongs to another run.
    """
    result, content_hash = stored_search(opened.store)
    if content_hash != search_content_hash(opened):
        raise ContentHashMismatch(
            f"{opened.store.address(SELECTED)} has the content hash {content_hash}, this run has "
            f"{search_content_hash(opened)}; delete it and search again"
        )
    return result


def stored_search(store: Store) -> tuple[SearchResult, str]:
    """Return the search's result in a run's folder and the content hash of its inputs; errors as above."""
    address = store.address(SELECTED)
    try:
        content = read_json(store.read(SELECTED))
        if content.pop("digest") != digest(content):
            raise ValueError("its content has changed")
        return SearchResult.from_json(content["result"]), content["content_hash"]
    except MissingArtifact as error:
        raise MissingArtifact(
            f"the run has not been searched yet: {address} does not exist. Run: mixednuts search with the same "
            "configuration, or mixednuts run for all that is missing"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{address} is damaged ({error}): `mixednuts search` sets it aside and searches again"
        raise DamagedFile(message, address) from error
