"""Forked processes begin with what takes long to import: a preload that fails, fails silently and
costs every one of them seconds.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from tests.forked import FORKED

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
