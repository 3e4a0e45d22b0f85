"""DeepSpeed through Accelerate and through transformers' ``Trainer``, and through SIGKILL: every bit of each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType

from tests.e2e.harness import DaemonProcess
from tests.e2e.lives import Parent, Run
from tests.e2e.two_ranks import TwoRanks, both
from tests.long import long
from tests.ports import free_ports

# How a loop is written; the total steps, and the one in which rank 1 dies. A step of the first is a micro-batch, of
# which an update has three, and the last one of an epoch two: step 30 begins with the gradients of two.
THROUGH = {
    "accelerate": (("--through", "accelerate"), 40, 30),
    "updates": (("--through", "accelerate", "--updates"), 18, 11),
    "trainer": (("--through", "trainer"), 18, 11),
}
CASES = (
    ("accelerate", "--stage", "0"),
    ("accelerate", "--stage", "0", "--precision", "fp32"),
    ("accelerate", "--stage", "1"),
    ("accelerate", "--stage", "1", "--precision", "fp32", "--configured"),
    ("accelerate", "--stage", "2"),
    ("accelerate", "--stage", "2", "--configured"),
    ("accelerate", "--stage", "1", "--environment"),
    ("updates", "--stage", "1", "--configured"),
    ("updates", "--stage", "2", "--precision", "fp32", "--frozen"),
    ("trainer", "--stage", "0"),
    ("trainer", "--stage", "0", "--precision", "fp32", "--configured"),
    ("trainer", "--stage", "1"),
    ("trainer", "--stage", "1", "--precision", "fp32", "--configured"),
    ("trainer", "--stage", "1", "--checkpoints"),
    ("trainer", "--stage", "1", "--environment", "--configured"),
    ("trainer", "--stage", "2", "--frozen"),
    ("trainer", "--stage", "2", "--hybrid"),
    ("trainer", "--stage", "2", "--precision", "fp32"),
    ("trainer", "--stage", "2", "--configured", "--checkpoints"),
)
REFUSED = {
    ("--stage", "3"): "ValueError: ckptd cannot capture ZeRO stage 3",
    ("--stage", "2", "--offload"): "ValueError: .* offload_optimizer keeps state in host memory",
    ("--no-backend",): "ValueError: this run is of world_size=1, and DeepSpeed trains with 2 ranks",
}
pytestmark = [
    long,
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="deepspeed is not installed: make campaign-habits installs it"
    ),
]


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with Parent("tests.habits.deepspeed_through", ends_with_one=True) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_resumes_at_the_exact_bits(
    parent: Parent, tmp_path: Path, daemon: DaemonProcess, case: tuple[str, ...]
) -> None:
    """The seed of the second life is another one: whatever was not restored shows."""
    through, total, kill_at = THROUGH[case[0]]
    options = (*through, "--total", str(total), *case[1:])
    ranks = TwoRanks(tmp_path, daemon, kill_at, *options, again=("--seed", "9"))
    ranks.live(parent)
    ranks.check(range(1, kill_at + 1))


@pytest.mark.parametrize("through", ["accelerate", "trainer"])
@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_what_cannot_be_exact_is_refused_before_the_first_step(
    parent: Parent, tmp_path: Path, daemon: DaemonProcess, through: str, options: tuple[str, ...]
) -> None:
    run = Run(tmp_path, daemon, "--through", through, *options)
    lives = [run.life(*end) for end in both(free_ports(1)[0])]
    assert parent.live([lives]) == [[1, 1]]
    for life in lives:
        assert re.search(REFUSED[options], life.log), life.log


def test_an_optimizer_that_is_not_the_engines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptd.client.frameworks import accelerate, deepspeed

    monkeypatch.setattr(deepspeed, "check_engine", lambda engine: None)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, scaler=None, step=0, process_index=0, num_processes=2
    )
    engine, other = SimpleNamespace(optimizer=object()), SimpleNamespace(optimizer=object())
    with pytest.raises(
        ValueError, match="is a SimpleNamespace that is not around the optimizer of DeepSpeed"
    ):
        accelerate.checkpointer(accelerator, engine, other)
