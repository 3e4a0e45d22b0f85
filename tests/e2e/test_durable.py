"""Everything in memory is lost at once: what is in storage brings the job back, at the exact bits."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import ANY

import pytest

from ckptd.peers.run_records import decode_record
from ckptd.saved import SavedIteration, saved_iterations
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.running import eventually
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.ranks import Ranks


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def storing(store: Path, *flags: str) -> tuple[str, ...]:
    """How to start a daemon that persists often."""
    often = ("--persist-every", "4", "--persist-every-s", "0")
    return ("--memory", "256MiB", "--store", f"file://{store}", *often, *flags)


@pytest.fixture
def daemon(store: Path) -> Iterator[DaemonProcess]:
    """One that persists to a folder, in place of the session's."""
    with own_daemon(*storing(store)) as process:
        yield process


def lose_memory(daemon: DaemonProcess) -> None:
    """A power cut: the daemon and everything it held are gone."""
    daemon.kill()
    shutil.rmtree(daemon.segment_dir)
    daemon.segment_dir.mkdir(mode=0o700)
    daemon.start()


def committed(store: Path, run: str) -> list[int]:
    """The iterations of the durable checkpoints, newest first."""
    job = next((p.name for p in store.iterdir() if p.is_dir()), "job") if store.exists() else "job"
    return [c.id.end for c in read_catalog(open_store(f"file://{store}"), job, run).committed]


