"""What Lightning's ``CkptdCallback`` refuses, and that it leaves a Trainer as it was, without a daemon."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(
        not find_spec("lightning"), reason="lightning is not installed: pip install ckptd[test]"
    ),
    # What Lightning itself warns of.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def made() -> Any:
    """Looked for, not imported, until a test runs: every worker collects every file."""
    from tests.client.frameworks import lightning_models

    return lightning_models


def test_what_cannot_resume_is_refused(made: Any) -> None:
    with pytest.raises(ValueError, match="use training_step"):
        made.fit(made.Fetching(), made.CkptdCallback(daemon=None))


def test_a_step_of_manual_optimization_is_a_batch(made: Any) -> None:
    """``global_step`` counts the updates of all optimizers there; it moves by two in a batch, or not at all."""
    callback = made.CkptdCallback(daemon=None)
    steps = []
    trainer = made.fit(made.Manual(lambda: steps.append(callback.checkpointer.step)), callback)
    assert steps == [0, 1, 2, 3]
    assert trainer.global_step == 6


def test_a_callback_whose_state_cannot_be_held_is_left_out(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made.fit(made.Model(), made.Odd(), made.CkptdCallback(daemon=None))
    said = [r.getMessage() for r in caplog.records if r.name.startswith("ckptd")]
    assert any("callback Odd is not captured: Odd['file'] is a" in text for text in said), said


def test_an_unknown_option_is_named(made: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'windw'"):
        made.CkptdCallback(windw=3)


def test_off_it_changes_nothing_and_leaves_nothing(made: Any) -> None:
    model, plain = made.Model(), made.Model()
    plain.load_state_dict(model.state_dict())
    trainer = made.fit(model, made.CkptdCallback(daemon=None))
    made.fit(plain)
    assert trainer.global_step == 5
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    loop = trainer.fit_loop
    wrapped = [
        (loop.epoch_loop, "advance"),
        (loop.epoch_loop, "on_run_start"),
        (loop, "on_run_end"),
    ]
    assert not [name for holder, name in wrapped if name in vars(holder)]


def test_its_loggers_get_the_scalars_with_its_own(made: Any, endpoint: str, tmp_path: Path) -> None:
    logger = made.CSVLogger(tmp_path, name="csv", version=0)
    callback = made.CkptdCallback(daemon=endpoint, log_scalars=True, run="lightning-scalars")
    made.fit(made.Model(), callback, logger=logger, log_every_n_steps=2)
    with (tmp_path / "csv/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["ckptd/stall_ms"]] == ["1", "3"]
    assert all(float(row["ckptd/unprotected"]) == 0.0 for row in rows)
