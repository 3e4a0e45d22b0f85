"""Forked processes begin with what takes long to import: a preload that fails, fails silently and
costs every one of them seconds.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path

from tests.ckptd.host.hosting import Hosting
from tests.forked import FORKED
from tests.forked_hosts import ForkedProgram

WANTED = (
    "ckptd.client",
    "tests.e2e.job",
    "tests.preload",
    "torch._dynamo",
    "torch.distributed.fsdp",
)


def tell_what_is_missing(told: Connection) -> None:
    told.send([name for name in WANTED if name not in sys.modules])


def test_a_forked_process_has_everything_imported() -> None:
    here, there = FORKED.Pipe()
    process = FORKED.Process(target=tell_what_is_missing, args=(there,))
    process.start()
    assert here.poll(120)
    assert here.recv() == []
    process.join()


LOADS = """
import multiprocessing
from torch.utils.data import DataLoader
assert __name__ == "__main__", "a worker imports the script"
print(multiprocessing.get_start_method(allow_none=True), multiprocessing.parent_process())
print(multiprocessing.current_process().name, multiprocessing.Process().name)
for _ in range(2):
    print(len(list(DataLoader(range(9), batch_size=2, num_workers=2))))
"""


def test_a_forked_program_has_no_parent_of_multiprocessing(tmp_path: Path) -> None:
    """A loader with workers seemed to hang in jobs whose hosts were forked: its workers were forked by a server, as is
    the default of a child of such a server, and imported the script, which had no guard. So they failed, and each life
    of the trainer after them.
    """
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    environ = Hosting(tmp_path).environment()
    for number, words in enumerate((["loads.py"], ["-m", "ckptd.host", "--max-restarts", "0", "loads.py"])):
        log = tmp_path / f"log{number}"
        program = ForkedProgram(words, cwd=tmp_path, env=environ, log=log)
        assert program.wait(120) == 0, log.read_text()
        said = [line for line in log.read_text().splitlines() if not line.startswith("ckptd.host: ")]
        assert said == ["None None", "MainProcess Process-1", "5", "5"]
