"""TRL's trainers through a kill: weights, optimizer, random state and the whole log, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess
from tests.e2e.lives import Life, Parent, Run, resumed_at
from tests.long import long

KINDS = (
    ("SFT", "--lora"),
    ("SFT packing",),
    ("DPO",),
    ("DPO", "--lora"),
    ("KTO", "--lora"),
    ("RLOO several iterations",),
    ("GRPO",),
    ("GRPO sequences of several steps", "--lora"),
    ("GRPO several iterations",),
    ("GRPO synchronised reference",),
)
pytestmark = [
    long,
    pytest.mark.skipif(
        not all(find_spec(name) for name in ("trl", "peft", "datasets")),
        reason="trl, peft and datasets are not installed: make campaign-habits installs them",
    ),
]


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with Parent("tests.habits.trl_trainers", "trl", "peft", "datasets") as made:
        yield made


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_resumes_at_the_exact_bits(
    parent: Parent, tmp_path: Path, daemon: DaemonProcess, kind: tuple[str, ...]
) -> None:
    options = ("--kind", *kind)
    plain, run = Life(tmp_path / "plain.pt", *options), Run(tmp_path, daemon, *options)
    codes = parent.live([[plain], [run.life("--kill-at", "7")], [run.life()]])
    told = "\n".join(life.log for life in (plain, *run.lives))
    assert codes == [[0], [-9], [0]], told
    assert resumed_at(run.lives[1].log) in (6, 7), told
    assert differences(plain.out, run.lives[1].out) == [], told
