"""One snapshot of the suffix, as replay reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ckptd.client import values
from ckptd.client.model.snapshot_layout import DTYPES, STATIC, EntrySource, parse_entry_name
from ckptd.cuda.engine import HostMemory
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import SCALARS


class SnapshotImage:
    """One snapshot of the suffix: its image, and where in which mapped memory it lies.

    Args:
        view: the verified image, or how to get it: a snapshot that is still on its way is waited
            for when it is needed.
        anchors: bitmap of the operators that it anchors, if that is known before.
    """

    def __init__(
        self,
        iteration: int,
        view: ImageView | Callable[[], ImageView],
        memory: HostMemory,
        base: int,
        phase: int = 0,
        anchors: int | None = None,
    ) -> None:
        self._anchors = anchors
        self.iteration, self.memory, self.base, self.phase = iteration, memory, base, phase
        self._view = view

    @property
    def view(self) -> ImageView:
        if not isinstance(self._view, ImageView):
            self._view = self._view()
        return self._view

    @property
    def anchors(self) -> int:
        """Bitmap of the operators that it anchors."""
        return self.view.anchors if self._anchors is None else self._anchors

    def scalars(self) -> dict[str, Any]:
        found: dict[str, Any] = values.unpack(bytes(self.view.scalars))
        return found

    def state_layout(self) -> dict[str, Any]:
        found: dict[str, Any] = values.unpack(bytes(self.view.data(STATIC)))
        return found

    def tensor(self, name: str) -> Tensor:
        entry = self.view.tensor(name)
        return self.memory.view(self.base + entry.offset, entry.nbytes, DTYPES[entry.dtype], entry.shape)

    def sources(self) -> Iterable[tuple[EntrySource, str]]:
        for entry in self.view:
            if entry.name not in (SCALARS, STATIC):
                yield parse_entry_name(entry.name, DTYPES[entry.dtype]), entry.name