def damage(store: Path, end: int) -> None:
    """Flip a bit in an object of that checkpoint; twice does nothing."""
    victim = max(store.rglob(f"{end:012d}/rank-00000/*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-100] ^= 1
    victim.write_bytes(data)


def test_a_job_that_lost_all_memory_resumes_from_storage_at_the_exact_bits(
    jobs: Jobs, daemon: DaemonProcess, store: Path
) -> None:
    run = uuid.uuid4().hex[:8]
    reference = jobs.run("plain", "--total", "40", daemon="none")
    jobs.run("plain", "--total", "40", "--run", run, "--kill-at", "30", expect_killed=True)
    eventually(lambda: len(committed(store, run)) > 0, "a durable checkpoint", timeout_s=30)
    lose_memory(daemon)
    newest = committed(store, run)[0]  # until the daemon was gone, another one could follow
    # Also while no rank is attached: until 0.4 nothing was told of storage then.
    assert saved_iterations("e2e", run, daemon=daemon.endpoint)[0] == SavedIteration(
        newest, ANY, durable=True
    )
    resumed = jobs.run("plain", "--total", "40", "--run", run, "--seed", "77")
    assert jobs.report(resumed)["resumed_from"] == newest, jobs.log(resumed)
    assert differences(reference, resumed) == []


def test_memory_that_is_older_than_storage_does_not_count(
    jobs: Jobs, daemon: DaemonProcess, store: Path
) -> None:
    """As of a node whose replicas lagged, and whose daemon was started again meanwhile."""
    run = uuid.uuid4().hex[:8]
    reference = jobs.run("plain", "--total", "40", daemon="none")
    jobs.run("plain", "--total", "40", "--run", run, "--kill-at", "10", expect_killed=True)
    daemon.kill()
    older = {path: path.read_bytes() for path in daemon.segment_dir.glob(f"*~{run}~*.seg")}
    daemon.start()
    # So slowly that uploads keep up: after the kill, what was not begun is not uploaded.
    slow = ("--step-ms", "100")
    jobs.run("plain", "--total", "40", "--run", run, "--kill-at", "30", *slow, expect_killed=True)
    eventually(lambda: committed(store, run)[:1] > [12], "a newer durable checkpoint", timeout_s=30)
    newest = committed(store, run)[0]
    record = daemon.segment_dir / f"e2e~{run}.run"
    eventually(lambda: decode_record(record.read_bytes()).durable >= newest, "it is seen", timeout_s=30)
    daemon.kill()
    newest = committed(store, run)[0]
    for path in daemon.segment_dir.glob(f"*~{run}~*.seg"):
        path.unlink()
    for path, content in older.items():
        path.write_bytes(content)
    daemon.start()
    resumed = jobs.run("plain", "--total", "40", "--run", run, "--seed", "77")
    assert jobs.report(resumed)["resumed_from"] == newest, jobs.log(resumed)
    assert differences(reference, resumed) == []


def test_a_run_that_ended_in_order_leaves_its_newest_state(
    jobs: Jobs, daemon: DaemonProcess, store: Path
) -> None:
    run = uuid.uuid4().hex[:8]
    out = jobs.run("plain", "--total", "31", "--run", run)
    eventually(
        lambda: committed(store, run)[:1] == [31],
        f"the end is durable\n{jobs.log(out)}",
        timeout_s=30,
    )


def tensors(store: Path, end: int, rank: int) -> dict[str, int]:
    """Bytes of each parameter and optimizer tensor that this rank has uploaded of one iteration."""
    found: dict[str, int] = {}
    for path in store.rglob(f"{end:012d}/rank-{rank:05d}/*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for name, entry in header.items():
            if not name.startswith(("__metadata__", "ckptd.", "buffer/")):
                found[name] = entry["data_offsets"][1] - entry["data_offsets"][0]
    return found


def test_what_two_nodes_have_alike_is_uploaded_once_and_both_come_back(
    jobs: Jobs, daemon: DaemonProcess, store: Path
) -> None:
    """Data-parallel ranks on two nodes: each uploads its half, and reads what is its own again."""
    run = uuid.uuid4().hex[:8]
    dense = ("--set", 'policy="dense"', "--set", "replicas=0")
    with own_daemon(*storing(store)) as other:
        nodes = {0: (), 1: ("--daemon", other.endpoint)}
        references = Ranks(jobs, run, *dense, daemon="none", total=30).end()
        life = Ranks(jobs, run, *dense, "--step-ms", "50", each=nodes, total=30)
        life.end()
        eventually(lambda: 30 in committed(store, run), f"durable\n{life.logs}", timeout_s=60)
        end = committed(store, run)[0]
        first, second = tensors(store, end, 0), tensors(store, end, 1)
        assert first
        assert second
        assert first.keys() & second.keys() == set()
        assert 0.5 < sum(first.values()) / sum(second.values()) < 2
        for node in (daemon, other):
            lose_memory(node)
            told = saved_iterations("e2e", run, daemon=node.endpoint)
            assert (told[0].iteration, told[0].durable) == (end, True), "of the other node's rank, too"
        after = Ranks(jobs, run, *dense, "--seed", "7", each=nodes, total=30)
        outs = after.end()
    assert {jobs.report(out)["resumed_from"] for out in outs} == {end}, after.logs
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []


def test_a_damaged_checkpoint_is_passed_over_and_if_all_are_nothing_begins_anew(
    jobs: Jobs, daemon: DaemonProcess, store: Path
) -> None:
    """With the last copy damaged a job began again at iteration 0, as if it had never got anywhere."""
    run = uuid.uuid4().hex[:8]
    reference = jobs.run("plain", "--total", "40", daemon="none")
    slowly = ("--step-ms", "100")  # so that more than one checkpoint falls due while it runs
    jobs.run("plain", "--total", "40", "--run", run, "--kill-at", "30", *slowly, expect_killed=True)
    eventually(
        lambda: 1 < len(committed(store, run)) == len(daemon.events("persisted", run)),
        "two durable checkpoints, and none under way that would be newer",
        timeout_s=30,
    )
    daemon.kill()
    there = committed(store, run)
    newest, older = there[:2]
    for end in there:
        damage(store, end)
    lose_memory(daemon)
    refused = ""
    while "nothing that it holds of this run can be used" not in refused:
        # A life tries five plans, each of which finds one more damaged; what is found is remembered.
        process, out = jobs.start("plain", "--total", "40", "--run", run)
        process.join(60)
        refused = jobs.log(out)
        assert process.exitcode == 1, refused
        assert "starting" not in refused
    assert daemon.events("storage_unusable"), daemon.events("checkpoint_damaged")
    damage(store, older)  # the same bit again: whole
    resumed = jobs.run("plain", "--total", "40", "--run", run, "--seed", "77")
    assert jobs.report(resumed)["resumed_from"] == older, jobs.log(resumed)
    assert any(str(newest) in text for text in daemon.events("checkpoint_damaged"))
    assert differences(reference, resumed) == []


def test_a_store_that_is_away_stops_a_start_over_and_nothing_else(jobs: Jobs, store: Path) -> None:
    """Training goes on without it; but a run of which nothing is in memory does not begin anew
    behind its back.
    """
    store.parent.joinpath("file").write_text("in the way")
    away = store.parent / "file" / "store"
    with own_daemon(*storing(away)) as daemon:
        process, out = jobs.start("plain", "--total", "12", "--run", "r", daemon=daemon.endpoint)
        process.join(60)
        assert process.exitcode != 0
        assert "the store did not answer" in jobs.log(out)
        assert json.dumps(daemon.events("store_silent"))
