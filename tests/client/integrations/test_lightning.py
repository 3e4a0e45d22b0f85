"""What Lightning's ``CkptdCallback`` refuses, and that it leaves a Trainer as it was, without a daemon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch", reason="pip install ckptd[test]")

from ckptd.client.integrations.lightning import CkptdCallback


class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.linear(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Fetching(Model):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


def fit(model: Any, *callbacks: Any) -> Any:
    trainer = pl.Trainer(
        max_steps=5,
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(torch.arange(12.0).reshape(6, 2), batch_size=2))  # type: ignore[arg-type]
    return trainer


# What Lightning itself warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("model", "advice"),
    [(Manual, "needs automatic optimization.*loop of your own"), (Fetching, "take a batch")],
)
def test_what_cannot_resume_is_refused(model: type[Model], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        fit(model(), CkptdCallback(daemon=None))


class Odd(pl.Callback):  # type: ignore[misc, name-defined]
    """Its state is nothing that a snapshot can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"file": object()}


def test_a_callback_whose_state_cannot_be_held_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit(Model(), Odd(), CkptdCallback(daemon=None))
    said = [r.getMessage() for r in caplog.records if r.name.startswith("ckptd")]
    assert any("callback Odd is not captured: Odd['file'] is a" in text for text in said), said


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ValueError, match="unknown windw"):
        CkptdCallback(windw=3)


def test_off_it_changes_nothing_and_leaves_nothing() -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    trainer = fit(model, CkptdCallback(daemon=None))
    fit(plain)
    assert trainer.global_step == 5
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    loop = trainer.fit_loop
    for holder, name in ((loop.epoch_loop, "advance"), (loop.epoch_loop, "on_run_start"), (loop, "on_run_end")):  # fmt: skip
        assert name not in vars(holder)
