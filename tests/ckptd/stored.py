"""Stores with checkpoints in them, and `ckptctl` run on them, for the tests of what is durable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptd.ctl.main import main
from ckptd.storage.checkpoints.names import ManifestName, ObjectName, parse
from ckptd.storage.checkpoints.reader import read_manifest
from ckptd.storage.checkpoints.verifier import verify_store
from ckptd.storage.stores.objects import ObjectStore
from ckptd.storage.stores.open_store import open_store
from tests.storage.samples import JOB, RUN, Writer, window, write_identity

__all__ = [
    "ENDS",
    "FROZEN",
    "NAMES",
    "Ctl",
    "age",
    "fill_store",
    "manifest_keys",
    "needed_by",
    "object_keys",
    "whole_ends",
]

NAMES = (JOB, RUN)
ENDS = (11, 21, 31)
FROZEN = {"expert.0.w": 1}  # the same in all iterations, and so in the objects of the first one only


def fill_store(store: ObjectStore, ends: Iterable[int] = ENDS, *, job: str = JOB) -> list[Writer]:
    """Committed checkpoints of two ranks, in which a tensor never changes; the writers go on from there."""
    write_identity(store, job)
    writers = [Writer(store, rank=rank, world_size=2, job=job) for rank in (0, 1)]
    writers[1].index = writers[0].index
    for end in ends:
        for writer in writers:
            writer.commit(window(end, seeds=FROZEN, rank=writer.rank, job=job))
    return writers


def age(folder: Path, seconds: float, *keys: str) -> None:
    """Make objects so much older (all of them, if none is named)."""
    for path in [folder / key for key in keys] or [p for p in folder.rglob("*") if p.is_file()]:
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def keys_in(store: ObjectStore) -> list[str]:
    return sorted(info.key for info in store.list(""))


def object_keys(store: ObjectStore, *, iteration: int | None = None) -> list[str]:
    names = {key: parse(key) for key in keys_in(store)}
    return [
        key
        for key, name in names.items()
        if isinstance(name, ObjectName) and iteration in (None, name.iteration)
    ]


def manifest_keys(store: ObjectStore, end: int | None = None) -> list[str]:
    names = {key: parse(key) for key in keys_in(store)}
    return [
        key
        for key, name in names.items()
        if isinstance(name, ManifestName) and end in (None, name.checkpoint.end)
    ]


def needed_by(store: ObjectStore, end: int) -> dict[str, int]:
    """Sizes of the objects that a checkpoint refers to."""
    manifests = [read_manifest(store, key) for key in manifest_keys(store, end)]
    return {o.key: o.size for m in manifests for s in m.snapshots for o in s.objects}


def whole_ends(folder: Path) -> list[int]:
    """The checkpoints in a folder of which every byte is as it was; none that is committed is damaged."""
    report = verify_store(open_store(f"file://{folder}"))
    assert report.ok, report.findings
    return sorted(checkpoint.end for _, _, checkpoint in report.whole)


@dataclass
class Ctl:
    """`ckptctl checkpoints` on a store, in this process."""

    capsys: pytest.CaptureFixture[str]
    store: str
    options: tuple[str, ...] = ()

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What it prints (on stderr, if it is to fail otherwise than by finding damage)."""
        out, err = self.run("checkpoints", *arguments, "--store", self.store, code=code)
        return out if code in (0, 1) else err

    def json(self, *arguments: str, code: int = 0) -> Any:
        """The one document that it prints."""
        found = self.run("checkpoints", *arguments, "--json", "--store", self.store, code=code)
        return json.loads(found[0])

    def run(self, *arguments: str, code: int) -> tuple[str, str]:
        """Any command, with the options of the store."""
        try:
            ended = main([*arguments, *self.options])
        except SystemExit as error:
            ended = int(error.code or 0)
        found = self.capsys.readouterr()
        assert ended == code, found.out + found.err
        return found.out, found.err
