"""A rehearsal of a resume: once in each life, the step of an optimizer that a snapshot was loaded into is
compared with the step of the live one.

`KeptState` looks at what an optimizer keeps before each snapshot. It cannot see a variable in a closure,
an attribute of a class, a table by ``id()`` of a parameter, or state that is made anew after a load. The
snapshot lacks these, and a resumed job would differ silently. So just before the optimizer's step the
first snapshots are loaded into copies, which are stepped with the same gradients and random numbers and
compared with the live state bit for bit. Where they differ, the next step is repeated with a copy of all
that is in memory (the *control*). If the control steps like the live optimizer, the resume is not exact,
and the optimizer is refused. If it does not (a step that is not repeatable), copies prove nothing, and
the log says so.

A resume begins with optimizers as the program makes them. So these are copied when the checkpointer is
made, before the first step (`_Pristine`), with what their code keeps elsewhere.

The rehearsal leaves nothing behind: generators, and what the optimizer's code keeps elsewhere, are restored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckptd.client import values
from ckptd.client.capture.comparison import live_tensor, same_bits
from ckptd.client.capture.recorder import Recorder
from ckptd.client.capture.step_state import apply_groups, gather_groups
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.model.hooks import closure_of, with_closure
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Operator
from ckptd.client.model.snapshot_layout import EntrySource, Rows, common, free_bytes, merge, rows_of_piece
from ckptd.client.optimizers.optimizer_copies import CannotCopy, HiddenState, OptimizerCopier
from ckptd.client.optimizers.value_trees import (
    NotCapturable,
    flat_state,
    plain,
    plain_parts,
    plain_tensor,
)
from ckptd.client.recovery.snapshot_loading import Activity, SnapshotLoader
from ckptd.client.recovery.verification import identical
from ckptd.client.rng_state import capture_rng, restore_rng
from ckptd.core.slots.slots import SlotState
from ckptd.cuda.engine import CopyEngine
from ckptd.units import first_of

logger = get_logger(__name__)

# Of copies in host memory, made at once: they take about a second. More is rehearsed in part.
_MOST_BYTES = 2 << 30
# Besides the copies, a step makes temporary tensors of up to their size.
_WITH_TEMPORARIES = 2
_IMAGE_WAIT_S = 2.0
_MOST_TRIES = 16
_SHOWN = 5
_ALIGNMENT = 64
# What torch's gradient scaler sets on an optimizer for the time of one step.
_OF_A_SCALER = ("grad_scale", "found_inf")


class _NotNow(Exception):
    """This snapshot cannot be used for it; the next one may be."""


class _Failure(NamedTuple):
    """A copy of a snapshot differed from the live state; ``rows`` of the parameters were compared."""

    iteration: int
    paths: tuple[str, ...]
    rows: Rows


class Rehearsal:
    """The rehearsal of all optimizers of a rank, in one life.

    Args:
        live: as the program has made it: nothing is restored yet.
    Attributes:
        over: nothing is left to do.
        took_s: seconds of the training thread so far.
    """

    def __init__(self, live: LiveState, memory: RankMemory, recorder: Recorder, engine: CopyEngine) -> None:
        self._live, self._memory, self._recorder, self._engine = live, memory, recorder, engine
        self._left = {i: set(_updated_by(live, i)) for i in range(len(live.optimizers))}
        self._snapshots = dict.fromkeys(self._left, 0)
        self._running: dict[int, _SteppedCopy] = {}
        self._failed: dict[int, _Failure] = {}
        self._depth: dict[int, int] = {}
        self._iteration = -1
        self._tries, self._num_tensors = _MOST_TRIES, 0
        self.over, self.took_s = False, 0.0
        with self._surviving():
            self._hidden = HiddenState(live.kept.given)
            self._pristine: _Pristine | None = _Pristine(live, self._hidden)

    # -- the life of a step ----------------------------------------------------------------------

    def top(self) -> None:
        """The top of a step: forget copies that the last one did not finish."""
        self._running.clear()
        self._depth.clear()

    def enter(self, optimizer: int) -> bool:
        """A step of optimizer number ``optimizer`` begins; False if it is within another step of it (of the
        class from which it inherits).
        """
        self._depth[optimizer] = self._depth.get(optimizer, 0) + 1
        return self._depth[optimizer] == 1

    def before_update(self, optimizer: int, args: Any, kwargs: Any, loss: Any) -> None:
        """It is about to update its parameters; gradients are complete.

        Args:
            args, kwargs: of its step, as a pre-hook gets them.
            loss: what its closure has returned; None if it has none.
        """
        if self.over or optimizer not in self._left:
            return
        if optimizer not in self._failed and self._recorder.newest_of(optimizer) < 0:
            return
        with self._surviving():
            rng = capture_rng()
            try:
                self._try(optimizer, args, kwargs, loss, rng)
            finally:
                restore_rng(rng)

    def after_update(self, optimizer: int) -> None:
        """A step of it is over."""
        self._depth[optimizer] = self._depth.get(optimizer, 1) - 1
        copy = None if self._depth[optimizer] > 0 else self._running.pop(optimizer, None)
        if copy is None:
            return
        with self._surviving():
            self._judge(optimizer, copy, _differences(self._live, copy, optimizer))
        if not self._left:
            logger.info(
                "resume rehearsed: from a snapshot, optimizer %s makes the same of %d of %d "
                "parameters (%.0f ms in all)",
                self._live.kept.whose,
                self._num_tensors,
                len(self._live.owner),
                self.took_s * 1e3,
            )

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Give the rehearsal up if the body fails: the user's optimizer runs in it, and training goes on."""
        begun = time.perf_counter()
        try:
            yield
        except _NotNow as error:
            self._tries -= 1
            if not self._tries:
                self._skip(error)
        except Exception as error:  # noqa: BLE001 - logged there
            self._skip(error)
        finally:
            self.took_s += time.perf_counter() - begun

    # -- one step of a copy ------------------------------------------------------------------------

    def _try(self, index: int, args: Any, kwargs: Any, loss: Any, rng: dict[str, Any]) -> None:
        if index in self._running:
            raise CannotCopy("it evaluates its closure several times in a step")
        self._check_hooks(index)
        if self._hidden.is_compiled:
            raise CannotCopy("its step is compiled, and would be compiled anew for a copy")
        assert self._pristine is not None
        failed = self._failed.get(index)
        if failed is not None:
            needed = sum(map(self._bytes_of, failed.rows))
            if needed * _WITH_TEMPORARIES > self._budget():
                raise self._too_little(needed)
            copy = self._pristine.control(failed.rows)
            copy.prepare(self._live, index)
        else:
            image = self._image_of(self._recorder.newest_of(index))
            copy = self._resumed(image, index)
            copy.prepare(self._live, index)
            self._compare_before(copy, image, index)
        restore_rng(rng)
        try:
            copy.step(index, args, kwargs, loss, self._hidden)
        except (CannotCopy, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if failed is not None:
                raise
            # It may lack what it kept elsewhere; the control, which has all of that, will tell.
            self._fail(index, copy, [f"its step, which raises {type(error).__name__}: {error}"])
            return
        self._running[index] = copy

    def _resumed(self, image: SnapshotImage, index: int) -> _SteppedCopy:
        plan = self._recorder.plan
        assert plan is not None
        assert self._pristine is not None
        updated = set(_updated_by(self._live, index))
        names = [n for n in _anchored_names(self._live, plan.operators, image) if n in updated]
        if not names:
            raise _NotNow("the snapshots of this rank hold nothing of what it updates")
        most = self._within_memory(names)
        in_part = len(most) < len(updated) and plan.policy_name == "dense"
        if in_part and (reasons := self._live.dependent()):
            raise CannotCopy(f"a copy of a part of its parameters tells nothing: {reasons[0]}")
        self._iteration = image.iteration
        self._snapshots[index] += 1
        return self._pristine.resumed(image, most, plan.operators, self._engine)

    def _image_of(self, iteration: int) -> SnapshotImage:
        """The snapshot of this iteration; waits for copies in flight."""
        table, until = self._memory.table, time.monotonic() + _IMAGE_WAIT_S
        self._memory.session.flush(_IMAGE_WAIT_S)
        while True:
            for record in table.records():
                complete = record.state in (SlotState.FILLED, SlotState.SEALED)
                if complete and (record.iteration, record.epoch) == (iteration, table.epoch):
                    return self._memory.images([record])[0]
            if time.monotonic() > until or self._engine.host_waits:
                raise _NotNow(f"the snapshot of iteration {iteration} came to nothing")
            time.sleep(0.001)

    def _compare_before(self, copy: _SteppedCopy, image: SnapshotImage, index: int) -> None:
        """Check that what was loaded equals the live state."""
        found = _differences(self._live, copy, index)
        if not found:
            return
        if changed := _changed_since(self._live, image, copy):
            # The loop changes it, and will do so after a resume, too.
            raise _NotNow(f"{changed} changes between the top of a step and its update")
        self._fail(index, copy, found)
        raise _NotNow(found[0])

    def _check_hooks(self, index: int) -> None:
        """What other hooks do to gradients and weights would be mistaken for the optimizer's work."""
        optimizer: Any = self._live.optimizers[index]
        before = list(optimizer._optimizer_step_pre_hooks.values())
        after = list(optimizer._optimizer_step_post_hooks.values())
        for hook in (*before[-1:], *after[:1]):
            if not (getattr(hook, "__module__", "") or "").startswith("ckptd."):
                raise CannotCopy("a hook of somebody else's runs just before or after its update")

    # -- the verdict -------------------------------------------------------------------------------

    def _judge(self, index: int, copy: _SteppedCopy, found: Sequence[str]) -> None:
        if index in self._failed:
            if found:
                raise CannotCopy(
                    f"a copy with all that is in memory does not step as it does ({first_of(found, _SHOWN)} "
                    "differ), so a copy tells nothing"
                )
            self._refuse(index, self._failed[index])
        elif found:
            self._fail(index, copy, found)
        else:
            self._num_tensors += len(self._left[index] & copy.rows.keys())
            self._left[index] -= copy.rows.keys()
            plan = self._recorder.plan
            window = 1 if plan is None or plan.policy_name == "dense" else plan.schedule.window
            if not self._left[index] or self._snapshots[index] >= window:
                del self._left[index]
            if not self._left:
                self._close()

    def _fail(self, index: int, copy: _SteppedCopy, found: Sequence[str]) -> None:
        self._failed[index] = _Failure(self._iteration, tuple(found), copy.rows)

    def _refuse(self, index: int, failure: _Failure) -> None:
        who = type(self._live.optimizers[index]).__name__
        assert self._pristine is not None
        changed = self._hidden.changed_since(self._pristine.outside)
        where = f" Outside of it has changed since the start: {first_of(changed, _SHOWN)}." if changed else ""
        resumed = self._memory.epoch_start >= 0
        kept = (
            "those of before stay as they are"
            if resumed
            else "those that were taken are given up, and after a failure this run begins anew"
        )
        self._recorder.refuse(
            f"optimizer {who} keeps state which cannot be captured: loaded into a copy of it, the "
            f"snapshot of iteration {failure.iteration} does not lead "
            f"to what its step makes of {first_of(failure.paths, _SHOWN)}.{where} No snapshot is taken any "
            f"more; {kept}. Keep that state in `state` or in attributes of "
            "the optimizer (tensors, numbers, text, lists, dicts), or use another optimizer; if a "
            "resume may differ there, pass recovery=RecoveryOptions(rehearse=False) "
            "(docs/optimizers.md)"
        )
        if not resumed:
            self._memory.session.flush(_IMAGE_WAIT_S)  # nobody seals them any more
            for segment in self._memory.forget_snapshots():
                self._engine.release(segment.memory)
        self._close()

    def _skip(self, error: Exception) -> None:
        """End the rehearsal without a verdict."""
        known = isinstance(error, CannotCopy | NotCapturable | _NotNow)
        why = str(error) if known else f"{type(error).__name__}: {error}"
        logger.log(
            logging.INFO if self._memory.identity.rank else logging.WARNING,
            "no rehearsal of a resume for optimizer %s, so what it may keep outside of its state "
            "is not looked for: %s (docs/optimizers.md)",
            self._live.kept.whose,
            why,
        )
        self._close()

    def _close(self) -> None:
        self.over, self._pristine = True, None
        self._running.clear()

    # -- memory ------------------------------------------------------------------------------------

    def _within_memory(self, names: Iterable[str]) -> list[str]:
        """As many of them, the smallest first, as may be copied at once."""
        sizes = {name: self._bytes_of(name) for name in names}
        budget, taken, total = self._budget(), [], 0
        for name in sorted(sizes, key=lambda n: sizes[n]):
            total += sizes[name]
            if total * _WITH_TEMPORARIES > budget:
                break
            taken.append(name)
        if not taken:
            raise self._too_little(min(sizes.values(), default=0))
        return taken

    def _too_little(self, needed: int) -> CannotCopy:
        return CannotCopy(
            "a copy with what a step takes beside it needs "
            f"{needed * _WITH_TEMPORARIES / 2**20:.1f} MiB on {self._engine.device}, "
            f"{self._budget() / 2**20:.1f} MiB may be used"
        )

    def _budget(self) -> int:
        free = free_bytes(self._engine.device)
        on_host = self._engine.device.type == "cpu"
        return min(free, _MOST_BYTES * _WITH_TEMPORARIES) if on_host else free

    def _bytes_of(self, name: str) -> int:
        """The size of its copy: weight, master, gradient and state."""
        live = self._live
        state = [v for v in live.state(name).values() if isinstance(v, Tensor)]
        parts = [part for value in state for part in plain_parts(value)]
        tensors = [live.params[name], live.held(name), live.held(name), *parts]
        return sum(t.numel() * t.element_size() for t in tensors)


class _SteppedCopy:
    """A state like the live one, to try one optimizer's step.

    Attributes:
        binding: its parameters and optimizers.
        rows: the rows of each parameter that count.
        whole: whether these are all that the live optimizers update.
        outside: what the optimizers' code keeps elsewhere, for this copy.
        scalars: those of the snapshot that was loaded; empty for a control.
    """

    def __init__(
        self, binding: LiveState, live: LiveState, rows: Rows, outside: list[Any], scalars: Any
    ) -> None:
        self.binding, self.rows, self.outside, self.scalars = binding, rows, outside, scalars
        updated = live.owner.keys() - live.elsewhere
        self.whole = all(rows.get(n) == [(0, live.num_rows(n))] for n in updated)

    def prepare(self, live: LiveState, index: int) -> None:
        """Copy the gradients and options with which the live optimizer is about to step."""
        apply_groups(self.binding, gather_groups(live))
        for name, held in self.binding.named_held():
            grad = live.held(name).grad if name in self.rows else None
            held.grad = None if grad is None else _copy_of(grad)
        for name in _OF_A_SCALER:
            if name in vars(live.optimizers[index]):
                self.binding.optimizers[index].__dict__[name] = vars(live.optimizers[index])[name]

    def step(self, index: int, args: Any, kwargs: Any, loss: Any, hidden: HiddenState) -> None:
        """Step optimizer number ``index`` as the live one is about to; ``loss``: of its closure."""
        optimizer = self.binding.optimizers[index]
        calls: list[Any] = []

        def closure() -> Any:
            calls.append(loss)
            if len(calls) > 1:
                raise CannotCopy("it evaluates its closure several times in a step")
            return loss

        if closure_of(args, kwargs) is not None:
            args, kwargs = with_closure(args, kwargs, closure)
        with ExitStack() as stack:
            stack.enter_context(hidden.replaced(self.outside))
            if dist.is_available() and dist.is_initialized():
                stack.enter_context(_NoCommunication())
            type(optimizer).step(optimizer, *args[1:], **kwargs)


class _NoCommunication(TorchDispatchMode):
    """Refuses collectives: other ranks do not join them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise CannotCopy("it communicates with other ranks within its step")
        return func(*args, **(kwargs or {}))


class _Pristine:
    """Optimizers as the program has made them; nothing is restored in ``live`` yet."""

    def __init__(self, live: LiveState, hidden: HiddenState) -> None:
        _check_kinds(live)
        copier = OptimizerCopier({id(t): t for t in _tensors(live)}, whole=True)
        self._live, self._hidden = live, hidden
        self._optimizers = [copier.optimizer(o, state=False) for o in live.optimizers]
        self._given = [copier.value(g, type(g).__name__) for g in live.kept.given]
        self.outside = hidden.copied(copier)
        self._attributes = {
            id(t): copier.value(dict(vars(t)), "an attribute of a parameter")
            for t in _tensors(live)
            if vars(t)
        }

    def resumed(
        self,
        image: SnapshotImage,
        names: Collection[str],
        operators: Sequence[Operator],
        engine: CopyEngine,
    ) -> _SteppedCopy:
        """These parameters as a resume from this snapshot makes them."""
        room = _Room(self._live, names, lambda tensor: self._attributes.get(id(tensor), {}))
        binding = room.binding(self._optimizers, self._given, state=False)
        loader, scalars = _PartLoader(binding, operators, engine, names), image.scalars()
        apply_groups(binding, scalars["groups"])
        loader.load(image, scalars, everything=True)
        outside = [room.copier.value(value, "outside") for value in self.outside]
        return _SteppedCopy(binding, self._live, loader.rows, outside, scalars)

    def control(self, rows: Rows) -> _SteppedCopy:
        """The live state, with all that is in memory."""
        live = self._live
        room = _Room(live, rows, vars)
        for name in live.owner.keys() - rows.keys():  # they are not updated here
            for part in live.state(name).values():
                room.copier.note(part, part)
        binding = room.binding(live.optimizers, live.kept.given, state=True)
        with torch.no_grad():
            for name in rows:
                binding.params[name].copy_(live.params[name])
                binding.held(name).copy_(live.held(name))
        return _SteppedCopy(binding, live, rows, self._hidden.copied(room.copier), {})


class _Room:
    """Parameters of a copy: those in ``names`` have memory, the others only a shape."""

    def __init__(
        self, live: LiveState, names: Collection[str], attributes: Callable[[Tensor], dict[str, Any]]
    ) -> None:
        self._live, self._model = live, nn.Module()
        made: dict[int, Tensor] = {}
        for name, param in live.params.items():
            made[id(param)] = _like(param, name in names)
            if not name.startswith("extra/"):
                _register(self._model, name, made[id(param)])
        for name, master in live.masters.items():
            made[id(master)] = _like(master, name in names)
        self.copier = OptimizerCopier(made, whole=True)
        for tensor in _tensors(live):
            kept = self.copier.value(attributes(tensor), "an attribute of a parameter")
            made[id(tensor)].__dict__.update(kept)
        self._masters = {name: made[id(master)] for name, master in live.masters.items()}

    def binding(
        self, optimizers: Sequence[torch.optim.Optimizer], given: Sequence[Any], *, state: bool
    ) -> LiveState:
        """A live state of copies of these optimizers."""
        copies = [self.copier.optimizer(o, state=state) for o in optimizers]
        wrapped = [self.copier.value(g, type(g).__name__) for g in given]
        made = LiveState(self._model, copies, self._masters, wrapped)
        if list(made.params) != list(self._live.params) or made.owner != self._live.owner:
            raise CannotCopy("its parameters have no names in common with those of its copy")
        return made


class _PartLoader(SnapshotLoader):
    """Loads what one snapshot holds of some parameters, and nothing else."""

    def __init__(
        self,
        binding: LiveState,
        operators: Sequence[Operator],
        engine: CopyEngine,
        names: Collection[str],
    ) -> None:
        super().__init__(binding, operators, engine)
        self._only = set(names)
        self._loaded: Rows = {}

    @property
    def rows(self) -> Rows:
        """The loaded rows. Other rows of a replicated parameter may be in another rank's snapshots."""
        active = self.activity.active_rows()
        both = {n: common(active[n], merge(rows)) for n, rows in self._loaded.items() if n in active}
        return {name: rows for name, rows in both.items() if rows}

    def targets(
        self, image: SnapshotImage, source: EntrySource, *args: Any, **options: Any
    ) -> list[tuple[EntrySource, Tensor]]:
        name = source.name
        if name not in self._only:
            return []
        found = super().targets(image, source, *args, **options)
        if source.kind == ("master" if name in self.binding.masters else "param"):
            total = self.binding.num_rows(name)
            self._loaded.setdefault(name, []).extend(piece.range(total) for piece, _ in found)
        return found


def _updated_by(live: LiveState, index: int) -> list[str]:
    return [name for name, (owner, *_) in live.owner.items() if owner == index]


def _anchored_names(live: LiveState, operators: Sequence[Operator], image: SnapshotImage) -> list[str]:
    """The parameters for which this snapshot holds all that their optimizer needs."""
    activity = Activity(live, operators)
    activity.activate(image.view.anchors)
    rows = activity.rows_of(activity.active) | activity.never_frozen()
    here = {source.name for source, _ in image.sources() if source.kind in ("param", "master")}
    return [n for n in live.owner if n in rows and n in here and n not in live.elsewhere]


def _differences(live: LiveState, copy: _SteppedCopy, index: int) -> list[str]:
    """The paths of what optimizer number ``index`` has made otherwise in the copy."""
    found: list[str] = []
    other = copy.binding
    for name, rows in copy.rows.items():
        if live.owner[name][0] != index:
            continue
        shape = live.held(name).shape
        if not _same(live.held(name), other.held(name), rows):
            found.append(f"the {'master' if name in live.masters else 'weight'} {name}")
        now, made = flat_state(live.state(name)), flat_state(other.state(name))
        found += [f"state[{name}][{key!r}]" for key in now.keys() ^ made.keys()]
        for key in now.keys() & made.keys():
            a, b = now[key], made[key]
            if isinstance(a, Tensor) and isinstance(b, Tensor) and plain_tensor(a):
                same = plain_tensor(b) and _same(a, b, rows if a.shape == shape else None)
            else:
                same = not (plain(a) and plain(b)) or values.equal(a, b)
            if not same:
                found.append(f"state[{name}][{key!r}]")
    for binding in (live, other):
        binding.kept.look(live.kept.specs)
    kept = live.kept.unlike(other.kept, index, None if copy.whole else copy.rows)
    return found + ([kept] if kept and kept not in found else [])


def _changed_since(live: LiveState, image: SnapshotImage, copy: _SteppedCopy) -> str:
    """The first live value of these parameters that differs from this snapshot; empty if none does."""
    for source, entry in image.sources():
        now = live_tensor(live, source) if source.kind != "packed" else None
        if now is None or source.kind == "buffer" or source.name not in copy.rows:
            continue
        if not same_bits(rows_of_piece(now, source), image.tensor(entry)):
            return f"{source.kind} {source.key} of {source.name}".replace("  ", " ")
    return live.kept.difference(copy.scalars.get("kept"), entries=copy.whole)


def _check_kinds(live: LiveState) -> None:
    for optimizer, keeper in zip(live.optimizers, live.keepers, strict=True):
        if keeper is not optimizer:
            raise CannotCopy("its state is spread over ranks, which communicate within its step")
    for name, held in live.named_held():
        if hasattr(held, "to_local"):
            raise CannotCopy(f"{name} is spread over ranks, which may communicate within its step")
        if not plain_tensor(held):
            raise CannotCopy(f"{name} is a {type(held).__name__}, of which no copy is made")


def _tensors(live: LiveState) -> Iterable[Tensor]:
    return [*live.params.values(), *live.masters.values()]


def _register(root: nn.Module, name: str, param: Tensor) -> None:
    *path, leaf = name.split(".")
    module = root
    for part in path:
        # Not by add_module, which refuses some names that a model may have.
        module = module._modules.setdefault(part, nn.Module()) or module
    module._parameters[leaf] = param  # type: ignore[assignment]


def _like(tensor: Tensor, real: bool) -> Tensor:
    made = (_empty(tensor) if real else torch.empty_like(tensor, device="meta")).detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _empty(tensor: Tensor) -> Tensor:
    """Memory with the same strides and alignment to 64 bytes: products may have other bits elsewhere."""
    here, size = local(tensor), tensor.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(here.shape, here.stride(), strict=True))
    raw = torch.zeros(max(extent, 0) + _ALIGNMENT // size, dtype=here.dtype, device=here.device)
    shift = (here.data_ptr() - raw.data_ptr()) % _ALIGNMENT // size if here.numel() else 0
    return raw.as_strided(here.shape, here.stride(), shift)


def _copy_of(grad: Tensor) -> Tensor:
    if not plain_tensor(grad):
        return grad.detach().clone()
    with torch.no_grad():
        return _empty(grad).copy_(grad)


def _same(a: Tensor, b: Tensor, rows: list[tuple[int, int]] | None) -> bool:
    if rows is None or not a.ndim or a.shape != b.shape:
        return identical(a, b)
    return all(identical(a[i:j], b[i:j]) for i, j in rows)
