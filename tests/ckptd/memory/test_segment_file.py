"""What a daemon makes of the files of an earlier one: only proven damage puts a segment aside.

Any error at adoption renamed a segment to ``*.bad``, for ever: a daemon that was started with too
few descriptors put half of the good snapshots of its node aside, and the job began anew.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.slots.segment_format import encode_descriptor, origin_of
from ckptd.memory.segment_file import Adopted, Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.peers.replica_store import ReplicaStore
from ckptd.transport.messages import Attach, Attached, Hello, Reserve, Reserved
from ckptd.transport.wire import RefusedError
from tests.ckptd.running import (
    attach,
    descriptor,
    eventually,
    fill,
    running_daemon,
)

MIB = 1 << 20
NOT_DAMAGE = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EACCES, errno.EINTR]


def make_store(folder: Path) -> SegmentStore:
    return SegmentStore(folder, 1 << 30, "node", mlock="off", hugepages="off")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


class Failing:
    """`os.open` that fails for some files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codes: dict[str, int] = {}
        self._open = os.open
        monkeypatch.setattr("os.open", self)

    def __call__(self, path: Any, *arguments: Any, **keywords: Any) -> int:
        code = self.codes.get(Path(path).name)
        if code is not None:
            raise OSError(code, os.strerror(code))
        return self._open(path, *arguments, **keywords)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


def close_all(segments: list[Segment]) -> None:
    for segment in segments:
        segment.close()


@pytest.mark.parametrize("code", NOT_DAMAGE, ids=errno.errorcode.get)
def test_what_cannot_be_opened_now_waits(folder: Path, failing: Failing, code: int) -> None:
    first, second = (make_store(folder).create(descriptor(rank=r), 1, MIB) for r in (0, 1))
    close_all([first, second])
    failing.codes[first.path.name] = code
    store = make_store(folder)
    found = store.adopt(0.0)
    assert [s.path for s in found.segments] == [second.path]
    assert [(path, os.strerror(code)) for path, _ in found.waiting] == [(first.path, os.strerror(code))]
    assert (found.bad, found.back) == ([], [])
    assert store.waits_for("job", "run") == [first.path.name]
    assert store.waits_for("job", "ru") == []
    assert store.adopt_waiting(1.0) == Adopted(), "it is told once"
    failing.codes.clear()
    again = store.adopt_waiting(2.0)
    assert [s.path for s in again.segments] == [first.path]
    assert store.waits_for("job", "run") == []
    assert store.adopt_waiting(3.0) == Adopted()
    close_all(store.everything())


def test_a_file_that_waits_keeps_its_name(folder: Path, failing: Failing) -> None:
    """A new segment of the rank would have taken its generation, and its file."""
    old = make_store(folder).create(descriptor(), 1, MIB)
    fill(old, 0, 7)
    old.close()
    failing.codes[old.path.name] = errno.EMFILE
    store = make_store(folder)
    store.adopt(0.0)
    new = store.create(descriptor(), 1, MIB)
    assert (old.generation, new.generation) == (0, 1)
    failing.codes.clear()
    (back,) = store.adopt_waiting(1.0).segments
    header = back.header(0)
    assert header is not None
    assert header.iteration == 7
    close_all(store.everything())


def test_what_was_put_aside_for_want_of_descriptors_comes_back(folder: Path) -> None:
    """Earlier versions renamed it; it is whole."""
    old = make_store(folder).create(descriptor(), 1, MIB)
    log = make_store(folder).create(descriptor(rank=1, kind="log"), 1, MIB)
    damaged = make_store(folder).create(descriptor(rank=2), 1, MIB)
    for segment in (old, log, damaged):
        if segment is damaged:
            segment.buffer[:8] = bytes(8)
        segment.close()
        segment.path.rename(segment.path.with_name(segment.path.name + ".bad"))
    store = make_store(folder)
    found = store.adopt(0.0)
    assert found.back == [old.path, log.path]
    assert [s.path for s in found.segments] == [old.path, log.path]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [old.path.name, log.path.name, damaged.path.name + ".bad"]
    )
    close_all(store.everything())


def test_what_was_put_aside_stays_there_when_its_rank_went_on(folder: Path) -> None:
    """Its iterations would be mixed with those of the history that began without it."""
    old, new = (make_store(folder).create(descriptor(), 1, MIB) for _ in range(2))
    close_all([old, new])
    aside = old.path.rename(old.path.with_name(old.path.name + ".bad"))
    found = make_store(folder).adopt(0.0)
    assert (found.back, [s.path for s in found.segments]) == ([], [new.path])
    assert aside.exists()
    close_all(found.segments)


