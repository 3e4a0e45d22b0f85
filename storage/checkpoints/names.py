"""Keys of a store, and conversion between keys and names. ``docs/format.md`` section 2 specifies them.

Each value has exactly one spelling: numbers are padded with zeros to a fixed width, or have no leading
zero. So ``parse(name.key) == name``, and ``parse(key).key == key`` for every key that `parse` accepts; a
key with another spelling is foreign, and ckptd leaves it alone.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from ckptd.storage.stores.objects import RESERVED

MAX_ITERATION = 10**12 - 1
MAX_EPOCH = 2**32 - 1
MAX_SEQUENCE = 2**63 - 1
MAX_RANKS = 99_999
MAX_INCARNATION = 10**12 - 1

_LABEL = r"[A-Za-z0-9._-]{1,64}"
_OURS = rf"(?!\.{{1,2}}/|{re.escape(RESERVED)})({_LABEL})"  # not a path, and not reserved for the store
_COUNT = r"0|[1-9][0-9]{0,18}"
_HASH = r"[0-9a-f]{32}"
_TAG = r"[0-9a-f]{16}"
_NAME = re.compile(_LABEL)
_TAG_FORM = re.compile(_TAG)
_HASH_FORM = re.compile(_HASH)
_OBJECT = re.compile(
    rf"{_OURS}/{_OURS}/([0-9]{{12}})/rank-([0-9]{{5}})/([0-9]{{10}})-({_COUNT})-({_TAG})"
    r"\.safetensors"
)
_MANIFEST = re.compile(
    rf"{_OURS}/{_OURS}/([0-9]{{12}})/commit-({_COUNT})\.(-1|{_COUNT})\.({_HASH})"
    r"/rank-([0-9]{5})-of-([0-9]{5})\.json"
)
_PIN = re.compile(rf"{_OURS}/{_OURS}/pins/([0-9]{{12}})\.({_COUNT})\.({_HASH})")
_RUN = re.compile(rf"{_OURS}/{_OURS}/run\.json")
_INCARNATION = re.compile(rf"{_OURS}/{_OURS}/worlds/([0-9]{{12}})")
_INCARNATION_RUN = re.compile(rf"({_LABEL})\.w([0-9]{{1,12}})")


class CheckpointId(NamedTuple):
    """A checkpoint of a run: the state at the top of iteration ``end`` of one history."""

    end: int
    epoch: int
    epoch_start: int
    agreement: str

    def __str__(self) -> str:
        return f"iteration {self.end} (epoch {self.epoch}, agreement {self.agreement[:8]})"


class RunName(NamedTuple):
    job: str
    run: str

    @property
    def key(self) -> str:
        return f"{run_prefix(self.job, self.run)}run.json"


class ObjectName(NamedTuple):
    """An object that one rank uploaded for one snapshot; ``tag`` is the xxh3_64 of the object's header.

    The header contains the digests of all data, so a key never stands for two contents: a repeated
    upload, even from another node or with another choice of tensors, damages nothing.
    """

    job: str
    run: str
    iteration: int
    rank: int
    epoch: int
    sequence: int
    tag: str

    @property
    def key(self) -> str:
        """The key; raises ValueError if a field is out of range."""
        _check_range("iteration", self.iteration, MAX_ITERATION)
        _check_range("rank", self.rank, MAX_RANKS - 1)
        _check_range("epoch", self.epoch, MAX_EPOCH)
        _check_range("sequence", self.sequence, MAX_SEQUENCE)
        _check_form("tag", self.tag, _TAG_FORM)
        return (
            f"{run_prefix(self.job, self.run)}{self.iteration:012d}/rank-{self.rank:05d}/"
            f"{self.epoch:010d}-{self.sequence}-{self.tag}.safetensors"
        )


class ManifestName(NamedTuple):
    """The manifest of one rank in one checkpoint."""

    job: str
    run: str
    checkpoint: CheckpointId
    rank: int
    world_size: int

    @property
    def key(self) -> str:
        """The key; raises ValueError if a field is out of range."""
        end, epoch, epoch_start, agreement = self.checkpoint
        _check_range("end", end, MAX_ITERATION)
        _check_range("epoch", epoch, MAX_EPOCH)
        _check_range("epoch_start", epoch_start, MAX_ITERATION, least=-1)
        _check_form("agreement", agreement, _HASH_FORM)
        _check_range("world_size", self.world_size, MAX_RANKS, least=1)
        _check_range("rank", self.rank, self.world_size - 1)
        return (
            f"{run_prefix(self.job, self.run)}{end:012d}/commit-{epoch}.{epoch_start}.{agreement}/"
            f"rank-{self.rank:05d}-of-{self.world_size:05d}.json"
        )


class PinName(NamedTuple):
    """The mark of a pinned checkpoint, which retention does not delete."""

    job: str
    run: str
    end: int
    epoch: int
    agreement: str

    @property
    def key(self) -> str:
        """The key; raises ValueError if a field is out of range."""
        _check_range("end", self.end, MAX_ITERATION)
        _check_range("epoch", self.epoch, MAX_EPOCH)
        _check_form("agreement", self.agreement, _HASH_FORM)
        prefix = run_prefix(self.job, self.run)
        return f"{prefix}pins/{self.end:012d}.{self.epoch}.{self.agreement}"


class IncarnationName(NamedTuple):
    """The mark of an incarnation of an elastic run. It distinguishes the incarnation's run (see
    `run_of_incarnation`) from an ordinary run with the same form of name.
    """

    job: str
    run: str
    number: int

    @property
    def key(self) -> str:
        """The key; raises ValueError if a field is out of range."""
        _check_range("incarnation", self.number, MAX_INCARNATION)
        return f"{incarnations_prefix(self.job, self.run)}{self.number:012d}"


StoredName = RunName | ObjectName | ManifestName | PinName | IncarnationName


@lru_cache(maxsize=4096)  # a keeper lists the same keys again and again
def parse(key: str) -> StoredName | None:
    """The name that ``key`` spells; None if ckptd does not write such keys."""
    if key.endswith(".safetensors"):
        return _object(key)
    if key.endswith("/run.json"):
        found = _RUN.fullmatch(key)
        return None if found is None else RunName(found[1], found[2])
    if key.endswith(".json"):
        return _manifest(key)
    found = _INCARNATION.fullmatch(key)
    return _pin(key) if found is None else IncarnationName(found[1], found[2], int(found[3]))


def _object(key: str) -> ObjectName | None:
    found = _OBJECT.fullmatch(key)
    if found is None:
        return None
    job, run, iteration, rank, epoch, sequence, tag = found.groups()
    name = ObjectName(job, run, int(iteration), int(rank), int(epoch), int(sequence), tag)
    fits = name.rank < MAX_RANKS and name.epoch <= MAX_EPOCH and name.sequence <= MAX_SEQUENCE
    return name if fits else None


def _manifest(key: str) -> ManifestName | None:
    found = _MANIFEST.fullmatch(key)
    if found is None:
        return None
    job, run, end, epoch, epoch_start, agreement, rank, world_size = found.groups()
    checkpoint = _checkpoint(end, epoch, epoch_start, agreement)
    if checkpoint is None or rank >= world_size:  # of equal width
        return None
    return ManifestName(job, run, checkpoint, int(rank), int(world_size))


def _pin(key: str) -> PinName | None:
    found = _PIN.fullmatch(key)
    if found is None:
        return None
    job, run, end, epoch, agreement = found.groups()
    name = PinName(job, run, int(end), int(epoch), agreement)
    return name if name.epoch <= MAX_EPOCH else None


def run_prefix(job: str, run: str) -> str:
    """The prefix of all keys of a run; ValueError if ``job`` or ``run`` is not a valid name."""
    return f"{check_name(job, 'job')}/{check_name(run, 'run')}/"


def incarnations_prefix(job: str, run: str) -> str:
    """The prefix of the marks of an elastic run's incarnations."""
    return f"{run_prefix(job, run)}worlds/"


