"""A server's backup is memory of a real daemon's: shared, kept when its owner ends, refused to other models."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.client.identity import Identity
from ckptd.client.options import DaemonOptions
from ckptd.client.serving.device_group import ThreadDevices
from ckptd.client.serving.kv_backup import backup_bytes, geometry_of
from ckptd.client.serving.kv_memory import KvMemory
from ckptd.core.serving.kv_backup_index import BackupGeometry
from ckptd.errors import AttachRefused, SegmentError
from ckptd.transport.messages import GetSnapshots, GetStatus, Snapshots, Status
from ckptd.transport.wire import ControlClient
from tests.ckptd.running import eventually
from tests.e2e.harness import own_daemon

GEOMETRY = BackupGeometry("the model", 2, 3, 64, 4, quota_bytes=1 << 20)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]


@contextmanager
def attached(
    endpoint: str, run: str, rank: int = 0, geometry: BackupGeometry = GEOMETRY
) -> Iterator[KvMemory]:
    daemon = DaemonOptions(endpoint=endpoint, timeout_s=20)
    memory = KvMemory(Identity("server", run, rank, 2), daemon, geometry, owner=rank == 0)
    try:
        yield memory
    finally:
        memory.close()


def test_devices_share_it_and_it_outlives_its_owner(endpoint: str, run: str) -> None:
    with attached(endpoint, run, 1) as other:
        with attached(endpoint, run) as owner:
            path = owner.open_own()
            ours, theirs = owner.shared(path), other.shared(path)
            assert geometry_of(theirs) == GEOMETRY
            ours[-1] = 77
            assert theirs[-1] == 77
            del ours
        assert theirs[-1] == 77  # its owner has left
        theirs[-2] = 78
        with attached(endpoint, run) as successor:
            assert successor.open_own() == path
            assert successor.shared(path)[-2] == 78
            with ControlClient(endpoint) as client:
                status = client.ask(GetStatus(), Status)
                client.ask(GetSnapshots("server", run), Snapshots)  # it has none
            (segment,) = [each for each in status.segments if each.run == run]
            assert segment.kind == "kv"
            assert segment.total_bytes >= backup_bytes(GEOMETRY)
        del theirs


def test_another_size_begins_anew_and_another_model_is_refused(endpoint: str, run: str) -> None:
    with attached(endpoint, run) as first:
        first.shared(first.open_own())[-1] = 7
    larger = replace(GEOMETRY, quota_bytes=2 << 20)
    with attached(endpoint, run, geometry=larger) as second:
        again = second.open_own()
        assert geometry_of(second.shared(again)) == larger
        with ControlClient(endpoint) as client:
            status = client.ask(GetStatus(), Status)
        assert len([each for each in status.segments if each.run == run]) == 1
    with (
        attached(endpoint, run, geometry=replace(larger, model="another")) as third,
        pytest.raises(ValueError, match="has a backup of the model 'the model'"),
    ):
        third.open_own()
    assert again.exists()


def test_more_than_there_is_is_refused_with_numbers(endpoint: str, run: str) -> None:
    with pytest.raises(AttachRefused, match=r"a backup of KV with a quota of 64 GiB"):
        KvMemory(
            Identity("server", run, 0, 2),
            DaemonOptions(endpoint=endpoint),
            replace(GEOMETRY, quota_bytes=64 << 30),
            owner=True,
        )


def test_a_file_of_another_kind_is_refused(endpoint: str, run: str, tmp_path: Path) -> None:
    with attached(endpoint, run) as memory:
        path = memory.open_own()
        cut = tmp_path / path.name
        cut.write_bytes(path.read_bytes()[:4096])
        with pytest.raises(SegmentError, match="truncated"):
            memory.shared(cut)


def test_a_daemon_that_is_restarted_adopts_it(run: str) -> None:
    with own_daemon("--memory", "64MiB") as daemon, attached(daemon.endpoint, run) as memory:
        path = memory.open_own()
        shared = memory.shared(path)
        shared[-1] = 5
        daemon.kill()
        shared[-2] = 6  # nobody waits for the daemon
        daemon.start()
        eventually(lambda: memory.session.connected, "the session is back")
        status = daemon.ask(GetStatus(), Status)
        assert [(each.kind, each.owned) for each in status.segments] == [("kv", True)]
        assert memory.shared(path)[-2:].tolist() == [6, 5]
        del shared


def _share(memories: Mapping[int, KvMemory]) -> dict[int, memoryview | None]:
    """What each device of an epoch is told to use."""
    place, found = ThreadDevices(memories), dict[int, memoryview | None]()

    def share(rank: int) -> None:
        found[rank] = memories[rank].share(place.seat(rank))

    threads = [threading.Thread(target=share, args=(rank,)) for rank in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(memories)
    return found


def test_each_node_has_a_memory_of_its_own(run: str) -> None:
    """Its devices share it, whoever comes later; one that is gone with its daemon is replaced as soon as a new
    device is there.
    """
    with (
        own_daemon("--memory", "64MiB") as here,
        own_daemon("--memory", "64MiB") as there,
        contextlib.ExitStack() as ends,
    ):
        nodes = {0: here, 1: there, 2: there}
        memories = {
            rank: ends.enter_context(attached(node.endpoint, run, rank)) for rank, node in nodes.items()
        }
        first = _share(memories)
        mapped = {rank: each for rank, each in first.items() if each is not None}
        assert len(mapped) == 3
        mapped[1][-1] = 5
        assert (mapped[0][-1], mapped[2][-1]) == (0, 5)
        assert _share(memories) == {0: None, 1: None, 2: None}
        with attached(there.endpoint, run, 3) as late:
            later = _share(memories | {3: late})
        assert (later[0], later[1], later[2]) == (None, None, None)
        assert later[3] is not None
        assert later[3][-1] == 5

        there.kill()
        shutil.rmtree(there.segment_dir)
        assert _share(memories) == {0: None, 1: None, 2: None}  # nobody waits for the daemon
        assert mapped[2][-1] == 5
        there.segment_dir.mkdir(mode=0o700)
        there.start()
        again = _share(memories | {3: ends.enter_context(attached(there.endpoint, run, 3))})
        assert again[0] is None
        assert _share(memories) == {0: None, 1: None, 2: None}
        assert [bytes(each[-1:]) for rank, each in again.items() if rank and each] == [b"\0"] * 3
        del mapped, first, later, again


def test_a_device_that_was_interrupted_comes_to_the_memory_of_the_others(run: str) -> None:
    """It had the old one when another device had begun a new one."""
    with own_daemon("--memory", "64MiB") as daemon, attached(daemon.endpoint, run, 0) as one:
        first = _share({0: one})[0]
        assert first is not None
        for path in daemon.segment_dir.glob("*.kv"):
            path.unlink()
        with attached(daemon.endpoint, run, 1) as two:
            begun = _share({1: two})[1]
            assert begun is not None
            begun[-1] = 9
            shared = _share({0: one, 1: two})
            assert shared[1] is None
            assert shared[0] is not None
            assert shared[0][-1] == 9
            del first, begun, shared
