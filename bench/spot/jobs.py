"""What the two programs that `bench.spot.real` starts have in common: options, data, a log of
events, and states on disk.

Both train `examples.moe_elastic.model` on the same global batches with the same optimizer; a step
takes ``sample_ms`` more for each sample of a rank, which stands for a device. States go to a folder
that all hosts share and outlives them, as a store would: a file for each rank, and a marker when
all are there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ckptd.client.elastic.job import GlobalBatches
from ckptd.demo.data import load_corpus
from examples.moe_elastic.model import CONTEXT

__all__ = ["HOST", "Log", "Saves", "Training", "agreed", "meet", "options"]

HOST = "BENCH_HOST"  # environment: the name of this rank's host
CORPUS_BYTES = 400_000
_MARKER = "whole"


def options(text: str | None) -> argparse.ArgumentParser:
    """The options of both programs."""
    out = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    out.add_argument("--log", type=Path, required=True, help="folder of the event logs")
    out.add_argument("--saves", type=Path, required=True, help="folder of the states on disk")
    out.add_argument("--every", type=int, required=True, help="steps between these states")
    out.add_argument("--batch-size", type=int, default=40, help="of all ranks together")
    out.add_argument("--sample-ms", type=float, default=0.0, help="more time for each sample")
    out.add_argument("--patience-s", type=float, default=20.0, help="for a rank that is silent")
    return out


def meet(args: argparse.Namespace) -> Log:
    """Form the group of all ranks; a collective call."""
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=args.patience_s)
    dist.init_process_group("gloo", timeout=patience)
    return Log(args.log)


class Log:
    """This rank's events in this life, one JSON object a line: ``<folder>/<host>-<life>.jsonl``.

    A life is the time from one meeting of all ranks to the next; rank 0's clock at its begin is its name.
    """

    def __init__(self, folder: Path) -> None:
        life = torch.tensor([time.time_ns()])
        dist.broadcast(life, 0)
        self.life = int(life)
        self._usual = {"life": self.life, "host": os.environ.get(HOST, "alone")}
        path = folder / f"{self._usual['host']}-{self.life}.jsonl"
        self._file = path.open("a", buffering=1)
        self.write("met")

    def write(self, event: str, **told: object) -> None:
        line = {"event": event, **self._usual, "time_s": time.time(), **told}
        self._file.write(json.dumps(line) + "\n")


def agreed(value: int, group: Any = None) -> int:
    """What rank 0 says; a collective call of ``group``, which rank 0 is in."""
    told = torch.tensor([value])
    dist.broadcast(told, 0, group=group)
    return int(told)


class Training:
    """Model, optimizer and data of one rank, without what makes ranks work together."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 50, 0.7)
        self._batch_size, self._sample_s = args.batch_size, args.sample_ms / 1e3
        self._windows = load_corpus(CORPUS_BYTES).long().unfold(0, CONTEXT + 1, 1)
        self._batches = GlobalBatches(len(self._windows), args.batch_size, seed=1)

    def forward_backward(self, step: int, rank: int, ranks: int) -> Tensor:
        """This rank's part of the mean loss over the global batch, a scalar; gradients are its part, too."""
        batch = self._windows[self._batches.mine(step, rank, ranks)]
        logits = self.model(batch[:, :-1])
        loss: Tensor = cross_entropy(logits, batch[:, -1], reduction="sum") / self._batch_size
        time.sleep(len(batch) * self._sample_s)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def state(self) -> dict[str, Any]:
        """All of this rank, by the names that it has on every rank."""
        found: dict[str, Any] = {}
        for name, param in self.model.named_parameters():
            kept = {key: value.clone() for key, value in self.optimizer.state[param].items()}
            found[name] = (param.detach().clone(), kept)
        found["scheduler"] = self.scheduler.state_dict()
        found["lr"] = self.optimizer.param_groups[0]["lr"]
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        """Take from a state of all ranks what this one needs.

        Raises:
            KeyError: a parameter is not in it.
        """
        for name, param in self.model.named_parameters():
            value, kept = state[name]
            with torch.no_grad():
                param.copy_(value)
            self.optimizer.state[param] = {key: item.clone() for key, item in kept.items()}
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        self.optimizer.param_groups[0]["lr"] = state["lr"]


class Saves:
    """States on disk, by the step that comes next and the life that wrote them:
    ``<folder>/<step>-<life>/<number>.pt``; whole once the marker is there.
    """

    def __init__(self, folder: Path, life: int) -> None:
        self._folder, self._life = folder, life

    def newest(self) -> int:
        """The step of the newest whole state; 0 if there is none."""
        return self._whole()[-1][0] if self._whole() else 0

    def _whole(self) -> list[tuple[int, int, Path]]:
        """Step, life and folder of each, in their order."""
        folders = [marker.parent for marker in self._folder.glob(f"*-*/{_MARKER}")]
        names = [folder.name.split("-") for folder in folders]
        return sorted((int(n[0]), int(n[1]), f) for n, f in zip(names, folders, strict=True))

    def write(self, step: int, number: int | None, state: Mapping[str, Any], group: Any = None) -> float:
        """Write this rank's part, and wait for the others; a collective call of ``group``. The
        seconds that took.

        Args:
            number: of the part; None: this rank writes none.
        """
        began = time.perf_counter()
        folder = self._folder / f"{step}-{self._life}"
        folder.mkdir(parents=True, exist_ok=True)
        if number is not None:
            torch.save(state, folder / f"{number}.pt")
        dist.barrier(group)
        if number == 0:
            (folder / _MARKER).touch()
            for *_, old in self._whole()[:-2]:
                shutil.rmtree(old)
        return time.perf_counter() - began

    def read(self, step: int) -> dict[str, Any]:
        """All parts together of the newest whole state of a step."""
        *_, folder = [folder for found, _, folder in self._whole() if found == step]
        parts = sorted(folder.glob("*.pt"))
        return {key: value for part in parts for key, value in torch.load(part).items()}
