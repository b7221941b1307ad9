"""The files of the README's demo in a real object store."""

import pytest

from tests.helpers.drivers import STAGES, everything, leftovers, rows
from tests.helpers.object_store import ObjectStore
from tests.helpers.runs import MainJob


@pytest.mark.alone
@pytest.mark.timeout(420)
def test_every_row_is_there_once_and_nothing_that_should_not_be(main_job: MainJob, object_store: ObjectStore) -> None:
    run = f"{main_job.storage}/digits"
    found = rows(run)
    assert sorted(found) == [(stage, i) for stage in STAGES for i in range(450)]
    for name, stage in {"rob": "attack", "mixed": "evaluate"}.items():
        kept = {"attack": "rob_broken", "evaluate": "robust"}[stage]
        robust = sum(found[stage, i][kept] == (stage == "evaluate") for i in range(450))
        assert robust == main_job.results["accuracy"][name]["robust"]["correct"]
    assert leftovers(run) == []
    assert object_store.secret not in main_job.stderr
    assert object_store.secret.encode() not in everything(run)
