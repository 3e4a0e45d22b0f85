"""One run in a store, and how this node reads and writes it: what all that acts on the run shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ckptd.storage.checkpoints.reader import MapFunction
from ckptd.storage.checkpoints.signing import ManifestSigner
from ckptd.storage.stores.resilient import Resilient

__all__ = ["RunInStore"]

# What was decided is done within half the settle time, 300 s (docs/format.md §7, §8;
# `ckptd.persistence.run_retention`): one that has begun may take three requests' time.
_PROMPT_S = 60.0


@dataclass(frozen=True)
class RunInStore:
    """See the module."""

    store: Resilient
    job: str
    run: str

    map_fn: MapFunction
    """Spreads requests and digests over threads."""

    tell: Callable[[str, str, str], None]
    """Reports an event: level, kind, text."""

    read_back: bool = False
    """Compare what was stored, byte for byte, before it counts."""

    signer: ManifestSigner | None = None
    """Signs manifests; None: they are not signed."""

    wall_ns: Callable[[], int] = time.time_ns
    """This node's clock, which may be wrong."""

    @cached_property
    def prompt(self) -> Resilient:
        """The same store; gives up after a minute."""
        return self.store.within(_PROMPT_S)

    @property
    def title(self) -> str:
        """How log lines name the run."""
        return f"{self.job}/{self.run}"
