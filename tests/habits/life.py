"""The training's side of a life: what it is told, when it dies, and what it leaves for the comparison.

A training of a table is a module with ``main(argv)``: it makes a ``Life``, builds what its row
names, calls ``top`` at the top of each step and ``batch`` with what it trains on, and ``end`` with
its final state. It dies by SIGKILL where ``--kill`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptd.client.options import OptionGroups
from tests.e2e.lives import join
from tests.habits.leaves import digest, leaves
from tests.option_groups import grouped

__all__ = ["Life"]

# Snapshots that a life has before it may be killed: more than any row's window, on every rank.
_ENOUGH = 6
# How long a step waits until there is something to go on from: little at first, and more than
# enough for any machine in all.
_FIRST_PATIENCE_S, _PATIENCE_S = 0.05, 2.0


class Life:
    """One process of a row.

    Attributes:
        row: which training this is.
        steps: how many there are in all.
        protected: whether ckptd takes part. The training that is compared with runs without it.
        window: W, None where ckptd is to choose it.
        rank, ranks: this process among those of the training. The others are met at the environment's ``MASTER_PORT``.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--row", required=True)
        parser.add_argument("--steps", type=int, required=True)
        parser.add_argument("--seed", type=int, required=True)
        parser.add_argument("--daemon")
        parser.add_argument("--run")
        parser.add_argument("--window", type=int)
        parser.add_argument("--ranks", type=int, default=1)
        parser.add_argument("--rank", type=int, default=0)
        parser.add_argument("--port", type=int, default=0)
        parser.add_argument("--kill", help="step, and milliseconds after its top: 7:0.5")
        told = parser.parse_args(argv)
        self._out: Path = told.out
        self.row: str = told.row
        self.steps: int = told.steps
        self.window: int | None = told.window
        self.rank, self.ranks = told.rank, told.ranks
        self.protected = told.daemon is not None
        self.names = {"job": "habits", "run": told.run, "daemon": told.daemon}
        step, _, delay = (told.kill or "").partition(":")
        self._kill_step = int(step) if step else -1
        self._kill_after_s = float(delay or 0) / 1000
        self._dying: threading.Thread | None = None
        self._patience_s = _FIRST_PATIENCE_S
        self._step = -1
        self._resumed: int | None = None
        self._checkpointer: Any = None
        if told.ranks > 1:
            join(told.rank, told.port)
        # A process that nobody seeds has another state each time: only the first life has that of
        # the training it is compared with.
        torch.manual_seed(told.seed)
        random.seed(told.seed)
        np.random.seed(told.seed)
        torch.set_num_threads(1)

    def options(self, **others: Any) -> OptionGroups:
        """Arguments for ``Checkpointer`` or a callback of ours; with ``daemon=None`` where ckptd
        takes no part.
        """
        return grouped(**{**self.names, "window": self.window, **others})

    @property
    def folder(self) -> Path:
        """Of this run: the same in each of its lives."""
        folder = self._out.parent / f"{self.names['run'] or 'plain'}-{self.rank}"
        folder.mkdir(exist_ok=True)
        return folder

    def follow(self, checkpointer: Any) -> None:
        """This is what protects the life: it is not killed before there is something to go on from,
        however slow the machine is.
        """
        self._checkpointer = checkpointer
        self.resumed(checkpointer.resumed_from)

    def resumed(self, iteration: int | None) -> None:
        """Where ckptd says that this life is complete again; None: it began at the beginning."""
        self._resumed = iteration
        self.note({"resumed": iteration})

    def top(self, step: int) -> None:
        """Step ``step`` begins. Dies here, or a moment later, if it is time."""
        self._step = step
        if self._kill_step < 0:
            return
        if self._resumed is None and not self._may_die(step):
            return
        if self._dying is None and self._kill_step <= step:
            self._dying = threading.Thread(target=self._die, daemon=True)
            if self._kill_after_s:
                self._dying.start()
            else:
                self._die()

    def _may_die(self, step: int) -> bool:
        """Whether there is something to go on from. Where only time is lacking for that, wait a
        moment: there are few steps.
        """
        taken = _ENOUGH if self._checkpointer is None else self._checkpointer.stats()["snapshots"]
        has_floor = self._has_floor()
        # Memory for snapshots is being made beside the steps; what all ranks have is being told
        # while they train.
        if (taken == 0 and step > 2) or (not has_floor and step >= self._kill_step):
            time.sleep(self._patience_s)
            self._patience_s = min(2 * self._patience_s, _PATIENCE_S)
        return taken >= _ENOUGH and has_floor

    def _has_floor(self) -> bool:
        """Whether there is an iteration that all ranks have: before, a kill leaves snapshots that
        no two ranks have in common.
        """
        if self.ranks == 1 or self._checkpointer is None:
            return True
        memory = self._checkpointer._memory
        return memory is not None and memory.table.ring_hint.floor >= 0

    def batch(self, batch: Any) -> None:
        """The running step trains on this."""
        self.note({"step": self._step, "batch": digest(batch)})

    def end(self, state: Mapping[str, Any], names: Mapping[int, str] | None = None) -> None:
        """The training is over: leave its state (see ``leaves``), and that of the random generators."""
        if self._kill_step >= 0:
            if self._dying is not None:
                self._dying.join()
            self._die()
        whole = {
            **state,
            "random": [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)],
        }
        torch.save(leaves(whole, names), self._out)

    def _die(self) -> None:
        time.sleep(self._kill_after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def note(self, what: dict[str, Any]) -> None:
        """For the one who compares. Written at once: a SIGKILL takes nothing away from it."""
        with self._out.with_suffix(".notes").open("a") as notes:
            notes.write(json.dumps(what) + "\n")
