"""A training with Lightning's ``Trainer`` that kills itself; nothing but one callback is ckptd's."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ckptd.client import RunOptions, SnapshotOptions
from ckptd.client.data.position import DataPosition
from ckptd.client.rng_state import capture_rng
from tests.e2e.lives import join
from tests.e2e.patience import let_memory_come, let_them_come
from tests.e2e.program import life_parser, optimizer_state

# Both packages are tested; a process uses one. (The parent of all lives imports none of them: see lives.py.)
PACKAGE = os.environ.get("CKPTD_TEST_LIGHTNING", "lightning.pytorch")
pl = importlib.import_module(PACKAGE)
from ckptd.client.frameworks.lightning import CkptdCallback

SAMPLES, WIDTH = 44, 8


def sample(index: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Points(Dataset[Tensor]):
    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return sample(index)


class NoisyPoints(Points):
    def __getitem__(self, index: int) -> Tensor:
        return sample(index) + 0.1 * torch.randn(WIDTH)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for index in range(SAMPLES):
            yield sample(index * 7 % SAMPLES)


def jittered(samples: list[Tensor]) -> Tensor:
    """A collator that draws from the global generator."""
    points = torch.stack(samples)
    return points + 0.1 * torch.randn(points.shape)


class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
    """A small mixture of experts with dropout; ``forward`` is not what Lightning calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.seen = 0  # an attribute that no state_dict has

    def loss(self, points: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(points), -1)
        each = torch.stack([e(torch.dropout(points, 0.2, self.training)) for e in self.experts], -1)
        mixed = (each * weights[..., None, :]).sum(-1)
        error: Tensor = self.norm(mixed) - points.roll(1, -1)
        return error.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += len(batch)
        loss = self.loss(batch) * (1 + 1 / self.seen)
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=40)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}]


class History(pl.Callback):  # type: ignore[misc, name-defined]
    """What a logger would have got: the loss of every batch, and the means of every epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "epochs": list(self.epochs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.epochs = list(state["losses"]), list(state["epochs"])


class Killer(pl.Callback):  # type: ignore[misc, name-defined]
    """Kills this process when the optimizer has done its step: what the step's snapshot holds was
    copied by then.
    """

    def __init__(self, step: int, protection: CkptdCallback | None) -> None:
        self.step, self.protection = step, protection

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        ckpt = self.protection.checkpointer if self.protection is not None else None
        if trainer.global_step < self.step and ckpt is not None:
            let_memory_come(ckpt)
            let_them_come(ckpt)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step + 1:
            os.kill(os.getpid(), signal.SIGKILL)


class ForgetsRandomState(DataPosition):
    """Fetches the batches of the position again, but not from the random state from which they were made."""

    def return_to_epoch(self) -> None: ...

    def fast_forward(self, fetch: Callable[[], object], skipped: int) -> None:
        for _ in range(self.consumed - skipped):
            fetch()


DATA = {"points": Points, "noisy": NoisyPoints, "stream": Stream}


def final_state(trainer: Any, module: Model, history: History) -> dict[str, Any]:
    found: dict[str, Any] = {f"param/{n}": p.detach().clone() for n, p in module.named_parameters()}
    found.update({f"buffer/{n}": b.clone() for n, b in module.named_buffers()})
    found |= optimizer_state(trainer.optimizers[0])
    found["scheduler"] = {
        k: v for k, v in trainer.lr_scheduler_configs[0].scheduler.state_dict().items() if not callable(v)
    }
    found["rng"] = capture_rng()
    found["progress"] = trainer.fit_loop.state_dict()
    found["history"] = history.state_dict()
    found["seen"] = module.seen
    return found


def main(argv: Sequence[str]) -> None:
    parser = life_parser()
    parser.add_argument("--data", default="points", choices=DATA)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--forget", action="store_true", help="restore without the random state of fetches")
    args = parser.parse_args(argv)
    assert PACKAGE in sys.modules
    if args.port:
        join(args.rank, args.port)
    torch.set_num_threads(1)
    pl.seed_everything(args.seed)
    if args.forget:
        import ckptd.client.frameworks.lightning as loop

        vars(loop)["DataPosition"] = ForgetsRandomState
    history = History()
    callbacks: list[Any] = [history]
    protection = None
    if args.daemon:
        # One line more: it is all that a user adds.
        protection = CkptdCallback(
            run=RunOptions(job="e2e", name=args.run),
            daemon=args.daemon,
            snapshots=SnapshotOptions(window=4),
        )
    if args.kill_at >= 0:
        callbacks.append(Killer(args.kill_at, protection))
    if protection is not None:
        callbacks.append(protection)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=2 if args.port else 1,
        strategy="ddp" if args.port else "auto",
        precision=args.precision,
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        deterministic=True,
        num_sanity_val_steps=1,
        val_check_interval=1.0 if args.data == "stream" else 4,
    )
    module = Model()
    data = DATA[args.data]()
    loader = DataLoader(
        data,
        batch_size=4,
        shuffle=args.data != "stream",
        collate_fn=jittered,
        num_workers=args.workers,
    )
    trainer.fit(module, loader, DataLoader(Points(8), batch_size=4))
    torch.save(final_state(trainer, module, history), args.out)
