"""DeepSpeed's engine through SIGKILL: every bit of each rank's weights, parts of fp32 weights, moments, counters."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e.harness import DaemonProcess
from tests.e2e.lives import Parent
from tests.e2e.two_ranks import TwoRanks
from tests.long import long

KILL_AT = 9
pytestmark = [
    long,
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="deepspeed is not installed: make campaign-habits installs it"
    ),
]


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with Parent("tests.habits.deepspeed_jobs", ends_with_one=True) as made:
        yield made


@pytest.mark.parametrize(
    "options",
    [
        ("--stage", "0"),
        ("--stage", "0", "--precision", "fp32"),
        ("--stage", "1"),
        ("--stage", "1", "--one-group"),
        ("--stage", "1", "--precision", "fp32"),
        ("--stage", "2"),
        ("--stage", "2", "--precision", "fp32", "--one-group"),
        ("--stage", "0", "--micro-steps"),
        ("--stage", "2", "--micro-steps"),
    ],
    ids=" ".join,
)
def test_resumes_at_the_exact_bits(
    parent: Parent, tmp_path: Path, daemon: DaemonProcess, options: tuple[str, ...]
) -> None:
    """The seed of the second life is another one: whatever was not restored shows."""
    if "--micro-steps" in options:
        options = (*options, "--total", "28")
    kill_at = 2 * KILL_AT + 1 if "--micro-steps" in options else KILL_AT
    ranks = TwoRanks(tmp_path, daemon, kill_at, *options, again=("--seed", "9"))
    ranks.live(parent)
    ranks.check(range(1, kill_at + 1))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"stage": 3}, "ZeRO stage 3"),
        ({"offload": True}, "offload_optimizer"),
        ({"ranks": 4}, "2 ranks, of which 4 are data-parallel"),
    ],
)
def test_what_hooks_cannot_see_is_refused(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, int], message: str
) -> None:
    from ckptd.client.frameworks import deepspeed

    class Engine:
        """In place of one, which needs a process group to be made."""

        dp_world_size = engine.get("ranks", 2)

        def zero_optimization_stage(self) -> int:
            return engine.get("stage", 1)

        def zero_cpu_offload(self) -> bool:
            return bool(engine.get("offload", False))

        def zero_offload_param(self) -> None:
            return None

        def random_ltd_enabled(self) -> bool:
            return False

    monkeypatch.setattr(deepspeed, "DeepSpeedEngine", Engine)
    monkeypatch.setattr(deepspeed, "dist", SimpleNamespace(get_world_size=lambda: 2))
    with pytest.raises(ValueError, match=message):
        deepspeed.checkpointer(Engine())


def test_another_object_is_refused() -> None:
    from ckptd.client.frameworks import deepspeed

    with pytest.raises(ValueError, match="engine= is a object: pass what deepspeed"):
        deepspeed.checkpointer(object())
