"""Whether ranks that should hold the same values still do: digests of their snapshots are compared. Pure.

Data parallel ranks hold the same weights and optimizer state, bit for bit, at the top of every iteration. A
bit that flips in one of them stays there: no collective brings it back. Where each rank captures all of its
parameters, sealing makes a digest of each tensor on each rank, so a comparison costs a message.

What differs is not always a fault, so two rules prevent false alarms. A tensor is compared once it was equal
on all ranks in two snapshots in a row. And if more than half of a *family* (the parameters, their master
weights, or one key of the optimizer's state) differs, and no value is that of most ranks, the ranks have
*diverged*: by stochastic rounding, between two steps of local SGD, or because one of them skipped an update.
This is reported as such, once in an epoch, and the comparison of the family begins anew. A snapshot of a
window may have few tensors of a family: then those of the next snapshots decide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.core.export_plan import MASTER, OPTIM, param_and_key

DIGEST_BYTES = 8  # of each tensor: half of its xxh3_128
MAX_PENDING = 16  # snapshots that wait for ranks: more than seals are behind each other
_EQUAL_BEFORE = 2
_ENOUGH = 4  # tensors of a family, to judge whether most of it differs
_MAX_VALUES = 64  # different contents of one snapshot that are looked at: with more, all have diverged
_MAX_SETS = 256  # sets of tensors: a window has one for each phase


@dataclass(frozen=True, slots=True)
class RankDigests:
    """The digests of the tensors that one rank's snapshot shares with other ranks.

    Args:
        num_ranks: how many ranks hold these tensors.
        tensors: a number of the set of tensors, equal if their names, dtypes and shapes are.
        digests: ``DIGEST_BYTES`` for each tensor.
    """

    rank: int
    num_ranks: int
    epoch: int
    iteration: int
    tensors: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class Equal:
    """All tensors of a snapshot are the same on these ranks."""

    iteration: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Differing:
    """Tensors differ that were the same in snapshots before; each is told once, until it is equal again.

    ``odd``: by tensor, the ranks whose value is not that of most ranks; empty if no value is.
    ``equal_at``: the last iteration at which all of them were equal; -1: before the order of anchors changed.
    """

    iteration: int
    equal_at: int
    ranks: tuple[int, ...]
    odd: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Diverged:
    """These families are not the same on the ranks, and not as by a fault."""

    iteration: int
    ranks: tuple[int, ...]
    families: tuple[str, ...]


Finding = Equal | Differing | Diverged


class _Set:
    """A set of tensors: names, dtypes, families, and since when each was equal.

    Attributes:
        times: how often it was compared in this epoch; ``iteration``: when last.
        differed: by row, after how many comparisons it differed without having been equal before; below 0:
            so often it was equal in other sets.
    """

    def __init__(self, names: Sequence[str], dtypes: Sequence[str]) -> None:
        self.names = names
        self.keys = tuple(zip(names, dtypes, strict=True))
        self.families = tuple(map(family_of, names))
        self.times, self.iteration = 0, -1
        self.differed: dict[int, int] = {}

    def begin(self) -> None:
        """Nothing is known to be equal any more."""
        self.times, self.iteration = 0, -1
        self.differed.clear()

    def was_equal(self, row: int) -> bool:
        """Whether this tensor was equal often enough in a row, before this comparison."""
        return self.times - self.differed.get(row, 0) >= _EQUAL_BEFORE

    def rows_of(self, family: str) -> list[int]:
        return [row for row, of in enumerate(self.families) if of == family]


@dataclass(frozen=True, slots=True)
class _Suspect:
    iteration: int
    equal_at: int
    ranks: tuple[int, ...]
    odd: tuple[int, ...]


@dataclass(slots=True)
class _Trial:
    """Tensors of one family that differ, and whether each tensor differs that was compared since."""

    suspects: dict[str, _Suspect] = field(default_factory=dict)
    seen: dict[str, bool] = field(default_factory=dict)

    @property
    def has_diverged(self) -> bool:
        most = 2 * sum(self.seen.values()) > len(self.seen)
        return most and not all(suspect.odd for suspect in self.suspects.values())


class ReplicaComparison:
    """Compares one group of ranks, snapshot by snapshot.

    A snapshot is compared when all ranks' digests are known, or, with those that are, when newer ones need
    its place. Only what all ranks have counts as equal.

    Attributes:
        compared_up_to: the newest iteration that was compared; -1: none.
        differing: the tensors that differ now, with the ranks as in `Differing`.
        diverged: the families that diverged in this epoch.
    """

    def __init__(self) -> None:
        self._epoch, self._num_ranks, self._own_up_to = -1, 0, -1
        self._sets: dict[int, _Set] = {}
        # By iteration and set of tensors: the ranks by their digests, which are mostly the same.
        self._pending: dict[tuple[int, int], dict[bytes, set[int]]] = {}
        self._trials: dict[str, _Trial] = {}
        # Tensors, by name and dtype, that were equal often enough in a row in some set.
        self._proven: set[tuple[str, str]] = set()
        self.compared_up_to = -1
        self.differing: dict[str, tuple[int, ...]] = {}
        self.diverged: set[str] = set()

    def name(self, tensors: int, names: Sequence[str], dtypes: Sequence[str]) -> None:
        """Learn the names and dtypes of a set of tensors, in the order of their digests.

        A new order of anchors makes new sets of the same tensors, which were equal before.
        """
        if tensors in self._sets:
            return
        while len(self._sets) >= _MAX_SETS:  # of plans that are gone
            del self._sets[next(iter(self._sets))]
        self._sets[tensors] = known = _Set(names, dtypes)
        equal = (row for row, key in enumerate(known.keys) if key in self._proven)
        known.differed = dict.fromkeys(equal, -_EQUAL_BEFORE)

    def note(self, told: RankDigests, *, own: bool = True) -> list[Finding]:
        """Note one rank's digests, and compare what is complete.

        Args:
            own: a rank of this node has the snapshot. What others tell of snapshots that no such rank has
                reached goes first if there is too much.
        """
        if told.epoch < self._epoch:
            return []
        if told.epoch > self._epoch:
            self._begin(told.epoch)
        known = self._sets.get(told.tensors)
        if known is not None and told.iteration <= known.iteration:
            return []  # it comes too late, or again
        self._num_ranks = told.num_ranks
        self._own_up_to = max(self._own_up_to, told.iteration if own else -1)
        key = told.iteration, told.tensors
        values = self._pending.setdefault(key, {})
        if not any(told.rank in ranks for ranks in values.values()):
            values.setdefault(told.digests, set()).add(told.rank)
        found: list[Finding] = []
        if sum(map(len, values.values())) >= told.num_ranks:
            found += self._compare(key)
        while len(self._pending) > MAX_PENDING:
            newest = max(self._pending)
            if newest[0] > self._own_up_to:
                del self._pending[newest]
            else:
                found += self._compare(min(self._pending))
        return found

    def _begin(self, epoch: int) -> None:
        """Ranks begin from what a recovery gave them: nothing is known to be equal."""
        self._epoch, self._own_up_to = epoch, -1
        for state in (self._pending, self._trials, self._proven, self.differing, self.diverged):
            state.clear()
        for known in self._sets.values():
            known.begin()

    # -- one snapshot ----------------------------------------------------------------------------

    def _compare(self, key: tuple[int, int]) -> list[Finding]:
        iteration, tensors = key
        values, known = self._pending.pop(key), self._sets.get(tensors)
        ranks = tuple(sorted(rank for those in values.values() for rank in those))
        if known is None or len(ranks) < 2:
            return []  # no rank of this node has such a snapshot, or one rank alone
        if any(len(value) != DIGEST_BYTES * len(known.names) for value in values):
            return []  # not of this set
        if iteration <= known.iteration:
            return []  # a newer one was complete first
        differing, whole = _differing_rows(list(values), len(known.names)), len(ranks) >= self._num_ranks
        if not (differing or whole):
            return []
        self.compared_up_to = max(self.compared_up_to, iteration)
        if self.differing and whole:
            equal = {name for row, name in enumerate(known.names) if row not in differing}
            self.differing = {n: odd for n, odd in self.differing.items() if n not in equal}
        diverged: set[str] = set()
        if differing:
            diverged = self._suspect(known, differing, iteration, ranks, values)
        fresh, also_diverged = self._judged(known, differing)
        untold = (diverged | also_diverged) - self.diverged
        self.diverged |= untold
        known.times, known.iteration = known.times + whole, iteration
        if known.times == _EQUAL_BEFORE:
            self._proven.update(key for row, key in enumerate(known.keys) if known.was_equal(row))
        found: list[Finding] = [*_by_iteration(fresh)]
        if untold:
            found.append(Diverged(iteration, ranks, tuple(sorted(untold))))
        return found if differing else [*found, Equal(iteration, ranks)]

    def _suspect(
        self,
        known: _Set,
        differing: Collection[int],
        iteration: int,
        ranks: tuple[int, ...],
        values: Mapping[bytes, set[int]],
    ) -> set[str]:
        """Note what differs and was equal before; returns the families of which something was not."""
        diverged: set[str] = set()
        for row in differing:
            name, family = known.names[row], known.families[row]
            if not known.was_equal(row):
                known.differed[row] = known.times + 1
                self._proven.discard(known.keys[row])
                diverged.add(family)
            elif name not in self.differing:
                suspect = _Suspect(iteration, known.iteration, ranks, _odd_ones(values, row, len(ranks)))
                self._trials.setdefault(family, _Trial()).suspects.setdefault(name, suspect)
        return diverged

    def _judged(self, known: _Set, differing: Collection[int]) -> tuple[dict[str, _Suspect], set[str]]:
        """Judge the families with suspects of which enough tensors were compared since.

        Returns:
            The tensors that differ as by a fault, and the families that diverged.
        """
        fresh: dict[str, _Suspect] = {}
        diverged: set[str] = set()
        for family, trial in list(self._trials.items()):
            trial.seen |= {known.names[row]: row in differing for row in known.rows_of(family)}
            if len(trial.seen) < min(_ENOUGH, self._size_of(family)):
                continue
            del self._trials[family]
            if trial.has_diverged:
                self._begin_again(family)
                diverged.add(family)
            else:
                fresh |= trial.suspects
        self.differing |= {name: suspect.odd for name, suspect in fresh.items()}
        return fresh, diverged

    def _size_of(self, family: str) -> int:
        """How many tensors of the family are known, as far as that matters."""
        names: set[str] = set()
        for known in self._sets.values():
            names.update(n for n, of in zip(known.names, known.families, strict=True) if of == family)
            if len(names) >= _ENOUGH:
                break
        return len(names)

    def _begin_again(self, family: str) -> None:
        for known in self._sets.values():
            rows = known.rows_of(family)
            known.differed |= dict.fromkeys(rows, known.times + 1)
            self._proven.difference_update(known.keys[row] for row in rows)


def family_of(name: str) -> str:
    """The family of a tensor of an image: ``param``, ``master``, or ``optim/<key>``."""
    if name.startswith(MASTER):
        return "master"
    if name.startswith(OPTIM):
        return f"{OPTIM}{param_and_key(name)[1]}"
    return "param"


def _differing_rows(values: Sequence[bytes], num_tensors: int) -> Collection[int]:
    """The tensors of which not all values are the same."""
    if len(values) > _MAX_VALUES:
        return range(num_tensors)
    first, *others = values
    same: Sequence[int] = range(0, len(first), DIGEST_BYTES)
    differing = set[int]()
    for value in others:  # of ranks that train apart, most differs at once, and is not looked at again
        found = {at for at in same if value[at : at + DIGEST_BYTES] != first[at : at + DIGEST_BYTES]}
        if found:
            differing |= found
            same = [at for at in same if at not in found]
    return {at // DIGEST_BYTES for at in differing}


def _odd_ones(values: Mapping[bytes, set[int]], row: int, num_ranks: int) -> tuple[int, ...]:
    """The ranks without the value that more than half of the ranks have; none if there is no such value."""
    holders: dict[bytes, list[int]] = {}
    for value, ranks in values.items():
        one = value[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
        holders.setdefault(one, []).extend(ranks)
    most = max(holders.values(), key=len)
    if 2 * len(most) <= num_ranks:
        return ()
    return tuple(sorted(rank for ranks in holders.values() if ranks is not most for rank in ranks))


def _by_iteration(suspects: Mapping[str, _Suspect]) -> list[Differing]:
    found: list[Differing] = []
    for iteration in sorted({suspect.iteration for suspect in suspects.values()}):
        those = {name: s for name, s in suspects.items() if s.iteration == iteration}
        equal_at = min(suspect.equal_at for suspect in those.values())
        ranks = next(iter(those.values())).ranks
        found.append(Differing(iteration, equal_at, ranks, {name: s.odd for name, s in those.items()}))
    return found
