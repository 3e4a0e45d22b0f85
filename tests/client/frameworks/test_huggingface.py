"""What ``CkptdCallback`` refuses and says, and what it keeps of a Trainer, without a daemon."""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from ckptd.client import values

# Looked for, not imported: every worker collects every file, and importing takes seconds.
pytestmark = pytest.mark.skipif(
    not all(find_spec(name) for name in ("accelerate", "transformers")),
    reason="transformers and accelerate are not installed: pip install ckptd[test]",
)


def ckptd_callback(**options: Any) -> Any:
    from ckptd.client.frameworks.huggingface import CkptdCallback

    return CkptdCallback(**options)


def log_history(trainer: Any) -> Any:
    from ckptd.client.frameworks.huggingface import LogHistory

    return LogHistory(trainer)


def trainer_progress(trainer: Any, shape: dict[str, int]) -> Any:
    from ckptd.client.frameworks.huggingface import TrainerProgress

    return TrainerProgress(trainer, shape)


def early_stopping() -> Any:
    from transformers import EarlyStoppingCallback

    return EarlyStoppingCallback(3)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(x) - labels).square().mean()}


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(2) * index, "labels": torch.ones(1)}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return (Rows()[i] for i in range(8))


def trainer(folder: Path, callback: Any, data: Any = None, **arguments: Any) -> Any:
    import transformers

    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        **arguments,
    }
    return transformers.Trainer(
        model=Regression(),
        args=transformers.TrainingArguments(**settings),
        train_dataset=data if data is not None else Rows(),
        callbacks=[callback] if callback is not None else [],
    )


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'windw'"):
        ckptd_callback(windw=3)


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("auto_find_batch_size", "set per_device_train_batch_size"),
        ("ignore_data_skip", "leave it off"),
    ],
)
def test_what_cannot_resume_is_refused_when_the_trainer_is_made(
    tmp_path: Path, argument: str, advice: str
) -> None:
    with pytest.raises(ValueError, match=f"{argument}.*{advice}"):
        trainer(tmp_path, ckptd_callback(daemon=None), **{argument: True})


def test_outside_of_a_trainer() -> None:
    arguments = SimpleNamespace(output_dir="x")
    with pytest.raises(ValueError, match=r"works only in transformers.Trainer.train\(\)"):
        ckptd_callback().on_train_begin(arguments, None, None)


