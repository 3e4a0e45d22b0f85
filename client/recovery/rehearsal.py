"""A rehearsal of a resume: once in each life, what an optimizer does after a snapshot was loaded is
compared with what it does now.

What an optimizer keeps is looked at before each snapshot (`KeptState`). What that cannot see (a
variable in a closure, an attribute of a class, a table by ``id()`` of a parameter, state that is
made anew after a load) is not in the snapshot, and a job that resumes goes on otherwise, silently.
So the first snapshots are loaded into copies (`optimizer_rehearsal`) just before the optimizer's
step, the copy is stepped with the same gradients and random numbers, and what comes of both is
compared to the bit. Where they differ, the next step is tried with a copy of all that is in memory:
if that one steps as the live one does, it is the resume that is not exact, and the optimizer is
refused. If not, copies tell nothing (a step that is not repeatable), which is said.

Nothing is left of it: generators, and what the optimizer's code keeps elsewhere, are put back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ckptd.client.capture.recorder import Recorder
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.snapshot_layout import Rows, free_bytes
from ckptd.client.optimizers.optimizer_copies import CannotCopy, HiddenState
from ckptd.client.optimizers.value_trees import NotCapturable, plain_parts
from ckptd.client.recovery.optimizer_rehearsal import (
    Pristine,
    SteppedCopy,
    anchored_names,
    changed_since,
    differences,
)
from ckptd.client.rng_state import capture_rng, restore_rng
from ckptd.core.slots.ring import SlotState
from ckptd.cuda.engine import CopyEngine

__all__ = ["Rehearsal"]

logger = get_logger(__name__)

# Of copies in host memory, made at once: they take about a second. More is rehearsed in part.
_MOST_BYTES = 2 << 30
# Beside the copies, a step makes temporary tensors of up to their size.
_WITH_TEMPORARIES = 2
_IMAGE_WAIT_S = 2.0
_MOST_TRIES = 16
_TOLD = 5


class _NotNow(Exception):
    """This snapshot cannot be used for it; the next one may be."""


class _Failure(NamedTuple):
    """A copy that a snapshot was loaded into was other than what is live; ``rows`` of the
    parameters were compared.
    """

    iteration: int
    paths: tuple[str, ...]
    rows: Rows


class Rehearsal:
    """Of one life, all optimizers of a rank.

    Args:
        live: as the program has made it: nothing is restored yet.

    Attributes:
        over: nothing is left to do.
        took_s: seconds of the training thread so far.
    """

    def __init__(self, live: LiveState, memory: RankMemory, recorder: Recorder, engine: CopyEngine) -> None:
        self._live, self._memory, self._recorder, self._engine = live, memory, recorder, engine
        self._left = {
            i: {n for n in live.owner if live.owner[n][0] == i} for i in range(len(live.optimizers))
        }
        self._snapshots = dict.fromkeys(self._left, 0)
        self._running: dict[int, SteppedCopy] = {}
        self._failed: dict[int, _Failure] = {}
        self._depth: dict[int, int] = {}
        self._iteration = -1
        self._tries, self._num_tensors = _MOST_TRIES, 0
        self.over, self.took_s = False, 0.0
        begun = time.perf_counter()
        try:
            self._hidden = HiddenState(live.kept.given)
            self._pristine: Pristine | None = Pristine(live, self._hidden)
        except Exception as error:  # noqa: BLE001 - of the user's optimizer; it is told, and training goes on
            self._skip(error)
        self.took_s += time.perf_counter() - begun

    # -- the life of a step ----------------------------------------------------------------------

    def top(self) -> None:
        """The top of a step: what was begun in the last one came to nothing."""
        self._running.clear()
        self._depth.clear()

    def enter(self, optimizer: int) -> bool:
        """A step of optimizer number ``optimizer`` begins; whether it is not one within another (of
        the class from which it inherits).
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
        begun, rng = time.perf_counter(), capture_rng()
        try:
            self._try(optimizer, args, kwargs, loss, rng)
        except _NotNow as error:
            self._tries -= 1
            if not self._tries:
                self._skip(error)
        except Exception as error:  # noqa: BLE001 - see the next line
            # The user's optimizer ran in it; it is told, and training goes on.
            self._skip(error)
        finally:
            restore_rng(rng)
            self.took_s += time.perf_counter() - begun

    def after_update(self, optimizer: int) -> None:
        """A step of it is over."""
        self._depth[optimizer] = self._depth.get(optimizer, 1) - 1
        if self._depth[optimizer] > 0:
            return
        copy = self._running.pop(optimizer, None)
        if copy is None:
            return
        begun = time.perf_counter()
        try:
            self._judge(optimizer, copy, differences(self._live, copy, optimizer))
        except Exception as error:  # noqa: BLE001 - see the next line
            # Of somebody else's types; it is told, and training goes on.
            self._skip(error)
        finally:
            self.took_s += time.perf_counter() - begun
        if not self._left:
            logger.info(
                "resume rehearsed: from a snapshot, optimizer %s makes the same of %d of %d "
                "parameters (%.0f ms in all)",
                self._live.kept.whose,
                self._num_tensors,
                len(self._live.owner),
                self.took_s * 1e3,
            )

    # -- one step of a copy ------------------------------------------------------------------------

    def _try(self, index: int, args: Any, kwargs: Any, loss: Any, rng: dict[str, Any]) -> None:
        if index in self._running:
            raise CannotCopy("it evaluates its closure several times in a step")
        self._check_hooks(index)
        if self._hidden.is_compiled:
            raise CannotCopy("its step is compiled, and would be compiled anew for a copy")
        assert self._pristine is not None
        failed = index in self._failed
        if failed:
            rows = self._failed[index].rows
            self._check_memory(rows)
            copy = self._pristine.control(rows)
            copy.prepare(self._live, index)
        else:
            iteration = self._recorder.newest_of(index)
            image = self._image_of(iteration)
            copy = self._resumed(iteration, image, index)
            copy.prepare(self._live, index)
            self._compare_before(copy, image, index)
        restore_rng(rng)
        try:
            copy.step(index, args, kwargs, loss, self._hidden)
        except (CannotCopy, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if failed:
                raise
            # It may be for want of what it kept elsewhere; a copy with all of that will tell.
            self._fail(index, copy, [f"its step, which raises {type(error).__name__}: {error}"])
            return
        self._running[index] = copy

    def _resumed(self, iteration: int, image: SnapshotImage, index: int) -> SteppedCopy:
        plan = self._recorder.plan
        assert plan is not None
        assert self._pristine is not None
        here = anchored_names(self._live, plan.operators, image)
        names = [n for n in here if self._live.owner[n][0] == index]
        if not names:
            raise _NotNow("the snapshots of this rank hold nothing of what it updates")
        updated = {n for n in self._live.owner if self._live.owner[n][0] == index}
        most = self._within_memory(names)
        in_part = len(most) < len(updated) and plan.policy_name == "dense"
        if in_part and (reasons := self._live.dependent()):
            raise CannotCopy(f"a copy of a part of its parameters tells nothing: {reasons[0]}")
        self._iteration = iteration
        self._snapshots[index] += 1
        return self._pristine.resumed(image, most, plan.operators, self._engine)

    def _image_of(self, iteration: int) -> SnapshotImage:
        """The snapshot of this iteration, whose copies are on their way."""
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

    def _compare_before(self, copy: SteppedCopy, image: SnapshotImage, index: int) -> None:
        """What was loaded is what is live."""
        live = self._live
        found = differences(live, copy, index)
        if not found:
            return
        if changed := changed_since(live, image, copy):
            # By the loop, which will do so after a resume, too.
            raise _NotNow(f"{changed} changes between the top of a step and its update")
        self._fail(index, copy, found)
        raise _NotNow(found[0])

    def _check_hooks(self, index: int) -> None:
        """What other hooks do to gradients and weights would be taken for the optimizer's."""
        optimizer: Any = self._live.optimizers[index]
        before = list(optimizer._optimizer_step_pre_hooks.values())
        after = list(optimizer._optimizer_step_post_hooks.values())
        for hook in (*before[-1:], *after[:1]):
            if not (getattr(hook, "__module__", "") or "").startswith("ckptd."):
                raise CannotCopy("a hook of somebody else's runs just before or after its update")

    # -- what came of it ---------------------------------------------------------------------------

    def _judge(self, index: int, copy: SteppedCopy, found: Sequence[str]) -> None:
        if index in self._failed:
            failure = self._failed[index]
            if found:
                raise CannotCopy(
                    f"a copy with all that is in memory does not step as it does ({_told(found)} "
                    "differ), so a copy tells nothing"
                )
            self._refuse(index, failure)
        elif found:
            self._fail(index, copy, found)
        else:
            self._num_tensors += len(self._left[index] & copy.rows.keys())
            self._left[index] -= copy.rows.keys()
            self._end_of(index)

    def _end_of(self, index: int) -> None:
        plan = self._recorder.plan
        window = 1 if plan is None or plan.policy_name == "dense" else plan.schedule.window
        if not self._left[index] or self._snapshots[index] >= window:
            del self._left[index]
        if not self._left:
            self._close()

    def _fail(self, index: int, copy: SteppedCopy, found: Sequence[str]) -> None:
        self._failed[index] = _Failure(self._iteration, tuple(found), copy.rows)

    def _refuse(self, index: int, failure: _Failure) -> None:
        who = type(self._live.optimizers[index]).__name__
        assert self._pristine is not None
        changed = self._hidden.changed_since(self._pristine.outside)
        where = f" Outside of it has changed since the start: {_told(changed)}." if changed else ""
        resumed = self._memory.epoch_start >= 0
        kept = (
            "those of before stay as they are"
            if resumed
            else "those that were taken are given up, and after a failure this run begins anew"
        )
        self._recorder.refuse(
            f"optimizer {who} keeps state which cannot be captured: loaded into a copy of it, the "
            f"snapshot of iteration {failure.iteration} does not lead "
            f"to what its step makes of {_told(failure.paths)}.{where} No snapshot is taken any "
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
        """No rehearsal, and training goes on."""
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

    def _within_memory(self, names: Sequence[str]) -> list[str]:
        """As many of them, the smallest first, as may be copied at once."""
        sizes = {name: self._bytes_of(name) for name in names}
        budget = self._budget()
        taken, total = [], 0
        for name in sorted(names, key=lambda n: sizes[n]):
            total += sizes[name]
            if total * _WITH_TEMPORARIES > budget:
                break
            taken.append(name)
        if not taken:
            self._too_little(min(sizes.values(), default=0), budget)
        return taken

    def _check_memory(self, names: Iterable[str]) -> None:
        total, budget = sum(map(self._bytes_of, names)), self._budget()
        if total * _WITH_TEMPORARIES > budget:
            self._too_little(total, budget)

    def _too_little(self, needed: int, budget: int) -> None:
        raise CannotCopy(
            "a copy with what a step takes beside it needs "
            f"{needed * _WITH_TEMPORARIES / 2**20:.1f} MiB on {self._engine.device}, "
            f"{budget / 2**20:.1f} MiB may be used"
        )

    def _budget(self) -> int:
        free = free_bytes(self._engine.device)
        on_host = self._engine.device.type == "cpu"
        return min(free, _MOST_BYTES * _WITH_TEMPORARIES) if on_host else free

    def _bytes_of(self, name: str) -> int:
        """Of its copy: weight, master, gradient and state."""
        live = self._live
        tensors = [live.params[name], live.held(name), live.held(name)]
        tensors += [
            p for v in live.state(name).values() if isinstance(v, torch.Tensor) for p in plain_parts(v)
        ]
        return sum(t.numel() * t.element_size() for t in tensors)


def _told(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _TOLD} more" if len(paths) > _TOLD else ""
    return ", ".join(paths[:_TOLD]) + more
