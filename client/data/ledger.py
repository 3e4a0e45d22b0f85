"""The ledger of a loop's batches: the positions of its loaders, and the fingerprint of each iteration's
batches.

Both are in every snapshot. If a replayed iteration gets another batch than before the failure, the
error names the batch, not only the weights that differ after it.
"""

from __future__ import annotations

from typing import Any, Protocol

from ckptd.client import values
from ckptd.client.data.fingerprints import fingerprint
from ckptd.client.log_lines import get_logger

__all__ = ["BATCHES", "BatchLedger", "Positioned"]

logger = get_logger(__name__)

# Its name among the objects of `state=`.
BATCHES = "ckptd.batches"
# Number of iterations with a fingerprint: the longest usual suffix; about 20 bytes each.
_KEPT = 64


class Positioned(Protocol):
    """An iterator over data that can be moved to a recorded position."""

    def position(self) -> dict[str, Any] | None: ...

    def go_to(self, position: dict[str, Any] | None) -> None: ...


class BatchLedger:
    """The ledger of one checkpointer; an object for ``state=``."""

    def __init__(self) -> None:
        self._sources: list[Positioned] = []
        self._recorded: list[dict[str, Any] | None] = []
        self._seen: dict[int, list[int]] = {}
        self._step: int | None = None
        self._warned_of_device = False

    @property
    def begun(self) -> bool:
        """Whether the first step has begun; batches fetched earlier belong to no step."""
        return self._step is not None

    def begin(self, step: int) -> None:
        """Mark the start of step ``step``."""
        self._step = step
        self._seen.pop(step, None)  # the loop left this step and entered it again
        while len(self._seen) >= _KEPT:
            del self._seen[min(self._seen)]

    def note(self, batch: Any) -> None:
        """Record a batch of the running step; call it before the batch is moved to a device."""
        if self._step is None:
            return
        found = fingerprint(batch)
        if found.devices and not self._warned_of_device:
            self._warned_of_device = True
            logger.info(
                "ckptd receives batches on %s and does not fingerprint their contents, because "
                "reading them would wait for the device",
                ", ".join(found.devices),
            )
        self._seen.setdefault(self._step, []).append(found.value)

    def add(self, source: Positioned) -> dict[str, Any] | None:
        """Add a source of batches, and move it to its recorded position. Sources are identified by the
        order of these calls.
        """
        at = len(self._sources)
        self._sources.append(source)
        return self._recorded[at] if at < len(self._recorded) else None

    def state_dict(self) -> dict[str, Any]:
        positions = [source.position() for source in self._sources]
        # Until `batches` is called again, the recorded state is the current one.
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
        """Descriptions of the differences from the recorded state. Names only the first batch that differs,
        because later differences may follow from it.
        """
        before: dict[int, list[int]] = recorded["fingerprints"]
        for step in sorted(before.keys() & self._seen.keys()):
            if before[step] != self._seen[step]:
                return [_other_batch(step, len(before[step]), len(self._seen[step]))]
        if values.equal(self.state_dict(), recorded):
            return []
        return ["the position in the data (was a batch fetched outside the body of the loop?)"]


def _other_batch(step: int, before: int, now: int) -> str:
    if before != now:
        return (
            f"the batch of iteration {step} differs from the one before the crash: it took "
            f"{before} fetches then and {now} now "
            "(check the number of accumulated micro-batches, and that every batch is fetched in "
            "the body of the loop)"
        )
    return (
        f"the batch of iteration {step} differs from the one before the crash. Usual causes: "
        "samples use a random generator "
        "that ckptd does not find (make it an attribute of the dataset, or use the global one of "
        "torch, numpy or Python); the dataset, "
        "batch size or number of workers has changed; files are listed in another order (sort them)"
    )
