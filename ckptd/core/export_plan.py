"""The plan of an export: whole tensors, with names and dtypes, from the entries of snapshots. Pure.

One snapshot contains the compute weights of every operator (of anchored ones, their parameter), so it is a
whole model of that iteration. Slices ``<param>[a:b]`` are joined to their tensor. A parameter that is
anchored in another dtype than its compute dtype is converted, if another snapshot (or another slice) shows
that dtype. A dense snapshot anchors every operator: its parameters stay unchanged, and its optimizer state is
complete.

An export is the model of one rank. If several ranks have the same parameter (under data parallelism all of
them), one of them captures it for all, and the trainer reports the ranks whose images contain the rest
(`SharedRows`). So `join` completes the rank's own image, with its unshared parameters, buffers and step
scalars, by the tensors that other ranks' images of the same iteration contain for it. Other tensors of those
images are not used: another rank's parameter of the same name may be another expert.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptd.storage.image_format import DTYPE_SIZE, ImageTensor, TensorEntry
from ckptd.storage.model_set import plain_names
from ckptd.units import first_of


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ascending ranges: 1, 3 to 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)


def named_ranks(ranks: Collection[int]) -> str:
    """Ranks in words: rank 1; ranks 1, 3 to 7."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


OURS = "ckptd."  # entries that only the client reads
BUFFER, MASTER, OPTIM = "buffer/", "master/", "optim/"
_NO_PARAMETER = (OURS, BUFFER, MASTER, OPTIM)

_SLICE = re.compile(r"(?P<name>.*)\[(?P<begin>\d+):(?P<end>\d+)\]", re.DOTALL)


def split_rows(name: str) -> tuple[str, tuple[int, int] | None]:
    """The name without the rows, and the rows (None: the whole tensor)."""
    match = _SLICE.fullmatch(name)
    if match is None:
        return name, None
    return match["name"], (int(match["begin"]), int(match["end"]))


def param_and_key(name: str) -> tuple[str, str]:
    """The parameter (or buffer) and the key of its optimizer state (``master``; empty: the
    parameter itself).
    """
    if name.startswith(MASTER):
        return name.removeprefix(MASTER), "master"
    if name.startswith(OPTIM):
        key, _, param = name.removeprefix(OPTIM).partition("/")
        return param, key
    return name.removeprefix(BUFFER), ""


class ExportError(RuntimeError):
    """The export or import cannot be done; the message gives the reason and the remedy."""


class DamagedSnapshot(ExportError):
    """The stored bytes differ from the sealed (or imported) ones."""


_EXTRA = "extra/"  # prefix of parameters that belong to an optimizer but not to the model
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a parameter (None: all rows) that the images of another rank contain, for all ranks that
    have them.
    """

    param: str
    rows: tuple[int, int] | None
    rank: int


@dataclass(frozen=True)
class SnapshotFacts:
    """Facts about a snapshot besides its tensors.

    Attributes:
        dense: every operator is anchored.
        compute: the compute dtype of parameters (or buffers) for which it may differ.
        rows: all parameters of the model, with their minimum number of rows (0: whole); empty if unknown.
        transient: buffers that the model's state dict omits.
        aliases: further names of parameters with several names.
        groups: (optimizer, group) of each parameter of an optimizer; empty if unknown.
        shares: the rows that other ranks capture for this one.
        aligned: windows are known to be aligned: only the first snapshot of a window is whole.
        partial: it has some of the experts only, or their weights or state.
        newest: of the checkpoint that stores a partial snapshot, if this is an older one: it may lack what
            the newer ones have. -1: it is not.
    """

    dense: bool = False
    compute: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    transient: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    shares: tuple[SharedRows, ...] = ()
    aligned: bool = True
    partial: bool = False
    newest: int = -1


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor to write, and its entries in the snapshot, in order.

    It is the optimizer state ``key`` of ``param``, its ``master``, or (if ``key`` is empty) a parameter
    or buffer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[ImageTensor, ...]
    param: str
    key: str = ""

    @property
    def entry(self) -> TensorEntry:
        """The tensor's entry in the layout of the export."""
        return TensorEntry(self.name, self.dtype, self.shape)

    @property
    def converted(self) -> bool:
        """Whether one of its pieces has another dtype."""
        return any(piece.dtype != self.dtype for piece in self.pieces)


