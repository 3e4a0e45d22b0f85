"""What batches a loop has had: the positions of its loaders, and fingerprints of what each
iteration trained on.

Both go into every snapshot. A replayed iteration whose batch is another than before the failure is
named as such, rather than by the weights that differ after it.
"""

from __future__ import annotations

from typing import Any, Protocol

from ckptd.client import values
from ckptd.client.data.fingerprints import fingerprint
from ckptd.client.log_lines import get_logger

__all__ = ["BATCHES", "BatchLedger", "Positioned"]

logger = get_logger(__name__)

# The name under which it is among the objects of `state=`.
BATCHES = "ckptd.batches"
# Iterations whose fingerprints are kept: those of the longest usual suffix, about 20 bytes each.
_KEPT = 64


class Positioned(Protocol):
    """Something that goes through data, and can be taken to a position that was recorded."""

    def position(self) -> dict[str, Any] | None: ...

    def go_to(self, position: dict[str, Any] | None) -> None: ...


class BatchLedger:
    """One per checkpointer; an object as ``state=`` takes it."""

    def __init__(self) -> None:
        self._sources: list[Positioned] = []
        self._recorded: list[dict[str, Any] | None] = []
        self._seen: dict[int, list[int]] = {}
        self._step: int | None = None
        self._told_of_device = False

    @property
    def begun(self) -> bool:
        """Whether a step has begun: what is fetched before belongs to none."""
        return self._step is not None

    def begin(self, step: int) -> None:
        """Step ``step`` begins here."""
        self._step = step
        self._seen.pop(step, None)  # the loop was left in it, and entered again
        while len(self._seen) >= _KEPT:
            del self._seen[min(self._seen)]

    def note(self, batch: Any) -> None:
        """The running step trains on this; read it before it goes to a device."""
        if self._step is None:
            return
        found = fingerprint(batch)
        if found.devices and not self._told_of_device:
            self._told_of_device = True
            logger.info(
                "batches are on %s already when ckptd sees them; their content is not fingerprinted, as reading it would wait for the device",
                ", ".join(found.devices),
            )
        self._seen.setdefault(self._step, []).append(found.value)

    def add(self, source: Positioned) -> dict[str, Any] | None:
        """One more source of batches, and the position that was recorded for it. They are known by
        the order in which they come.
        """
        at = len(self._sources)
        self._sources.append(source)
        return self._recorded[at] if at < len(self._recorded) else None

    def state_dict(self) -> dict[str, Any]:
        positions = [source.position() for source in self._sources]
        # Before `batches` was called again, what was recorded is what there is.
        positions += self._recorded[len(positions) :]
        return {
            "positions": positions,
            "fingerprints": {step: list(found) for step, found in self._seen.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recorded = list(state["positions"])
        self._seen = {step: list(found) for step, found in state["fingerprints"].items()}
        for at, source in enumerate(self._sources):
            source.go_to(self._recorded[at] if at < len(self._recorded) else None)

    def differences(self, recorded: dict[str, Any]) -> list[str]:
        """What is not as it was recorded, in words; the first batch only, as all that follows may
        follow from it.
        """
        before: dict[int, list[int]] = recorded["fingerprints"]
        for step in sorted(before.keys() & self._seen.keys()):
            if before[step] != self._seen[step]:
                return [_other_batch(step, len(before[step]), len(self._seen[step]))]
        if values.equal(self.state_dict(), recorded):
            return []
        return ["the position in the data (was a batch fetched outside of the loop's body?)"]


def _other_batch(step: int, before: int, now: int) -> str:
    if before != now:
        return (
            f"the batch of iteration {step} differs from the one before the crash: it was made of {before} fetches and is made of {now} "
            "(is another number of micro-batches accumulated, or is a batch fetched outside of the loop's body?)"
        )
    return (
        f"the batch of iteration {step} differs from the one before the crash. Usual causes: samples that were made with random numbers of a "
        "generator that ckptd does not find (make it an attribute of the dataset, or use torch's, numpy's or Python's global one); a dataset, "
        "batch size or number of workers that was changed since; files that are listed in another order (sort them)"
    )
