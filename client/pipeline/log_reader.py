"""Reading of boundary logs: the verified tensors that a neighbour sent in an iteration, and the facts about
its rank's communication.

Readers own and change nothing: every process that may open the files can read them, including logs of
other ranks of this node, and of ranks whose trainer and daemon are gone.

The facts say which ranks recover together. They are in the ``client`` payload of the log segment's
descriptor, beside ``data_offset``, so that they outlive the process. When they change, a log of the next
generation is requested: those of the newest generation count.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.daemon_link.mapped_segment import SlotFile
from ckptd.client.model.communication import Communication
from ckptd.client.model.snapshot_layout import DTYPES
from ckptd.core.slots.boundary import RecordKey, logged_iterations, parse_record_name
from ckptd.core.slots.slots import NO_EPOCHS, SlotRecord
from ckptd.errors import CorruptionError, SegmentError
from ckptd.holdings import header_record
from ckptd.storage.image import ImageView, verify
from ckptd.storage.image_format import ImageError


@dataclass(frozen=True, slots=True)
class LogFacts:
    """With which ranks a rank communicates in a step (plans use ``RankFacts``, which has no reasons). All
    ranks are numbers in the job, sorted.

    Attributes:
        neighbours: ranks with which it exchanges what is logged.
        domain: itself, and ranks with which it communicates otherwise within a step, as far as it
            knows: ranks that are joined through a third one follow from the facts of all ranks.
        alike: other ranks whose operators all equal its own.
        reasons: why others are in the domain, for people.
    """

    neighbours: tuple[int, ...] = ()
    domain: tuple[int, ...] = ()
    alike: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()

    def same_as(self, other: LogFacts) -> bool:
        """Whether both mean the same for a recovery, whatever their reasons are."""
        mine, theirs = (
            (self.neighbours, self.domain, self.alike),
            (other.neighbours, other.domain, other.alike),
        )
        return mine == theirs

    def warnings(self) -> list[str]:
        """Why this rank recovers together with ranks across a boundary, and what to do about it."""
        both = sorted(set(self.neighbours) & set(self.domain))
        if not both:
            return []
        ranks = ", ".join(map(str, both))
        text = (
            f"localized recovery: never apart from rank {ranks}, though a boundary is logged: "
            f"{'; '.join(self.reasons)}. What all ranks compute together (a gradient norm, a loss to show) "
            "goes into ckpt.shared_value(name, compute); sends and receives are told to the log (dest=, "
            "source=)"
        )
        return [text]


def find_facts(
    rank: int, communication: Communication | None, same_operators: Iterable[int], known: LogFacts | None
) -> LogFacts | None:
    """The facts observed so far, with those of an earlier trainer; None before a step was observed."""
    if communication is None or not communication.observed:
        return known
    before = known or LogFacts()
    joined = communication.joined
    reasons = dict.fromkeys([*before.reasons, *(joined[rank] for rank in sorted(joined))])
    return LogFacts(
        tuple(sorted({*before.neighbours, *communication.neighbours})),
        tuple(sorted({*before.domain, *joined, rank})),
        tuple(sorted(same_operators)),
        tuple(reasons),
    )


def recorded_facts(payloads: Iterable[bytes]) -> LogFacts | None:
    """The facts of a rank whose logs have these payloads, oldest generation first."""
    found = [facts for payload in payloads if (facts := facts_of(payload)) is not None]
    return found[-1] if found else None


def log_payload(data_offset: int, facts: LogFacts | None) -> bytes:
    """The ``client`` payload of a log segment. Without facts, all ranks recover together."""
    payload: dict[str, Any] = {"data_offset": data_offset}
    if facts is not None:
        payload["facts"] = {name: list(value) for name, value in asdict(facts).items()}
    return values.pack(payload, "boundary log")


def data_offset_of(payload: bytes) -> int:
    """The offset of the records in the slots of a log."""
    return int(values.unpack(payload)["data_offset"])


def facts_of(payload: bytes) -> LogFacts | None:
    """The facts of a log's payload; None if it was written by a version that recorded none."""
    found: dict[str, list[Any]] | None = values.unpack(payload).get("facts")
    return None if found is None else LogFacts(*(tuple(found[field.name]) for field in fields(LogFacts)))


def log_files(folder: str | os.PathLike[str], job: str, run: str, rank: int) -> list[Path]:
    """The boundary log of one rank in a segment folder, oldest generation first."""
    found = Path(folder).glob(f"{job}~{run}~r{rank}~g*.boundary")
    return sorted(found, key=lambda path: int(path.stem.rpartition("~g")[2]))


class LogReader:
    """The logged iterations of one rank.

    Args:
        paths: all generations of its log.
        epochs: starts of epochs of its run that are known from other sources; iterations that they
            repeat do not count.
    Raises:
        SegmentError: a file is not a boundary log, or belongs to another rank than the others.
        OSError: it cannot be opened.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        epochs: Mapping[int, int] = NO_EPOCHS,
    ) -> None:
        self._files = [LogFile(Path(path)) for path in paths]
        self._epochs = epochs
        whose = {(f.descriptor.job, f.descriptor.run, f.descriptor.rank) for f in self._files}
        if len(whose) > 1:
            raise SegmentError(f"the files belong to several ranks: {sorted(whose)}", operation="read log")

    def iterations(self) -> list[int]:
        """The iterations with a complete log, in order."""
        return sorted(self._sealed())

    def read(self, iteration: int) -> dict[RecordKey, Tensor]:
        """All tensors that were sent in an iteration, in the order of sending, in host memory.

        Raises:
            KeyError: the iteration is not logged (any more).
            CorruptionError: the log differs from the sealed one.
        """
        found = self._sealed().get(iteration)
        if found is None:
            known = ", ".join(map(str, self.iterations())) or "none"
            raise KeyError(f"iteration {iteration} is not logged; logged iterations: {known}")
        file = next(f for f in self._files if f.descriptor.generation == found.generation)
        with file.held(found) as image:
            if image is None:
                raise KeyError(f"the log of iteration {iteration} has just been overwritten")
            return file.tensors(found, image)

    def _sealed(self) -> dict[int, SlotRecord]:
        records = [record for file in self._files for record in file.records()]
        counting = logged_iterations(records, self._epochs)
        return {i: record for i, record in counting.items() if record.sealed}


class LogFile(SlotFile):
    """One generation of a boundary log.

    Raises:
        SegmentError: the file is not a boundary log.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "log")

    def records(self) -> Iterator[SlotRecord]:
        """The slots that can be read."""
        for index in range(self.num_slots):
            header = self.header(index)
            if header is not None:
                yield header_record(header, self.descriptor.generation, index, b"")

    def tensors(self, record: SlotRecord, image: memoryview) -> dict[RecordKey, Tensor]:
        """The sent tensors, from the image of a slot that is `held`.

        Raises:
            CorruptionError: the log differs from the sealed one.
        """
        try:
            verify(image, record.header_digest)
            return dict(_records(image))
        except (ImageError, ValueError) as error:
            raise CorruptionError(
                f"the log of iteration {record.iteration} is damaged: {error}",
                operation="read log",
                ids={"file": self.path.name, "slot": record.index},
            ) from error


def _records(image: memoryview) -> Iterator[tuple[RecordKey, Tensor]]:
    view = ImageView(image)
    for entry in view:
        key = parse_record_name(entry.name)
        if key is not None:
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            if entry.nbytes:
                raw = tensor.reshape(-1).view(torch.uint8).numpy()
                np.copyto(raw, np.frombuffer(view.data(entry.name), dtype=np.uint8))
            yield key, tensor