def test_segments_of_another_kind_are_no_sign_that_its_rank_went_on(folder: Path) -> None:
    """The memory to park in is made after the first snapshots, and has a higher number."""
    old = make_store(folder).create(descriptor(), 1, MIB)
    parked = make_store(folder).create(descriptor(kind="parked"), 1, MIB)
    close_all([old, parked])
    assert parked.generation > old.generation
    old.path.rename(old.path.with_name(old.path.name + ".bad"))
    found = make_store(folder).adopt(0.0)
    assert found.back == [old.path]
    close_all(found.segments)


def test_also_where_an_earlier_version_gave_a_lower_number_to_what_came_later(folder: Path) -> None:
    first, old = (make_store(folder).create(descriptor(), 1, MIB) for _ in range(2))
    close_all([first, old])
    first.path.unlink()
    elsewhere = old.path.rename(folder / "elsewhere")
    new = make_store(folder).create(descriptor(), 1, MIB)
    new.close()
    assert (old.generation, new.generation) == (1, 0)
    aside = elsewhere.rename(old.path.with_name(old.path.name + ".bad"))
    found = make_store(folder).adopt(0.0)
    assert (found.back, [s.path for s in found.segments]) == ([], [new.path])
    assert aside.exists()
    close_all(found.segments)


def test_its_number_is_not_given_again_either(folder: Path) -> None:
    old = make_store(folder).create(descriptor(), 1, MIB)
    old.buffer[:8] = bytes(8)
    old.close()
    store = make_store(folder)
    assert len(store.adopt(0.0).bad) == 1
    new = store.create(descriptor(), 1, MIB)
    assert new.generation == 1
    new.close()


def test_a_run_that_is_forgotten_takes_along_what_waits(folder: Path, failing: Failing) -> None:
    made = make_store(folder).create(descriptor(), 1, MIB)
    made.close()
    failing.codes[made.path.name] = errno.EIO
    store = make_store(folder)
    store.adopt(0.0)
    assert store.remove_bad("job", "run") == 1
    assert list(folder.iterdir()) == []
    assert store.adopt_waiting(1.0) == Adopted()


def test_a_replica_waits_too(folder: Path, failing: Failing) -> None:
    store = make_store(folder)
    replicas = ReplicaStore(store)
    told = descriptor(created_at_ns=1, node_id="other")
    plan = replicas.plan(told, 1, MIB, origin_of(told))
    store.build(plan).close()
    failing.codes[plan.path.name] = errno.EMFILE
    found = replicas.adopt()
    assert [path for path, _ in found.waiting] == [plan.path]
    assert replicas.waits_for("job", "run") == [plan.path.name]
    failing.codes.clear()
    assert [s.path for s in replicas.adopt_waiting().segments] == [plan.path]
    close_all(replicas.everything())


# -- a real daemon -------------------------------------------------------------------------------

FEW = 110  # descriptors: for some twenty segments, and for the eight of one run without those of the other


def test_a_daemon_without_descriptors_loses_no_segment() -> None:
    """It was killed, and its successor started with a limit that was used up after a few segments."""
    with running_daemon(memory="512MiB") as daemon:
        for run, ranks in (("earlier", 20), ("run", 8)):
            for rank in range(ranks):
                with daemon.client() as client:
                    attach(client, run=run, rank=rank, world_size=ranks, topology="many")
                    told = descriptor(run=run, rank=rank, world_size=ranks, topology="many")
                    client.ask(Reserve(4096, 1, encode_descriptor(told)), Reserved)
        names = sorted(path.name for path in daemon.segment_dir.glob("job~*"))
        assert len(names) == 28
        daemon.kill()
        daemon.spawn(files=FEW)
        daemon.ctl("wait", "--timeout", "20")
        events = daemon.ctl("events").stdout
        assert "job~run~r7~g0.seg cannot be opened now" in events
        assert "bad_segment" not in events
        assert sorted(path.name for path in daemon.segment_dir.glob("job~*")) == names
        wish = Attach("job", "run", 7, 8, "many", 1, MIB, "for a test", ())
        with daemon.client() as client:
            client.request(Hello("test", os.getpid()))
            with pytest.raises(RefusedError, match="files of job/run cannot be opened") as refused:
                client.ask(wish, Attached)
            assert refused.value.code == "not_ready"
            daemon.ctl("forget", "--yes", "job", "earlier")
            adopted = "job/run rank 7 generation 0"
            eventually(lambda: adopted in daemon.ctl("events").stdout, "it is adopted")
            assert len(client.ask(wish, Attached).segments) == 1
        assert len(list(daemon.segment_dir.glob("job~run~*.seg"))) == 8
