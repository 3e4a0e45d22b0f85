"""Elastic jobs come back from storage when too many nodes are lost: into any number of ranks, at the bits of the checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ckptd.storage.catalog import Catalog
from ckptd.storage.names import WorldName, parse, run_of_world
from ckptd.storage.open_store import open_store
from ckptd.storage.reader import read_catalog
from tests.ckptd.nodes import Net, Node
from tests.ckptd.running import eventually
from tests.e2e.elastic import ElasticRun, Life
from tests.e2e.elastic_job import EXPERTS
from tests.e2e.test_elastic import assert_goes_on

pytestmark = pytest.mark.slow

EVERY, SHORT = 4, 9


class Folder:
    """A store in a folder that all nodes share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def settings(self) -> dict[str, str]:
        """Of daemons that persist often."""
        return {
            "store": f"file://{self.path}",
            "persist_every": str(EVERY),
            "persist_every_s": "0",
            "drain_timeout_s": "5",
        }

    def worlds(self, run: str) -> list[int]:
        """Those that are marked, the latest first."""
        if not self.path.exists():
            return []
        names = [parse(info.key) for info in open_store(f"file://{self.path}").list(f"e2e/{run}/")]
        return sorted((n.world for n in names if isinstance(n, WorldName)), reverse=True)

    def catalog(self, run: str, world: int) -> Catalog:
        return read_catalog(open_store(f"file://{self.path}"), "e2e", run_of_world(run, world))

    def committed(self, run: str) -> list[int]:
        """The ends of the checkpoints of the latest world, newest first."""
        worlds = self.worlds(run)
        found = self.catalog(run, worlds[0]).committed if worlds else ()
        return [checkpoint.id.end for checkpoint in found]


@pytest.fixture
def store(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ElasticRun]:
    with contextlib.closing(ElasticRun(tmp_path)) as made:
        yield made


def trains_and_ends(run: ElasticRun, nodes: Sequence[Node], store: Folder, total: int) -> Life:
    """A life that comes to its end, whose last state is durable then."""
    keep = frozenset(range(total + 1))
    life = run.life(nodes, total=total, patient_until=total, keep=keep)
    life.ends()
    eventually(lambda: store.committed(run.run)[:1] == [total], f"{total} is durable", timeout_s=30)
    return life


def test_what_two_ranks_left_in_storage_one_rank_goes_on_from(
    store: Folder, run: ElasticRun, tmp_path: Path
) -> None:
    """Both hosts are destroyed; a third one has never heard of the job."""
    with Net(3, replicas="0", **store.settings).up() as net:
        first = trains_and_ends(run, net.nodes[:2], store, SHORT)
        for node in net.nodes[:2]:
            node.lose()
        second = run.life(net.nodes[2:], slots=EXPERTS, total=SHORT + 2)
        second.ends()
        assert_goes_on(first, second, SHORT)
        assert "brought from storage" in second.events("world")[0]["reason"], run.logs