def test_state_under_a_name_that_is_taken(tmp_path: Path) -> None:
    callback = ckptd_callback(daemon=None, state={"lr_scheduler": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"lr_scheduler.*choose another name"):
        trainer(tmp_path, callback).train()


@pytest.mark.parametrize(
    ("data", "arguments", "said"),
    [
        (Stream(), {}, "IterableDataset.*fetches .* again"),
    ],
)
def test_data_that_needs_a_word_gets_it_at_the_start(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    data: Any,
    arguments: dict[str, Any],
    said: str,
) -> None:
    with caplog.at_level(logging.WARNING, logger="ckptd"):
        trainer(tmp_path, ckptd_callback(daemon=None), data, **arguments).train()
    assert any(re.search(said, record.getMessage()) for record in caplog.records)


def test_workers_that_cannot_be_repeated_are_refused_before_training(tmp_path: Path) -> None:
    """It used to train, and to stop after a failure, when its batches were others."""
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    with pytest.raises(ValueError, match=r"persistent_workers=False.*refetch=False"):
        trainer(tmp_path, ckptd_callback(daemon=None), **workers).train()
    trainer(tmp_path, ckptd_callback(daemon=None, refetch=False), **workers).train()


def test_off_it_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """With ``daemon=None``, from a checkpoint of the Trainer's own: the same losses as without the
    callback, and no wrapper is left.
    """
    first = trainer(tmp_path, ckptd_callback(daemon=None), max_steps=3, save_strategy="steps", save_steps=3)
    first.train()
    resumed = trainer(tmp_path, ckptd_callback(daemon=None), max_steps=6, logging_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    plain = trainer(tmp_path, None, max_steps=6, logging_steps=1)
    plain.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 6
    for a, b in zip(resumed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "_run_epoch" not in vars(resumed)
    assert "get_batch_samples" not in vars(resumed)


# -- what is kept --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("tensorboard"), reason="tensorboard is not installed: ckptd[test] has it")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_its_loggers_get_the_scalars_and_its_history_does_not(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    callback = ckptd_callback(daemon=endpoint, log_scalars=True)
    made = trainer(tmp_path, callback, report_to="tensorboard", logging_steps=2, max_steps=12)
    made.train()
    read = EventAccumulator(str(tmp_path / "logs"))
    read.Reload()
    assert [event.step for event in read.Scalars("train/ckptd/stall_ms")] == [2, 4, 6, 8, 10, 12]
    assert [event.step for event in read.Scalars("train/loss")] == [2, 4, 6, 8, 10, 12]
    assert not [name for each in made.state.log_history for name in each if "ckptd" in name]
    assert "on_log" not in vars(made.callback_handler)


def holder(history: list[dict[str, Any]]) -> Any:
    return SimpleNamespace(state=SimpleNamespace(log_history=history))


def test_the_log_comes_back_whole() -> None:
    history: list[dict[str, Any]] = [{"loss": 0.1, "step": 1}]
    log = log_history(holder(history))
    log.state_dict()
    history += [{"loss": 0.2, "step": 2, "odd": object}, {"eval_loss": 0.3, "step": 2}]
    recorded = values.unpack(values.pack(log.state_dict()))
    other = holder([{"loss": 9.0}])
    successor = log_history(other)
    successor.load_state_dict(recorded)
    history[1]["odd"] = str(object)  # what a snapshot cannot hold is kept as its text
    assert other.state.log_history == history
    other.state.log_history.append({"loss": 0.4})
    again = holder([])
    log_history(again).load_state_dict(successor.state_dict())
    assert again.state.log_history == [*history, {"loss": 0.4}]


def test_a_log_that_was_cut_is_packed_anew() -> None:
    history: list[dict[str, Any]] = [{"step": 1}, {"step": 2}]
    log = log_history(holder(history))
    log.state_dict()
    del history[0]
    other = holder([])
    log_history(other).load_state_dict(log.state_dict())
    assert other.state.log_history == [{"step": 2}]


def test_other_batches_are_refused() -> None:
    progress = trainer_progress(None, {"per_device_train_batch_size": 8})
    recorded = {"shape": {"per_device_train_batch_size": 4}}
    with pytest.raises(ValueError, match=r"was 4 .* is 8 now.*run="):
        progress.load_state_dict(recorded)


def test_a_callback_whose_state_cannot_be_held_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = early_stopping()
    odd.early_stopping_patience_counter = object()
    trainer_progress(trainer(tmp_path, odd), {})._exporting()
    assert "EarlyStoppingCallback is not captured" in caplog.text


def test_callbacks_that_export_their_state_get_it_back(tmp_path: Path) -> None:
    patience = early_stopping()
    made = trainer(tmp_path, patience, load_best_model_at_end=False)
    made._tr_loss, made._total_loss_scalar, made.current_flos = torch.ones(()), 1.5, 2.0
    made._globalstep_last_logged = made._initial_global_step = 0
    made._initial_num_input_tokens_seen = 0
    made.state.global_step, patience.early_stopping_patience_counter = 5, 2
    progress = trainer_progress(made, {})
    recorded = values.unpack(values.pack(progress.state_dict()))
    made.state.global_step, patience.early_stopping_patience_counter = 0, 0
    made._total_loss_scalar = 0.0
    progress.load_state_dict(recorded)
    assert made.state.global_step == 5
    assert made._total_loss_scalar == 1.5
    assert patience.early_stopping_patience_counter == 2


@pytest.mark.parametrize("how", ["an object", "a class"])
def test_a_callback_that_is_added_later_passes_over_half_written_checkpoints_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A callback that came by ``add_callback`` was not asked when the Trainer was made: the Trainer
    took the half-written ``checkpoint-2`` and ended with an error. One without the callback still does.
    """
    from ckptd.client.frameworks.huggingface import CkptdCallback

    class Off(CkptdCallback):
        def __init__(self) -> None:
            super().__init__(daemon=None)

    (tmp_path / "checkpoint-2").mkdir()
    with_it, without = trainer(tmp_path, None), trainer(tmp_path, None)
    with_it.add_callback(Off() if how == "an object" else Off)
    with caplog.at_level(logging.WARNING, "ckptd"):
        with_it.train(resume_from_checkpoint=True)
    assert with_it.state.global_step == 4
    assert "half-written" in caplog.text
    with pytest.raises(ValueError, match="checkpoint-2' is half-written"):
        with_it.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(ValueError, match="find a valid checkpoint at"):
        without.train(resume_from_checkpoint=True)