@dataclass(frozen=True)
class ExportPlan:
    """The contents of an export: the model, and the optimizer's state if it is complete.

    ``names``: the exported name of each parameter of the trainer; ``aliases``: further names of
    parameters that the model has under several names (the export contains them once).
    """

    model: tuple[Whole, ...]
    optimizer: tuple[Whole, ...]
    names: Mapping[str, str]
    aliases: Mapping[str, str]

    @property
    def pieces(self) -> list[ImageTensor]:
        """All entries to read, in order."""
        return [piece for whole in (*self.model, *self.optimizer) for piece in whole.pieces]


def plan_export(
    tensors: Iterable[ImageTensor],
    facts: SnapshotFacts,
    *,
    keep_prefix: bool = False,
    optimizer: bool = False,
) -> ExportPlan:
    """Plan the whole tensors of a snapshot, by descending item size, then in the given order.

    Args:
        tensors: all tensors of the snapshot, in the order of their bytes.
        keep_prefix: keep the trainer's names, including the prefixes of wrappers such as DDP.
        optimizer: include the optimizer's state (of a dense snapshot).
    Raises:
        ExportError: slices do not form whole tensors, or the snapshot lacks parameters.
    """
    groups: dict[str, list[tuple[int, int, ImageTensor]]] = {}
    place: dict[str, int] = {}
    # A sparse snapshot contains only parts of the optimizer's state.
    passed = (OURS,) if optimizer and facts.dense else (OURS, MASTER, OPTIM)
    for number, tensor in enumerate(tensors):
        if not tensor.name.startswith(passed):
            name, rows = split_rows(tensor.name)
            groups.setdefault(name, []).append((*(rows or (-1, -1)), tensor))
            place[tensor.name] = number
    wholes = [_join(name, sorted(found, key=_rows), facts) for name, found in groups.items()]
    params = {w.param: w for w in wholes if not w.key}
    _check_complete(params, facts)
    _check_state([w for w in wholes if w.key], params)
    model = [w for w in wholes if not w.key and not w.param.startswith(_EXTRA)]
    model = [w for w in model if w.pieces[0].name.removeprefix(BUFFER) not in facts.transient]
    known = [w.param for w in model]
    aliases = {other: name for other, name in facts.aliases.items() if name in known}
    plain = [*known, *aliases]
    names = {name: name for name in plain} if keep_prefix else plain_names(plain)
    _check_unique([names[name] for name in plain])
    owned = frozenset(known)
    state = [w for w in wholes if w.key and w.param in owned]
    named = [_named(w, _state_name(names[w.param], w.key)) for w in state]
    _check_unique([w.name for w in named])
    return ExportPlan(
        _ordered([_named(w, names[w.param]) for w in model], place),
        _ordered(named, place),
        {name: names[name] for name in known},
        {names[other]: names[name] for other, name in aliases.items()},
    )


def smallest_dtypes(snapshots: Iterable[Iterable[ImageTensor]]) -> dict[str, str]:
    """The smallest dtype of each parameter in any of the snapshots.

    A snapshot that does not anchor a parameter contains it in its compute dtype, which is never the
    larger one.
    """
    dtypes: dict[str, str] = {}
    for tensor in (tensor for tensors in snapshots for tensor in tensors):
        name, _ = split_rows(tensor.name)
        dtypes[name] = _smaller(dtypes.get(name, tensor.dtype), tensor.dtype)
    return dtypes


def _join(name: str, parts: Sequence[tuple[int, int, ImageTensor]], facts: SnapshotFacts) -> Whole:
    param, key = param_and_key(name)
    dtype = facts.compute.get(name, parts[0][2].dtype) if not key else parts[0][2].dtype
    for _, _, tensor in parts:
        dtype = _smaller(dtype, tensor.dtype)
    pieces = tuple(tensor for _, _, tensor in parts)
    if parts[0][0] < 0:
        if len(parts) > 1:
            raise ExportError(f"the snapshot contains {name} both whole and in slices")
        return Whole(name, dtype, pieces[0].shape, pieces, param, key)
    row = 0
    for begin, end, tensor in parts:
        if begin != row or tensor.shape[:1] != (end - begin,):
            known = facts.rows and (facts.aligned or facts.partial)
            why = _why(facts) if known else ""
            raise ExportError(f"the slices of {name} leave a gap or overlap at row {row}{why}")
        if tensor.shape[1:] != pieces[0].shape[1:]:
            raise ExportError(f"the slices of {name} differ in shape")
        row = end
    return Whole(name, dtype, (row, *pieces[0].shape[1:]), pieces, param, key)


