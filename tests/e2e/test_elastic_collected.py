"""The worlds of a live elastic job in a store: what is durable is a whole state at every moment,
and what was superseded is deleted.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from ckptd.storage.checkpoints.names import run_of_incarnation
from ckptd.storage.checkpoints.verifier import verify_run
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.nodes import Net
from tests.ckptd.running import eventually
from tests.e2e.elastic import ElasticRun
from tests.e2e.test_elastic import assert_goes_on
from tests.e2e.test_elastic_stored import TOTAL, trains
from tests.e2e.world_store import WorldStore
from tests.long import long

pytestmark = [pytest.mark.slow, long]

_DAY_S = 2 * 86_400.0
_SOON_S = 60.0


class Reader:
    """Somebody who looks beside the job: the newest checkpoint is whole to its last byte, and never
    an earlier one than before.
    """

    def __init__(self, store: WorldStore, folder: Path, run: str) -> None:
        self._store, self._folder, self._run = store, folder, run
        self._over = threading.Event()
        self.seen: list[tuple[int, int]] = []
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(_SOON_S)

    def _look(self) -> None:
        opened = open_store(f"file://{self._folder}")
        while not self._over.wait(0.1):
            newest = self._store.newest(self._run)
            if self.seen and newest < self.seen[-1]:
                self.wrong.append(f"{newest} after {self.seen[-1]}")
            if newest < (0, 0):
                continue
            self.seen.append(newest)
            report = verify_run(opened, "e2e", run_of_incarnation(self._run, newest[0]))
            whole = [(newest[0], which.end) for _, _, which in report.whole]
            if not report.ok or max(whole, default=(-1, -1)) < newest:
                self.wrong.append(f"{newest} is not whole: {report.findings}, {whole}")


def make_older(folder: Path) -> None:
    """All that lies there is two days older: past the times to settle and of grace. What comes and
    goes just then is left out.
    """
    for path in list(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                then = path.stat().st_mtime - _DAY_S
                os.utime(path, (then, then))


def test_three_two_three_ranks_leave_one_world_in_the_store(tmp_path: Path) -> None:
    """Four worlds; in the last one everything before grows old, and its next checkpoint takes the
    earlier ones' place. Then all memory is lost.
    """
    folder = tmp_path / "store"
    store = WorldStore.folder(folder)
    with (
        Net(3, replicas="0", **store.settings).up() as net,
        contextlib.closing(ElasticRun(tmp_path)) as run,
        contextlib.closing(Reader(store, folder, run.run)) as reader,
    ):
        trains(run, net.nodes, store, TOTAL)
        second = trains(run, net.nodes[:2], store, TOTAL + 4)
        third = trains(run, net.nodes, store, TOTAL + 8)
        assert (second.start(), third.start()) == (TOTAL, TOTAL + 4)
        assert len(store.worlds(run.run)) == 3
        total = TOTAL + 300
        keep = frozenset(range(total))
        fourth = run.life(net.nodes[:2], total=total, keep=keep, step_ms=150)
        eventually(
            lambda: len(store.worlds(run.run)) == 4 and store.committed(run.run) != [],
            "it is durable",
            _SOON_S,
        )
        make_older(folder)
        eventually(lambda: len(store.worlds(run.run)) == 1, "earlier worlds are deleted", _SOON_S)
        fourth.kill()
        for node in net.nodes:
            node.lose()
        (world,), (_, newest) = store.worlds(run.run), store.newest(run.run)
        left = {path.parts[len(folder.parts) + 1] for path in folder.rglob("*") if path.is_file()}
        assert left == {run.run, run_of_incarnation(run.run, world)}, "nothing of earlier worlds"
        for node in net.nodes[1:]:
            node.launch()
        last = run.life(net.nodes[1:], total=newest + 1)
        last.ends()
        assert_goes_on(fourth, last, newest)
        reader.close()
        assert reader.wrong == []
        assert len({world for world, _ in reader.seen}) >= 4, reader.seen
