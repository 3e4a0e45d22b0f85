"""Lightning's manual optimization: two optimizers in turns, two updates in a batch, gradients that
wait over batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ckptd.client.frameworks.lightning import CkptdCallback
from tests.habits.leaves import names_of
from tests.habits.life import Life
from tests.habits.pipelines import BATCH, WIDTH, Augmented

__all__ = ["main"]


class Adversaries(pl.LightningModule):  # type: ignore[misc]
    """Two networks against each other, in the words of Lightning's own pages; ``row`` says how they update."""

    def __init__(self, life: Life, callback: CkptdCallback) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.1), nn.Linear(12, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 1))
        self._told = [(life, callback)]
        self._begun = False

    def configure_optimizers(self) -> Any:
        made = torch.optim.Adam(self.maker.parameters(), lr=1e-2, betas=(0.5, 0.9))
        judged = torch.optim.AdamW(self.judge.parameters(), lr=1e-2)
        decays = torch.optim.lr_scheduler.StepLR(judged, 5, 0.7)
        return [made, judged], [decays]

    def judged(self, points: Tensor) -> Tensor:
        return self.judge(points).square().mean()  # type: ignore[no-any-return]

    def made(self, batch: Tensor) -> Tensor:
        return self.maker(batch + 0.1 * torch.randn_like(batch))  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        life, callback = self._told[0]
        if not self._begun and callback.checkpointer is not None:
            self._begun = True
            life.follow(callback.checkpointer)
        life.top(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1)
        life.batch(batch)
        maker, judge = self.optimizers()
        if "toggled" in life.row:
            self._toggled(batch, maker, judge)
        elif "alternating" in life.row:
            self._alternating(batch, batch_idx, maker, judge)
        elif "accumulating" in life.row:
            self._accumulating(batch, batch_idx, maker, judge)
        else:
            self._twice(batch, maker, judge)
        self.lr_schedulers().step()

    def _update(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()

    def _toggled(self, batch: Tensor, maker: Any, judge: Any) -> None:
        self.toggle_optimizer(maker)
        self._update(maker, self.judged(self.made(batch)))
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        self._update(judge, self.judged(batch) - 0.1 * self.judged(self.made(batch).detach()))
        self.untoggle_optimizer(judge)

    def _alternating(self, batch: Tensor, batch_idx: int, maker: Any, judge: Any) -> None:
        if batch_idx % 3 == 2:
            self._update(maker, self.judged(self.made(batch)))
            maker.zero_grad()
        else:
            self._update(judge, self.judged(batch) - 0.1 * self.judged(self.made(batch).detach()))
            judge.zero_grad()

    def _accumulating(self, batch: Tensor, batch_idx: int, maker: Any, judge: Any) -> None:
        """The one updates with each batch, the other with every second."""
        self._update(judge, self.judged(batch) - 0.1 * self.judged(self.made(batch).detach()))
        judge.zero_grad()
        self.toggle_optimizer(maker)
        self.manual_backward(self.judged(self.made(batch)))
        if batch_idx % 2:
            maker.step()
            maker.zero_grad()
        self.untoggle_optimizer(maker)

    def _twice(self, batch: Tensor, maker: Any, judge: Any) -> None:
        for _ in range(2):
            self._update(judge, self.judged(batch) - 0.1 * self.judged(self.made(batch).detach()))
        self._update(maker, self.judged(self.made(batch)))


def main(argv: Sequence[str]) -> None:
    life = Life(argv)
    callback = CkptdCallback(**life.options())
    module = Adversaries(life, callback)
    trainer = pl.Trainer(
        max_epochs=-1,
        limit_train_batches=6,
        accelerator="cpu",
        devices=life.ranks,
        strategy="ddp_find_unused_parameters_true" if life.ranks > 1 else "auto",
        callbacks=[*([callback] if life.protected else []), Ends(life.steps)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Augmented(), BATCH, shuffle=True))
    final = {
        "model": module.state_dict(),
        "optimizers": list(trainer.optimizers),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "steps": trainer.global_step,
        "progress": trainer.fit_loop.epoch_progress.state_dict(),
    }
    life.end(final, names_of(model=module))


class Ends(pl.Callback):  # type: ignore[misc]
    """After this many batches: ``max_steps`` counts the updates of all optimizers."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """A life that goes on from the end has nothing to do."""
        self.on_train_batch_end(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready >= self._batches:
            trainer.should_stop = True