def _check_complete(wholes: Mapping[str, Whole], facts: SnapshotFacts) -> None:
    missing = [
        name
        for name, count in facts.rows.items()
        if name not in wholes or (count and wholes[name].shape[:1] != (count,))
    ]
    if missing:
        ranks = {share.rank for share in facts.shares if share.param in missing}
        nor = f", and the tensors that {named_ranks(ranks)} captured for it do not complete it" * bool(ranks)
        raise ExportError(f"the snapshot does not contain {first_of(missing, _MOST_NAMED)}{nor}{_why(facts)}")


def _check_state(state: Iterable[Whole], params: Mapping[str, Whole]) -> None:
    """Check that sliced state has as many rows as its parameter; the slices may come from several ranks."""
    for whole in state:
        param = params.get(whole.param)
        sliced = split_rows(whole.pieces[0].name)[1] is not None
        if param is not None and sliced and whole.shape[:1] != param.shape[:1]:
            raise ExportError(
                f"the snapshot contains only {whole.shape[0]} of {param.shape[0]} rows of the "
                f"optimizer's state {whole.key!r} of {whole.param}; export with --format "
                "safetensors, which omits this state, or choose another iteration"
            )


def _why(facts: SnapshotFacts) -> str:
    """Why a snapshot is not whole, as far as that is known, and what to do."""
    if facts.newest >= 0:
        return (
            ": of an older partial snapshot storage has only what newer ones of its checkpoint lack; choose "
            f"iteration {facts.newest}"
        )
    if facts.partial:
        return (
            ": a partial snapshot has the weights of all experts with PartialOptions(scope='optimizer') "
            "only. To export the model of one iteration, resume the run with an exact policy; to take "
            "experts of earlier iterations, pass --older-experts"
        )
    why = ": only the first snapshot of an aligned window contains the whole model" * facts.aligned
    return f"{why}; choose another iteration"


