"""What the ranks of a job agree on before the first snapshot: what their window follows from, and the window.

Were one rank to go over to another before the others, what they record meanwhile could not be
replayed together: later changes are made at one iteration
(``ckptd.client.schedule.schedule_change``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.replicated_params import Replicas
from ckptd.client.ranks.store_agreement import StoreAgreement
from ckptd.client.ranks.store_barrier import job_store

__all__ = ["InitialSchedule"]

logger = get_logger(__name__)

_WAIT_STEPS = 100


class InitialSchedule:
    """One rank's part; nothing here blocks, and None means that other ranks have yet to tell."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        self._agreement: StoreAgreement | None = None
        self._proposed: set[str] = set()
        self._waits_since: int | None = None
        self._warned = False

    def limits(self, measure: Callable[[], tuple[int, int, int]]) -> tuple[int, int, int] | None:
        """The smallest over all ranks of what can be copied per step, of the memory (bytes), and of
        the number of operators.

        From equal limits equal models get equal plans; and no rank can have a window longer than
        its operators are many.

        Args:
            measure: the same of this rank, asked once.
        """
        if "limits" not in self._proposed:
            self._propose("limits", *(-number for number in measure()))
        found = self._agreed().largest("limits")
        return None if found is None else (-found[0], -found[1], -found[2])

    def first(self, mine: int, *, dense: bool, stride: int) -> tuple[int, bool, int] | None:
        """The first window of all ranks, whether their snapshots are dense, and how many iterations
        lie between two.

        Args:
            dense: for this rank only dense snapshots are exact; then all take dense ones.
            stride: as this rank has seen it; the shortest counts, since one rank may have missed a
                boundary by itself.
        """
        self._propose("window", mine, int(dense), -stride)
        found = self._agreed().largest("window")
        return None if found is None else (found[0], bool(found[1]), -found[2])

    def shares_agree(self, window: int, fingerprints: Mapping[Replicas, int]) -> bool | None:
        """Whether in each group all members have planned what they share with the same fingerprint
        as this rank.

        It may be asked before that window is agreed on, so that the answer is there when it is. All
        members of a group come to the same answer about what they told first. Whoever plans
        otherwise later hears False: it must capture everything itself, and whatever the others
        leave to it is then there.
        """
        alike: bool | None = True
        for group, fingerprint in fingerprints.items():
            what = f"shares-{group.key}-{window}"
            self._propose(what, fingerprint, -fingerprint, among=len(group.ranks))
            found = self._agreed().largest(what)
            if found is None:
                alike = None if alike else alike
            elif found != (fingerprint, -fingerprint):
                alike = False
        return alike

    def waits(self, step: int) -> None:
        """Tell once if other ranks take long: the reason stands in their logs, not here."""
        self._waits_since = step if self._waits_since is None else self._waits_since
        if step >= self._waits_since + _WAIT_STEPS and not self._warned:
            self._warned = True
            text = (
                f"no snapshots for {_WAIT_STEPS} steps: not every rank has told yet which "
                "window it needs; the logs of the others say why"
            )
            logger.warning("%s", text)
            self._memory.session.notice("warning", "not_protected", text)

    def close(self) -> None:
        """Stop waiting for other ranks."""
        if self._agreement is not None:
            self._agreement.close()

    def _propose(self, what: str, *numbers: int, among: int | None = None) -> None:
        if what not in self._proposed:
            self._proposed.add(what)
            self._agreed().propose(what, numbers, among=among)

    def _agreed(self) -> StoreAgreement:
        """Where the ranks of this epoch agree."""
        if self._agreement is None:
            identity = self._memory.identity
            prefix = f"ckptd/{identity.job}/{identity.run}/{self._memory.epoch}"
            self._agreement = StoreAgreement(job_store(), identity, prefix=prefix)
        return self._agreement
