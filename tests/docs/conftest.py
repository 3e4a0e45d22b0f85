"""A node like that of the pages: a daemon with a store, and the trainer of rank 0 of moe/run-1 attached."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.storage.checkpoints.names import ManifestName, parse
from ckptd.storage.stores.open_store import open_store
from tests.docs.training import names_of_a_training
from tests.e2e.harness import DaemonProcess, own_daemon


@contextlib.contextmanager
def found_by_default(process: DaemonProcess) -> Iterator[None]:
    """Every program and command of this process finds this daemon."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("CKPTD_") and name != "CKPTD_VALIDATE"]:
        del os.environ[name]
    os.environ["CKPTD_RUNTIME_DIR"] = str(process.runtime_dir)
    os.environ["CKPTD_SEGMENT_DIR"] = str(process.runtime_dir.parent / "segments")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """A daemon as a trainer starts it."""
    with own_daemon("--memory", "512MiB") as process, found_by_default(process):
        yield process


@dataclass(frozen=True, slots=True)
class Node:
    """What a page's commands find: a daemon with a store, and a trainer of rank 0 of moe/run-1 that goes on."""

    daemon: DaemonProcess
    store: str
    checkpoints: tuple[int, ...]
    """The durable ones, the oldest first."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One for a file."""
    store = tmp_path_factory.mktemp("store")
    flags = {
        "memory": "512MiB",
        "node-id": "node-a",
        "labels": "rack=17",
        "store": f"file://{store}",
        "persist-every-s": "0",
        "keys-dir": f"{store}-keys",
        "peer-listen": "tcp://127.0.0.1:0",
        "peer-security": "plain",
        "drain-timeout-s": "1",
    }
    with (
        own_daemon(*(f"--{name}={value}" for name, value in flags.items())) as process,
        found_by_default(process),
    ):
        names = names_of_a_training()
        model, optimizer = names["model"], names["optimizer"]
        run = RunOptions(job="moe", name="run-1")
        with Checkpointer(model, optimizer, run=run, snapshots=SnapshotOptions(window=2)) as ckpt:
            batches = ckpt.batches(names["loader"])
            for step in ckpt.steps(200):
                names["train_step"](next(batches))
                optimizer.step()
                optimizer.zero_grad()
                if len(found := _durable(store)) == 3:
                    break
                time.sleep(0.05 if step > 8 else 0)
            yield Node(process, f"file://{store}", found)


def _durable(store: Path) -> tuple[int, ...]:
    """The iterations of which the one rank has put its manifest."""
    names = [parse(info.key) for info in open_store(f"file://{store}").list("")]
    return tuple(sorted({name.checkpoint.end for name in names if isinstance(name, ManifestName)}))