def run_of_incarnation(run: str, number: int) -> str:
    """The run name under which the ranks of an incarnation attach and store their checkpoints."""
    return f"{run}.w{number}"


def incarnation_of_run(name: str) -> tuple[str, int] | None:
    """The elastic run and the number of the incarnation, if ``name`` has the form of one; else None."""
    found = _INCARNATION_RUN.fullmatch(name)
    if found is None or run_of_incarnation(found[1], int(found[2])) != name:
        return None
    return found[1], int(found[2])


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it is valid for a job or a run; raises ValueError otherwise."""
    if _NAME.fullmatch(name) is None or name in (".", "..") or name.startswith(RESERVED):
        raise ValueError(
            f"{what} {name[:80]!r} must be 1 to 64 letters, digits, '.', '_' or '-', "
            f"neither '.' nor '..', and not begin with {RESERVED!r}"
        )
    return name


@lru_cache(maxsize=256)  # a folder has thousands of manifests
def _checkpoint(end: str, epoch: str, epoch_start: str, agreement: str) -> CheckpointId | None:
    name = CheckpointId(int(end), int(epoch), int(epoch_start), agreement)
    return name if name.epoch <= MAX_EPOCH and name.epoch_start <= MAX_ITERATION else None


def _check_range(what: str, value: int, most: int, *, least: int = 0) -> None:
    if not least <= value <= most:
        raise ValueError(f"{what} must be from {least} to {most}, but is {value}")


def _check_form(what: str, text: str, form: re.Pattern[str]) -> None:
    if form.fullmatch(text) is None:
        raise ValueError(f"{what} {text[:80]!r} must be lower-case hexadecimal digits")
