"""A prefix of a real S3 server for one test: what a daemon is told of it, and what lies there, seen
past the daemon.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ckptd.storage.checkpoints.catalog import Catalog
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest
from ckptd.storage.checkpoints.retention import (
    References,
    RetentionPolicy,
    choose_checkpoints,
    plan_retention,
)
from ckptd.storage.checkpoints.verifier import VerifyReport, verify_run
from ckptd.storage.stores.objects import ObjectStore
from ckptd.storage.stores.open_store import open_store
from tests.storage.fault_proxy import Match, Request
from tests.storage.s3_server import BUCKET, S3Server

__all__ = [
    "JOB",
    "Bucket",
    "collect",
    "is_manifest",
    "keeper_pid",
    "orphans",
    "puts_manifest",
    "puts_object",
]

JOB = "e2e"
OFTEN = {"persist_every": "4", "persist_every_s": "0", "drain_timeout_s": "5"}
_T = TypeVar("_T")
_KEEPER = b"ckptd.persistence.keeper"


@dataclass
class Bucket:
    """A folder of its own in a bucket."""

    server: S3Server
    bucket: str = BUCKET
    job: str = JOB
    folder: str = field(default_factory=lambda: f"e2e/{uuid.uuid4().hex[:12]}")

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.folder}"

    def settings(self, *, endpoint: str = "", timeout_s: float = 20.0, **others: str) -> dict[str, str]:
        """What a daemon must know to store here every few iterations.

        Args:
            endpoint: of a proxy in front of the server.
            timeout_s: of one request.
            others: further settings, or other values of these.
        """
        options = {**self.server.options, "attempts": 1, "request_timeout_s": timeout_s}
        if endpoint:
            options["endpoint_url"] = endpoint
        return {"store": self.url, "store_options": json.dumps(options), **OFTEN, **others}

    def flags(self, **settings: Any) -> tuple[str, ...]:
        """The same for a command line, with little memory."""
        given = {"memory": "256MiB", **self.settings(**settings)}
        return tuple(word for name, value in given.items() for word in ("--" + name.replace("_", "-"), value))

    def open(self) -> ObjectStore:
        """Past any proxy."""
        return open_store(self.url, dict(self.server.options), "obstore")

    def catalog(self, run: str) -> Catalog:
        return self._with(lambda store: read_catalog(store, self.job, run))

    def committed(self, run: str) -> list[int]:
        """The ends of the durable checkpoints, newest first."""
        return [checkpoint.id.end for checkpoint in self.catalog(run).committed]

    def verify(self, run: str) -> VerifyReport:
        """Every byte of what is committed."""
        return self._with(lambda store: verify_run(store, self.job, run))

    def objects(self, run: str) -> set[str]:
        """The keys of all stored pieces of snapshots."""
        listed = self.catalog(run).objects.values()
        return {found.info.key for each in listed for found in each}

    def _with(self, work: Callable[[ObjectStore], _T]) -> _T:
        store = self.open()
        try:
            return work(store)
        finally:
            store.close()


# -- collecting ------------------------------------------------------------------------------------


def collect(store: ObjectStore, job: str, run: str) -> int:
    """Delete all that nobody needs, as an operator does who knows that no writer is about; how many
    keys that were.

    Of the checkpoints the newest stays.
    """
    catalog = read_catalog(store, job, run)
    now_ns = time.time_ns() + 10**9  # the store knows seconds only
    policy = RetentionPolicy(keep_last=1, grace_ns=0, settle_ns=0)
    verified = {which for _, _, which in verify_run(store, job, run).whole}
    choice = choose_checkpoints(catalog, policy, verified=verified, now_ns=now_ns)
    references = {
        info.key: References.of(read_manifest(store, info.key))
        for checkpoint in catalog.checkpoints
        if checkpoint.id in choice.kept
        for info in checkpoint.manifests.values()
    }
    plan = plan_retention(catalog, policy, verified=verified, references=references, now_ns=now_ns)
    for doomed in (plan.manifests, plan.objects):
        store.delete([gone.key for gone in doomed])
    return len(plan.manifests) + len(plan.objects)


def orphans(store: ObjectStore, job: str, run: str) -> set[str]:
    """Keys of objects to which no manifest refers."""
    catalog = read_catalog(store, job, run)
    there = {found.info.key for each in catalog.objects.values() for found in each}
    for checkpoint in catalog.checkpoints:
        for info in checkpoint.manifests.values():
            there -= read_manifest(store, info.key).object_keys
    return there


# -- what to do something to -----------------------------------------------------------------------


def is_manifest(request: Request) -> bool:
    return "/commit-" in request.path


def puts_object(after: int = 0) -> Match:
    """The request that stores a piece of a snapshot, but the first ``after`` of them."""
    seen: list[Request] = []

    def matches(request: Request) -> bool:
        if request.method != "PUT" or not request.path.endswith(".safetensors"):
            return False
        seen.append(request)
        return len(seen) > after

    return matches


def puts_manifest(request: Request) -> bool:
    return request.method == "PUT" and is_manifest(request)


def keeper_pid(daemon_pid: int) -> int:
    """The store keeper of a daemon; 0 if it has none now."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == daemon_pid and _KEEPER in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:
            continue  # it ended meanwhile
    return 0
