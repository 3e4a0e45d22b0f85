"""Who takes part in a run, over the lives of a daemon: the file, and what damage to it means."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from ckptd.event_log import EventLog
from ckptd.peers import run_records
from ckptd.peers.run_records import RunRecords, decode_record, encode_record
from ckptd.private_files import replace_private_file
from ckptd.transport.messages import Join, Member, NodeCard, RunRecord

A, B, C = (NodeCard(name, f"tcp://{name}:1", labels={"rack": "1"}) for name in "abc")
FIRST = Join(4, -1, (Member(A, (0, 1)), Member(B, (2,))))
NEXT = Join(5, 7, (Member(A, (0, 1)), Member(C, (2,))), follows=4)


class Node:
    """The records in a folder, of one daemon after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.restart()

    def restart(self) -> None:
        self.events = EventLog(100)
        self.kept: dict[str, bytes | None] = {}
        self.records = RunRecords(self.folder, self.events, self.keep)
        self.records.adopt()

    def keep(self, name: str, fd: int | None) -> None:
        self.kept[name] = None if fd is None else os.pread(fd, 1 << 20, 0)

    def of(self, run: str = "run") -> RunRecord:
        found = self.records.of("job", run)
        assert found is not None
        return found

    def join(self, message: Join) -> None:
        self.records.joined("job", "run", message)

    @property
    def path(self) -> Path:
        return self.folder / "job~run.run"

    def told(self) -> list[str]:
        return [e.message for e in self.events.page(0, 100).events if e.kind == "bad_run_record"]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_next_daemon_knows_who_takes_part(node: Node) -> None:
    node.join(FIRST)
    before = node.of()
    node.restart()
    assert node.of() == before == RunRecord("job", "run", 4, -1, FIRST.members, (), ((4, -1, -1),))
    node.join(NEXT)
    node.restart()
    told = node.of()
    assert (told.epoch, told.epoch_start, told.members) == (5, 7, NEXT.members)
    assert told.former == (B,), "it may hold what the new history cannot replace yet"
    assert told.epochs == ((4, -1, -1), (5, 7, 4))
    assert told.recoverable, "it goes on from iteration 7, so that was recoverable"
    assert [path.name for path in node.folder.iterdir()] == ["job~run.run"]


def test_earlier_members_are_needed_until_the_new_history_has_a_floor(node: Node) -> None:
    node.join(FIRST)
    node.join(NEXT)
    node.records.note_floor("job", "run")
    node.restart()
    assert node.of().former == ()


def test_a_run_that_began_anew_was_never_recoverable(node: Node) -> None:
    node.join(FIRST)
    node.records.note_recoverable("job", "run")
    node.restart()
    assert node.of().recoverable
    node.join(Join(6, -1, FIRST.members))
    assert not node.of().recoverable


def test_what_a_start_was_told_to_go_back_to_is_known_until_the_next_one(node: Node) -> None:
    node.join(Join(4, 7, FIRST.members, chosen=7))
    node.records.note_recoverable("job", "run")
    node.restart()
    assert node.of().chosen == 7
    node.join(NEXT)
    assert node.of().chosen == -1


def test_what_was_seen_in_storage_is_known_to_the_next_daemon_unless_it_was_abandoned(node: Node) -> None:
    node.join(FIRST)
    for end in (5, 9, 8):
        node.records.note_durable("job", "run", end)
    node.restart()
    assert node.of().durable == 9
    node.records.learned(msgspec.structs.replace(node.of(), durable=7))
    assert node.of().durable == 9, "another member has not seen it yet"
    node.join(Join(5, 9, FIRST.members))
    assert node.of().durable == 9
    node.join(Join(6, 8, FIRST.members))
    assert node.of().durable == -1, "the run went back behind it"
    node.records.note_durable("job", "another", 3)
    assert node.records.of("job", "another") is None


def test_epochs_of_which_peers_tell_are_kept_with_the_smaller_start(node: Node) -> None:
    for start in (7, 5, 6):
        node.records.note_epoch("job", "run", 9, start)
    node.restart()
    assert node.of().epochs == ((9, 5, -1),)
    assert (node.of().epoch, node.of().newest_epoch) == (-1, 9), "who takes part was not told"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:-1], "bytes, and says"),
        (lambda data: b"", "it has 0 bytes"),
        (lambda data: b"X" + data[1:], "it begins with"),
        (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], "its digest does not match"),
        (lambda data: data[:8] + b"\x02\0\0\0" + data[12:], "version 2 is unsupported"),
    ],
)
def test_a_damaged_file_is_put_aside_and_nobody_knows(node: Node, damage, told: str) -> None:  # type: ignore[no-untyped-def]
    node.join(FIRST)
    node.path.write_bytes(damage(node.path.read_bytes()))
    node.restart()
    assert node.of() == RunRecord("job", "run", lost=True)
    (text,) = node.told()
    assert told in text
    assert "who took part in this run is not known here" in text
    assert [path.name for path in node.folder.iterdir()] == ["job~run.run.bad"]
    node.join(NEXT)
    assert not node.of().lost


