"""Somebody with write access to the store changes a checkpoint so that every xxh3 digest fits:
nobody resumes from it, and `ckptctl` says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.storage.checkpoints.catalog import StoredCheckpoint
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest
from ckptd.storage.checkpoints.signing import create_signer, trust_signer
from ckptd.storage.image import ImageView
from ckptd.storage.stores.open_store import open_store
from ckptd.storage.strong_digest import strong_digest
from ckptd.transport.messages import GetStatus, Status
from tests.ckptd.forging import forge, forged
from tests.ckptd.nodes import Net, Node
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import Snapshot

pytestmark = pytest.mark.timeout(150)


@contextmanager
def stored(folder: Path, *, sign: bool = False) -> Iterator[tuple[Net, Job]]:
    """A job of two ranks on two nodes, whose checkpoints 1 and 2 are committed; then both nodes are
    lost with their memory, and empty again.

    Args:
        sign: both nodes sign, and believe each other alone.
    """
    settings: dict[str, Any] = {
        "store": f"file://{folder}",
        "persist_every": "1",
        "persist_every_s": "0",
        "persist_keep_last": "3",
    }
    if sign:
        settings |= {"store_sign": "true", "store_signed_only": "true"}
    made = Net(2, **settings)
    with made.up(lambda: exchange_signers(made) if sign else None) as net:
        yield net, committed(net, folder)


def exchange_signers(net: Net) -> None:
    for node in net.nodes:
        node.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    public = {node.name: create_signer(node.keys_dir) for node in net.nodes}
    for node in net.nodes:
        for name, key in public.items():
            if name != node.name:
                trust_signer(node.keys_dir, name, key)


def committed(net: Net, folder: Path) -> Job:
    job = Job(net, net.nodes, replicas=1)
    job.start()
    for iteration in range(3):
        job.record(iteration)
        if iteration == 0:
            continue  # a run has no checkpoint of it
        eventually(lambda i=iteration: newest(folder) == i, f"{iteration} is committed")  # type: ignore[misc]
        # What falls due while a daemon still has the one before under way is skipped.
        eventually(lambda: not any(map(stores, net.nodes)), f"no node is busy with {iteration}")
    job.end()
    for node in net.nodes:
        node.lose()
    for node in net.nodes:
        node.launch()
    return job


def stores(node: Node) -> bool:
    """Whether a checkpoint of a rank of it is under way."""
    with node.client() as client:
        durable = client.ask(GetStatus(), Status).durable
    assert durable is not None
    return any(rank.under_way >= 0 for rank in durable.ranks)


def newest(folder: Path) -> int:
    found = checkpoints(folder)
    return found[0].id.end if found else -1


def checkpoints(folder: Path) -> list[StoredCheckpoint]:
    return list(read_catalog(open_store(f"file://{folder}"), "job", "run").committed)


def written(job: Job) -> Snapshot:
    """What rank 0 recorded of iteration 2."""
    (found,) = [s for (rank, i, _, _), s in job.written.items() if (rank, i) == (0, 2)]
    return found


def forge_object(folder: Path, snapshot: Snapshot) -> None:
    """Other bytes, and the same xxh3 digests, in the object that holds a snapshot's tensor."""
    data = bytes(ImageView(memoryview(snapshot.image)).data("w"))
    (path,) = [p for p in folder.rglob("*.safetensors") if data in p.read_bytes()]
    content = bytearray(path.read_bytes())
    forge(content, content.find(data))
    path.write_bytes(content)


def forge_manifest(folder: Path, snapshot: Snapshot) -> None:
    """And the cryptographic digest in the manifest, and the manifest's own: all fits but its signature."""
    store = open_store(f"file://{folder}")
    manifest: RankManifest = read_manifest(store, checkpoints(folder)[0].manifests[0].key)
    image = forged(snapshot.image, snapshot.header.header_digest)
    changed = replace(manifest.snapshots[-1], image_digest=strong_digest(image))
    told = replace(manifest, snapshots=(*manifest.snapshots[:-1], changed))
    (folder / manifest.key).write_bytes(told.to_bytes())


def resume(job: Job) -> int:
    """Where the job goes on; if its first start finds out what is damaged and stops, the next one does."""
    try:
        return job.resume()
    except Exception as error:  # noqa: BLE001 - what it is, is compared
        text = str(error)
    assert "in no copy that was reached is the image right" in text, text
    job.end()
    return job.resume()


def test_an_object_that_was_forged_is_refused_at_resume_by_verify_and_by_export(
    tmp_path: Path,
) -> None:
    """Of all digests only the cryptographic one in the manifest does not fit. The job goes on from
    the checkpoint before; before, it went on from the forgery.
    """
    folder = tmp_path / "store"
    with stored(folder) as (net, job):
        forge_object(folder, written(job))
        told = net[0].ctl("checkpoints", "verify", "job", "run", "2", "--json", check=False)
        assert told.returncode == 1, told.stderr
        findings = json.loads(told.stdout)["findings"]
        assert any("its cryptographic digest does not match" in f["what"] for f in findings)
        export = ("export", "--durable", "--job", "job", "--run", "run", "--rank", "0", "--to")
        told = net[0].ctl(*export, str(tmp_path / "m"), check=False)
        assert told.returncode == 5, told.stderr
        assert "the image" in told.stderr
        assert not (tmp_path / "m").exists()
        assert resume(job) == 1
        assert net[0].saw("fetch_forged", "iteration 2: the image of storage's copy")
        assert net[0].saw("checkpoint_damaged")
        job.end()


def test_a_manifest_that_was_forged_is_refused_where_signatures_are_asked_for(
    tmp_path: Path,
) -> None:
    """Who forges an object can write its digest into the manifest, too, but cannot sign it."""
    folder = tmp_path / "store"
    with stored(folder, sign=True) as (net, job):
        forge_object(folder, written(job))
        forge_manifest(folder, written(job))
        told = net[0].ctl("checkpoints", "verify", "job", "run", "2", "--json", check=False)
        assert told.returncode == 1, told.stderr
        findings = json.loads(told.stdout)["findings"]
        assert any("not believed: its signature is not that of" in f["what"] for f in findings)
        export = ("export", "--durable", "--job", "job", "--run", "run", "--rank", "0", "--to")
        told = net[0].ctl(*export, str(tmp_path / "m"), check=False)
        assert told.returncode == 5, told.stderr
        assert "not believed" in told.stderr
        assert job.resume() == 1
        assert net[0].saw("checkpoint_damaged", "not believed")
        job.end()
