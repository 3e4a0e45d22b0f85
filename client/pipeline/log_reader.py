"""Reading of boundary logs: the tensors that a neighbour sent in an iteration, verified.

Readers own and change nothing: every process that may open the files can read them, including logs of
other ranks of this node, and of ranks whose trainer and daemon are gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ckptd.client.daemon_link.slot_file import SlotFile
from ckptd.client.model.snapshot_layout import DTYPES
from ckptd.core.slots.boundary import RecordKey, logged_iterations, parse_record_name
from ckptd.core.slots.ring import SlotRecord
from ckptd.core.slots.slots import NO_EPOCHS
from ckptd.errors import CorruptionError, SegmentError
from ckptd.holdings import header_record
from ckptd.storage.images.image import ImageView, verify
from ckptd.storage.images.image_format import ImageError

__all__ = ["LogFile", "LogReader", "log_files"]


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