def test_the_record_of_another_run_is_not_believed(node: Node) -> None:
    node.join(FIRST)
    node.path.rename(node.folder / "job~other.run")
    node.restart()
    assert node.of("other").lost


def test_a_file_that_cannot_be_read_now_stays(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptors are left, say: that is no damage, and the next daemon reads it."""
    node.join(FIRST)

    def no_descriptor(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", no_descriptor)
        node.restart()
        assert node.of().lost
    node.restart()
    assert node.of().members == FIRST.members


def test_what_cannot_be_written_has_not_changed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.join(FIRST)

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            node.join(NEXT)
        assert node.of().epoch == 4
    node.restart()
    assert node.of().epoch == 4
    assert [path.name for path in node.folder.iterdir()] == ["job~run.run"]


def test_of_a_forgotten_run_only_the_number_of_its_last_epoch_stays(node: Node) -> None:
    """What a node that is away still holds of it must be older than whatever begins under this name."""
    node.join(FIRST)
    node.records.note_epoch("job", "run", 9, 3)
    node.records.forget("job", "run")
    node.restart()
    assert node.of() == RunRecord("job", "run", forgotten=9)
    assert node.of().newest_epoch == 9
    node.records.forget("job", "never-heard-of")
    assert node.records.of("job", "never-heard-of") is None


def test_a_run_is_forgotten_although_nothing_can_be_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most runs are forgotten because there is no room. The command ended in an error, and freed nothing."""
    node.join(FIRST)
    full = [True]

    def no_room(path: Path, data: bytes, *, synced: bool = True) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_private_file(path, data, synced=synced)

    monkeypatch.setattr(run_records, "replace_private_file", no_room)
    node.records.forget("job", "run")
    assert node.of() == RunRecord("job", "run", forgotten=4)
    node.records.expire(0.0, 100.0, lambda job, run: False)
    assert [e.kind for e in node.events.page(0, 100).events] == ["run_not_recorded"]
    full[0] = False
    node.records.expire(1.0, 100.0, lambda job, run: False)
    node.restart()
    assert node.of() == RunRecord("job", "run", forgotten=4)


def test_a_forgotten_run_is_written_into_the_room_of_its_record(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.join(FIRST)

    def only_in_its_place(path: Path, data: bytes, *, synced: bool = True) -> None:
        if path.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_private_file(path, data, synced=synced)

    monkeypatch.setattr(run_records, "replace_private_file", only_in_its_place)
    node.records.forget("job", "run")
    node.restart()
    assert node.of() == RunRecord("job", "run", forgotten=4)


def test_a_record_expires_when_nothing_of_its_run_has_been_here_for_long(node: Node) -> None:
    node.join(FIRST)
    node.records.joined("job", "kept", FIRST)
    for now_s in (0.0, 50.0, 120.0):
        node.records.expire(now_s, 100.0, lambda job, run: run == "kept")
    assert node.records.of("job", "run") is None
    assert [path.name for path in node.folder.iterdir()] == ["job~kept.run"]


def test_encoding() -> None:
    record = RunRecord("job", "run", 4, -1, FIRST.members, (C,), ((4, -1, 3),), True, 2, False)
    data = encode_record(record)
    assert data[:12] == b"CKPTDRUN\x01\0\0\0"
    assert decode_record(data) == record


def test_what_is_written_and_adopted_is_kept_beyond_the_process(node: Node) -> None:
    node.join(FIRST)
    assert node.kept == {node.path.name: node.path.read_bytes()}
    node.join(NEXT)
    assert node.kept == {node.path.name: node.path.read_bytes()}
    node.restart()
    assert node.kept == {node.path.name: node.path.read_bytes()}
    node.records.expire(0.0, 1.0, lambda *_: False)
    node.records.expire(9.0, 1.0, lambda *_: False)
    assert node.kept == {node.path.name: None}


def test_a_removed_file_is_written_again(node: Node) -> None:
    node.join(FIRST)
    before = node.path.read_bytes()
    node.path.unlink()
    node.records.write_again()
    assert node.path.read_bytes() == before
