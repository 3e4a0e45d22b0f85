"""Who takes part in each run, in files beside the segments (docs/replication.md section 2a).

A run that restarts asks all its former nodes what they hold. If a daemon kept its members in memory only, a
daemon's restart would make such a run begin anew. So a record is written before a rank learns that it has
joined, hence before its first snapshot, and the next daemon reads it.

A file gets its name when it is complete, and is flushed where the folder is on a disk. A damaged file is
put aside and means that this node does not know who takes part; never that nobody does. All methods belong
to the daemon's loop thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from ckptd.core.slots.segment_format import RECORD_ENDS, check_name
from ckptd.errors import SegmentError
from ckptd.event_log import EventLog
from ckptd.memory.pages import filesystem_kind, is_in_memory
from ckptd.private_files import replace_private_file
from ckptd.transport.messages import Join, NodeCard, RunRecord
from ckptd.unpacking import unpack

RECORD_MAGIC = b"CKPTDRUN"
RECORD_VERSION = 1

logger = logging.getLogger(__name__)

_FRONT = struct.Struct("<8sII")
_DIGEST = struct.Struct("<Q")
_MAX_BYTES = 1 << 28
_MAX_EPOCHS = 256  # more recoveries ago than any snapshot in memory is old
_MAX_RECORDS = 4096
_MAX_KEPT = 256  # a quarter of what our units let systemd keep

RunName = tuple[str, str]  # job, run
Epochs = tuple[tuple[int, int, int], ...]


class RunRecords:
    """Records by run; a method that changes one writes its file before it returns.

    Args:
        keep: has a file kept beyond this process by its name and descriptor; None: not any more.
    Raises:
        OSError: from every method that writes, but `forget`: the filesystem is full, or gone. Nothing has
            changed then.
    """

    def __init__(
        self, folder: Path, events: EventLog, keep: Callable[[str, int | None], None] = lambda *_: None
    ) -> None:
        self._folder, self._events, self._keep = folder, events, keep
        self._flushed = not is_in_memory(filesystem_kind(folder))
        self._records: dict[RunName, RunRecord] = {}
        self._wanted_s: dict[RunName, float] = {}  # when something of the run was here last
        self._unwritten: set[RunName] = set()  # forgotten, and their files are of before

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(list(self._records.values()))

    def of(self, job: str, run: str) -> RunRecord | None:
        return self._records.get((job, run))

    def adopt(self) -> None:
        """Read the files of an earlier daemon."""
        for path in sorted(self._folder.glob(f"*{RECORD_ENDS}")):
            job, _, run = path.name.removesuffix(RECORD_ENDS).partition("~")
            try:
                record = decode_record(path.read_bytes())
                if (record.job, record.run) != (job, run):
                    raise SegmentError(f"it is of {record.job}/{record.run}", operation="adopt")
            except OSError as error:  # it may be readable at the next start
                self._lost(job, run, f"{path.name} cannot be read: {error}")
            except SegmentError as error:
                aside = path.with_name(path.name + ".bad")
                path.replace(aside)
                self._lost(job, run, f"{aside.name} is put aside: {error}")
            else:
                self._records[job, run] = record
                self._kept(path)

    def write_again(self) -> None:
        """Write all files again: somebody has removed their folder. Raises nothing."""
        for record in self:
            try:
                self._write(record)
            except OSError as error:
                text = f"who takes part in {record.job}/{record.run} cannot be written again: {error}"
                self._events.add("error", "bad_run_record", f"{text}; the next daemon will not know it")

    def joined(self, job: str, run: str, message: Join) -> None:
        """A local rank says who takes part from now on."""
        before = self._known(job, run)
        if before.epoch == message.epoch and before.members == message.members:
            return
        here = {member.card.node for member in message.members}
        others = [card for card in before.cards if card.node not in here]
        begun = message.epoch != before.epoch
        # A complete suffix counts in the new history if that continues from it.
        recoverable = message.epoch_start >= 0 if begun else before.recoverable
        fresh = msgspec.structs.replace(
            before,
            epoch=message.epoch,
            epoch_start=message.epoch_start,
            members=message.members,
            former=_once(others),
            epochs=_with_epoch(before.epochs, message.epoch, message.epoch_start, message.follows),
            recoverable=recoverable,
            lost=False,
            chosen=message.chosen,
            durable=before.durable if before.durable <= message.epoch_start else -1,
        )
        self._write(fresh)

    def learned(self, record: RunRecord) -> None:
        """A peer says who takes part in a run without a rank here."""
        before = self._known(record.job, record.run)
        epochs = before.epochs
        for epoch in record.epochs:
            epochs = _with_epoch(epochs, *epoch)
        here = {member.card.node for member in record.members}
        others = [c for c in (*record.former, *before.cards) if c.node not in here]
        seen = before.durable if before.epoch == record.epoch else -1
        fresh = msgspec.structs.replace(
            record,
            former=_once(others),
            epochs=epochs,
            forgotten=before.forgotten,
            lost=False,
            durable=max(record.durable, seen),
        )
        if fresh != before:
            self._write(fresh)

    def note_epoch(self, job: str, run: str, epoch: int, start: int) -> None:
        """A recovery began this epoch; its members are not known."""
        before = self._known(job, run)
        epochs = _with_epoch(before.epochs, epoch, start, -1)
        if epochs != before.epochs:
            self._write(msgspec.structs.replace(before, epochs=epochs))

    def note_recoverable(self, job: str, run: str) -> None:
        """A suffix of the present history is complete."""
        before = self.of(job, run)
        if before is not None and not before.recoverable:
            self._write(msgspec.structs.replace(before, recoverable=True))

    def note_durable(self, job: str, run: str, end: int) -> None:
        """All ranks have the checkpoint of the present history that ends there in storage."""
        before = self.of(job, run)
        if before is not None and before.durable < end:
            self._write(msgspec.structs.replace(before, durable=end))

    def note_floor(self, job: str, run: str) -> None:
        """The present history has a floor of its own: former members are not needed any more."""
        before = self.of(job, run)
        if before is not None and before.former:
            self._write(msgspec.structs.replace(before, former=()))

    def forget(self, job: str, run: str) -> None:
        """Forget who took part, by command or because the run is over.

        The highest epoch stays for a while: what a node that is away still holds must be older than
        whatever begins now. Where there is no room for that it is written as soon as there is: most runs are
        forgotten to make room.
        """
        before = self.of(job, run)
        if before is None:
            return
        if before.newest_epoch < 0:
            self._remove((job, run))
        else:
            self._write_in_its_place(RunRecord(job, run, forgotten=before.newest_epoch))
        path = self._path(job, run)
        path.with_name(path.name + ".bad").unlink(missing_ok=True)

    def expire(self, now_s: float, retain_s: float, wanted: Callable[[str, str], bool]) -> None:
        """Drop the records of runs without anything here for ``retain_s`` (0: only if there are too many)."""
        for name in list(self._unwritten):
            self._write_in_its_place(self._records[name])
        for name in list(self._records):
            if name not in self._wanted_s or wanted(*name):
                self._wanted_s[name] = now_s
        over = len(self._records) - _MAX_RECORDS
        for name, since_s in sorted(self._wanted_s.items(), key=lambda item: item[1]):
            old = (retain_s and now_s - since_s > retain_s) or (over > 0 and since_s < now_s)
            if old:
                over -= 1
                self._remove(name)

    # -- files -----------------------------------------------------------------------------------

    def _known(self, job: str, run: str) -> RunRecord:
        return self.of(job, run) or RunRecord(job, run)

    def _lost(self, job: str, run: str, text: str) -> None:
        try:
            check_name(job, "job"), check_name(run, "run")
        except ValueError:
            text += "; its name is no run's"
        else:
            self._records[job, run] = RunRecord(job, run, lost=True)
            text += "; who took part in this run is not known here"
        self._events.add("error", "bad_run_record", text)

    def _write(self, record: RunRecord) -> None:
        path = self._path(record.job, record.run)
        replace_private_file(path, encode_record(record), synced=self._flushed)
        self._records[record.job, record.run] = record
        self._unwritten.discard((record.job, record.run))
        self._kept(path)

    def _write_in_its_place(self, record: RunRecord) -> None:
        """Write a record, if need be into the room of the one before, or later."""
        name = record.job, record.run
        with contextlib.suppress(OSError):
            self._write(record)
            return
        try:
            self._path(*name).unlink(missing_ok=True)
            self._write(record)
        except OSError as error:
            if name not in self._unwritten:
                text = f"that {record.job}/{record.run} was forgotten cannot be written now: {error}; "
                self._events.add("warning", "run_not_recorded", f"{text}it is tried again")
            self._unwritten.add(name)
            self._records[name] = record

    def _kept(self, path: Path) -> None:
        if len(self._records) > _MAX_KEPT:
            return
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:  # the file is there all the same
            logger.warning("%s is not kept beyond this process: %s", path.name, error)
            return
        self._keep(path.name, fd)
        os.close(fd)

    def _remove(self, name: RunName) -> None:
        self._records.pop(name, None)
        self._wanted_s.pop(name, None)
        self._unwritten.discard(name)
        path = self._path(*name)
        self._keep(path.name, None)
        path.unlink(missing_ok=True)

    def _path(self, job: str, run: str) -> Path:
        return self._folder / f"{check_name(job, 'job')}~{check_name(run, 'run')}{RECORD_ENDS}"


_decoder = msgspec.msgpack.Decoder(RunRecord)


def encode_record(record: RunRecord) -> bytes:
    payload = msgspec.msgpack.encode(record)
    front = _FRONT.pack(RECORD_MAGIC, RECORD_VERSION, len(payload)) + payload
    return front + _DIGEST.pack(xxhash.xxh3_64_intdigest(front))


def decode_record(data: bytes) -> RunRecord:
    """The record in a file.

    Raises:
        SegmentError: it is no record, of another version, or damaged.
    """
    if len(data) < _FRONT.size + _DIGEST.size or len(data) > _MAX_BYTES:
        raise _bad(f"it has {len(data)} bytes")
    magic, version, length = _FRONT.unpack_from(data)
    if magic != RECORD_MAGIC:
        raise _bad(f"it begins with {magic!r}, not {RECORD_MAGIC!r}")
    if version != RECORD_VERSION:
        raise _bad(f"version {version} is unsupported, this program reads {RECORD_VERSION}")
    end = _FRONT.size + length
    if len(data) != end + _DIGEST.size:
        raise _bad(f"it has {len(data)} bytes, and says {end + _DIGEST.size}")
    if _DIGEST.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
        raise _bad("its digest does not match")
    try:
        return unpack(_decoder, data[_FRONT.size : end], max_bytes=_MAX_BYTES)
    except ValueError as error:
        raise _bad(f"it cannot be read ({error})") from error


def _with_epoch(epochs: Epochs, epoch: int, start: int, follows: int) -> Epochs:
    """Add an epoch; the smaller of two starts counts, as in `ckptd.core.slots.slots.epoch_table`."""
    known = {each[0]: each[1:] for each in epochs}
    known_start, known_follows = known.get(epoch, (start, follows))
    known[epoch] = min(start, known_start), max(follows, known_follows)
    return tuple((number, *known[number]) for number in sorted(known)[-_MAX_EPOCHS:])


def _once(cards: list[NodeCard]) -> tuple[NodeCard, ...]:
    """Each node once, with its newest card."""
    by_node = {card.node: card for card in reversed(cards)}
    return tuple(by_node[node] for node in sorted(by_node))


def _bad(message: str) -> SegmentError:
    return SegmentError(message, operation="read run record")
