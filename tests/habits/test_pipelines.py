"""The table of data pipelines: each is killed twice and comes to the bits of a training that was
not, or is refused at the start.

``make campaign-habits`` plays every row; ``make test`` a twentieth. ``python -m tests.habits.tables``
writes the table of docs/data.md from what these tests found.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.harness import DaemonProcess
from tests.habits.driver import STEPS, Parents, Row, check, play, some
from tests.habits.tables import DATA

MODULE = "tests.habits.pipelines"

REFUSED = {
    "augmented, persistent workers": r"persistent_workers=False.*skip=True",
    "augmented, any order of workers": r"Set in_order=True",
    "stateful in state=, 2 workers": r"remove it from state=; batches\(loader\) keeps",
    "a loader in state=": r"remove it from state= and fetch from ckpt.batches\(loader\)",
    "an iterator": r"pass its loader or dataset",
    "fetched before the loop": r"call next\(batches\) in the body",
}
# The names alone: importing the pipelines imports what they are made with.
EXACT = (
    "stored tensors",
    "stored tensors, 2 workers",
    "stored tensors, persistent workers",
    "augmented",
    "augmented, 2 workers",
    "own generator",
    "own generator, 2 workers",
    "generator of the module",
    "loader's generator",
    "with replacement",
    "batch sampler",
    "own batch sampler",
    "stateful",
    "stateful, 2 workers",
    "stateful in state=",
    "stream",
    "stream, 2 workers",
    "sharded",
)
# `state_dict()` of torchdata's loader makes its first iterator, with other random numbers, when
# ckptd looks whether it can be captured.
PROTECTED = ("stateful in state=",)

ACCELERATE = "tests.habits.accelerate_loops"
# torchdata's loader makes its first iterator in `prepare`, from random numbers that nobody keeps;
# ckptd makes it anew.
ACCELERATED = {
    "accelerate": True,
    "accelerate, fetched within accumulate": True,
    "accelerate, 2 workers": True,
    "accelerate, stateful": False,
    "accelerate, stateful, 2 workers": False,
}

ROWS = [
    Row(MODULE, name, window, ranks, refused=REFUSED.get(name), plain=name not in PROTECTED)
    for name in (*EXACT, *REFUSED)
    for window in (1, 3)
    for ranks in (1, 2)
]
ROWS += [
    Row(ACCELERATE, name, window, ranks, plain=plain)
    for name, plain in ACCELERATED.items()
    for window in (1, 3)
    for ranks in (1, 2)
]
TRAINER, LIGHTNING = "tests.habits.trainers", "tests.habits.lightning_fits"
# What is fetched in Lightning's set-up, before any callback, has another order with ckptd than without.
LOOPS = [
    (TRAINER, "trainer", True),
    (TRAINER, "trainer, 2 workers", True),
    (TRAINER, "trainer, stream", True),
    (LIGHTNING, "lightning", True),
    (LIGHTNING, "lightning, 2 workers", False),
    (LIGHTNING, "lightning, stream", False),
]
ROWS += [
    Row(module, name, window, ranks, plain=plain)
    for module, name, plain in LOOPS
    for window in (1, 3)
    for ranks in (1, 2)
]
PERSISTENT = r"persistent_workers=False.*refetch=False"
REFUSING = [
    (TRAINER, "trainer, persistent workers", PERSISTENT),
    (LIGHTNING, "lightning, persistent workers", PERSISTENT),
    (ACCELERATE, "accelerate, stateful, in state=", "remove it from state="),
]
ROWS += [
    Row(module, name, window, ranks, refused=refused)
    for module, name, refused in REFUSING
    for window in (1, 3)
    for ranks in (1, 2)
]

# Hugging Face's `datasets`, by themselves and in the loops of others.
HUB = "tests.habits.hub_datasets"
_NO_STATE = r"remove it from state= and fetch from ckpt.batches"
HUB_REFUSED = {
    "datasets, stream, no seed": r"without a seed.*shuffle\(seed=42\)",
    "datasets, stream in state=": _NO_STATE,
    "datasets, stream, stateful in state=": _NO_STATE,
    "datasets, stream without a buffer, stateful in state=": _NO_STATE,
}
HUB_EXACT = (
    "datasets",
    "datasets, shuffled by the loader, 2 workers",
    "datasets, split",
    "datasets, transform",
    "datasets, transform, 2 workers",
    "datasets, mapped",
    "datasets, mapped, cached",
    "datasets, stream",
    "datasets, stream, 2 workers",
    "datasets, stream, split",
    "datasets, stream, mapped",
    "datasets, stream, mapped, 2 workers",
    "datasets, stream, interleaved",
    "datasets, stream, set_epoch",
    "datasets, stream, set_epoch, 2 workers",
    "datasets, stream, no loader",
    "datasets, stream, stateful",
)
ROWS += [
    Row(HUB, name, window, ranks, refused=HUB_REFUSED.get(name))
    for name in (*HUB_EXACT, *HUB_REFUSED)
    for window in (1, 3)
    for ranks in (1, 2)
]
ROWS += [
    Row(module, f"{name}, datasets{stream}", window, ranks, plain=plain, imports=("datasets",))
    for module, name, stream, plain in (
        (TRAINER, "trainer", "", True),
        (TRAINER, "trainer", ", stream", True),
        (LIGHTNING, "lightning", "", True),
        (LIGHTNING, "lightning", ", stream", False),
        (ACCELERATE, "accelerate", "", True),
        (ACCELERATE, "accelerate", ", stream", True),
    )
    for window in (1, 3)
    for ranks in (1, 2)
]
# Lightning's manual optimization. Ranks plan anew where an optimizer turns out to update now and
# then: that takes more than twenty steps.
ROWS += [
    Row(
        "tests.habits.lightning_manual",
        f"lightning, manual, {name}",
        window,
        ranks,
        steps=80 if (window, ranks) == (3, 2) else STEPS,
    )
    for name in ("toggled", "alternating", "accumulating", "two updates")
    for window in (1, 3)
    for ranks in (1, 2)
]
# FSDP2 with Lightning's strategy: two ranks, each with a half of every tensor. (Accelerate shards
# on no CPU: it trains with DDP there.)
ROWS += [Row("tests.habits.fsdp2_lightning", "lightning, FSDP2", window, 2) for window in (1, 3)]


@pytest.mark.parametrize("row", some(ROWS))
def test_pipeline(row: Row, tmp_path: Path, daemon: DaemonProcess, parents: Parents) -> None:
    if "datasets" in row.name and not find_spec("datasets"):
        pytest.skip("datasets is not installed: pip install 'ckptd[habits]'")
    outcome = play(row, tmp_path, daemon.endpoint, parents)
    DATA.note(row, outcome)
    check(row, outcome)
