"""A store whose names stand for another run than before: ``run.json`` was removed, and a job began
anew under the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.memory.segment_file import Segment
from ckptd.storage.checkpoints.reader import read_catalog, read_identity, read_manifest
from ckptd.storage.checkpoints.verifier import verify_run
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.persistence.slots import descriptor, segment_store
from tests.ckptd.persistence.test_keeper import Desk, checkpoint


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    made = segment_store(tmp_path / "shm").create(descriptor(), 6, 1 << 20)
    yield made
    made.close()


def keep(desk: Desk, segment: Segment, end: int) -> None:
    """A checkpoint, and what follows from it."""
    checkpoint(desk, segment, end)
    assert desk.wait_settled().complete
    desk.keeper._aside.submit(lambda: None).result(30)


def test_retention_of_a_run_leaves_what_another_one_of_its_names_has_stored(
    segment: Segment, tmp_path: Path
) -> None:
    """The last two of each run stay. Those of the run before went as soon as the new one had
    committed two of its own, although only they could have brought it back. What was imported for
    the run is nobody's checkpoint, and stays, too.
    """
    url = f"file://{tmp_path}/store"
    store = open_store(url)
    imported = "job/run/import/model.safetensors"
    store.put(imported, [memoryview(b"a model")])
    desk = Desk(url, settle_s=0.0)
    desk.open()
    for end in (2, 4, 6):
        keep(desk, segment, end)
    before = read_identity(store, "job", "run")
    store.delete(["job/run/run.json"])
    again = Desk(url, settle_s=0.0)
    again.open()
    for end in (8, 10, 12):
        keep(again, segment, end)
    now = read_identity(store, "job", "run")
    assert before is not None
    assert now is not None
    run_ids = {
        c.id.end: read_manifest(store, c.manifests[0].key).run_id
        for c in read_catalog(store, "job", "run").committed
    }
    assert run_ids == {4: before.run_id, 6: before.run_id, 10: now.run_id, 12: now.run_id}
    assert store.info(imported) is not None
    report = verify_run(store, "job", "run")
    damage = [f for f in report.findings if "it is of run" not in f.what]
    assert [f.key for f in damage if f.severity == "error"] == []
