"""Several ranks as threads of one process; their collective calls are those of a job's ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ckptd.client.ranks.collectives import Collectives

__all__ = ["LeftAlone", "Rounds", "outcomes"]

T = TypeVar("T")

_PATIENCE_S = 60.0


class LeftAlone(RuntimeError):
    """Another rank is gone and never said its part: in a process group, one would hang until the time is out."""


class Rounds:
    """Rounds in which everybody speaks once."""

    def __init__(self, num_ranks: int) -> None:
        self._rounds: list[dict[int, bytes]] = []
        self._at = [0] * num_ranks  # each rank's next round
        self._left: set[int] = set()
        self._changed = threading.Condition()

    def of(self, rank: int) -> Collectives:
        """The collective calls of this rank, on a node of its own."""

        def exchange(said: bytes) -> list[bytes]:
            with self._changed:
                number = self._at[rank]
                self._at[rank] += 1
                if number == len(self._rounds):
                    self._rounds.append({})
                heard = self._rounds[number]
                heard[rank] = said
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: len(heard) == len(self._at) or self._left - heard.keys(), _PATIENCE_S
                )
                if len(heard) < len(self._at):
                    raise LeftAlone(f"rank {rank} waits in round {number} for others")
                return [heard[r] for r in range(len(self._at))]

        return Collectives(exchange, rank=rank, node=f"n{rank}")

    def leave(self, rank: int) -> None:
        """A rank takes part no more."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()


def outcomes(work: Sequence[Callable[[Collectives], T]]) -> list[T | Exception]:
    """What each rank's work returned or raised; `LeftAlone` where a rank waited for another that did either."""
    rounds = Rounds(len(work))

    def run(rank: int) -> T | Exception:
        try:
            return work[rank](rounds.of(rank))
        except Exception as error:  # noqa: BLE001 - it is what the test wants to see
            return error
        finally:
            rounds.leave(rank)

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, range(len(work))))