def _check_unique(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ExportError(
            "two tensors of the model (for example a parameter and a buffer) have the same name: "
            f"{', '.join(twice)}"
        )


def _state_name(name: str, key: str) -> str:
    return f"master.{name}" if key == "master" else f"state.{name}.{key}"


def _named(whole: Whole, name: str) -> Whole:
    return Whole(name, whole.dtype, whole.shape, whole.pieces, whole.param, whole.key)


def _ordered(wholes: Iterable[Whole], place: Mapping[str, int]) -> tuple[Whole, ...]:
    return tuple(sorted(wholes, key=lambda w: (-DTYPE_SIZE[w.dtype], place[w.pieces[0].name])))


def _smaller(one: str, other: str) -> str:
    return min(one, other, key=lambda kind: (DTYPE_SIZE[kind], kind))


def _rows(part: tuple[int, int, ImageTensor]) -> int:
    return part[0]


Rows = tuple[int, int]


@dataclass(frozen=True)
class RankImage:
    """One rank's snapshot of the iteration.

    Attributes:
        tensors: all its tensors, in the order of its bytes.
        dense: it anchors every operator of its rank.
        snapshots: the tensors of all snapshots of the same rank, including this one; they show the
            compute dtypes.
    """

    tensors: Sequence[ImageTensor]
    dense: bool
    snapshots: Sequence[Sequence[ImageTensor]] = field(default=())


@dataclass(frozen=True)
class JoinedSnapshot:
    """A rank's snapshot with the tensors that other ranks captured for it.

    Attributes:
        tensors: the rank's own tensors in the order of their bytes, then those of other ranks, rank by rank.
        ranks: by name, the rank whose image contains the tensor.
    """

    facts: SnapshotFacts
    tensors: tuple[ImageTensor, ...]
    ranks: Mapping[str, int]


def lacking(
    tensors: Iterable[ImageTensor], shares: Iterable[SharedRows]
) -> dict[int, tuple[SharedRows, ...]]:
    """The rows that other ranks captured and that these tensors lack, by rank."""
    held: dict[str, list[Rows | None]] = {}
    for tensor in tensors:
        name, rows = split_rows(tensor.name)
        held.setdefault(name, []).append(rows)
    found: dict[int, list[SharedRows]] = {}
    for share in shares:
        if not _holds(held.get(share.param, ()), share.rows):
            found.setdefault(share.rank, []).append(share)
    return {rank: tuple(found[rank]) for rank in sorted(found)}


def join(
    rank: int,
    image: RankImage,
    facts: SnapshotFacts,
    lacks: Mapping[int, Sequence[SharedRows]],
    others: Mapping[int, RankImage],
) -> JoinedSnapshot:
    """Complete the image of ``rank`` with the rows that it lacks; `plan_export` checks that the
    result is whole.

    Args:
        facts: the facts from the trainer; the other facts are computed here.
        lacks: the result of `lacking`.
        others: the images of those ranks.
    """
    tensors, ranks = list(image.tensors), {tensor.name: rank for tensor in image.tensors}
    dense, snapshots = image.dense, list(image.snapshots)
    for owner, shares in lacks.items():
        other, params = others[owner], {share.param for share in shares}
        taken = [t for t in _taken(shares, other.tensors) if t.name not in ranks]
        tensors += taken
        ranks.update({tensor.name: owner for tensor in taken})
        # A sparse image has no optimizer state for these rows.
        dense = dense and other.dense
        snapshots += [[t for t in found if _param(t) in params] for found in other.snapshots]
    # A dense image contains the parameters in their trained dtype.
    compute = {} if dense else smallest_dtypes(snapshots)
    return JoinedSnapshot(replace(facts, dense=dense, compute=compute), tuple(tensors), ranks)


def with_older(images: Sequence[Sequence[ImageTensor]]) -> tuple[list[ImageTensor], dict[str, int]]:
    """The tensors of a partial snapshot, and what it lacks of parameters, each from the newest older one.

    Args:
        images: the tensors of the snapshot, then those of older ones of its chain, the newest first.
    Returns:
        The tensors, and of those from older images the number of the image, by name.
    """
    found = list(images[0])
    held, numbers = {tensor.name for tensor in found}, dict[str, int]()
    for number, tensors in enumerate(images[1:], start=1):
        new = [t for t in tensors if t.name not in held and not t.name.startswith(_NO_PARAMETER)]
        found += new
        held.update(tensor.name for tensor in new)
        numbers.update((tensor.name, number) for tensor in new)
    return found, numbers


def _taken(shares: Sequence[SharedRows], tensors: Iterable[ImageTensor]) -> list[ImageTensor]:
    """The tensors within the shares: rows of parameters, and their masters and optimizer state."""
    wanted: dict[str, list[Rows | None]] = {}
    for share in shares:
        wanted.setdefault(share.param, []).append(share.rows)
    named = [(t, *split_rows(t.name)) for t in tensors if not t.name.startswith((OURS, BUFFER))]
    # State has the same rows as its parameter; the number of rows is known only for the parameter.
    within = {
        (name, rows)
        for tensor, name, rows in named
        if name in wanted and _holds(wanted[name], rows or _all_rows(tensor, wanted[name]))
    }
    return [tensor for tensor, name, rows in named if (param_and_key(name)[0], rows) in within]


def _all_rows(tensor: ImageTensor, wanted: Sequence[Rows | None]) -> Rows | None:
    """The row range of a whole tensor, if the share is given in rows."""
    return None if None in wanted or not tensor.shape else (0, tensor.shape[0])


def _holds(held: Sequence[Rows | None], rows: Rows | None) -> bool:
    """Whether ``held`` contains all of these rows (None: the whole tensor)."""
    if None in held:
        return True
    if rows is None:
        return False
    at, end = rows
    for begin, stop in sorted(found for found in held if found is not None):
        if begin <= at < stop:
            at = stop
    return at >= end and bool(held)


def _param(tensor: ImageTensor) -> str:
    return param_and_key(split_rows(tensor.name)[0])[0]
