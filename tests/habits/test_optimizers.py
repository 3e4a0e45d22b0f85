"""Every optimizer of the table: killed twice, and compared with a training that never was; exact,
or refused with the reason.

``python -m tests.habits.tables`` writes the table into docs/optimizers.md from what these tests found.
"""

from __future__ import annotations

import importlib.util
import json
import re
import uuid
from pathlib import Path

import pytest

from tests.e2e.harness import DaemonProcess
from tests.habits.driver import Parents, Row, check, play, some, training
from tests.habits.optimizers import MAKERS, package_of
from tests.habits.tables import OPTIMIZERS

DENSE = r"policy='dense'"
KEPT = r"optimizer .* keeps .*, which cannot be captured"

# What is refused, by window; everything else is exact.
REFUSED: dict[str, dict[int, str]] = {
    "one with a generator function": {1: KEPT, 3: KEPT},
    "galore-torch GaLoreAdamW": {1: KEPT, 3: DENSE},
    "pytorch_optimizer ScalableShampoo": {1: KEPT, 3: DENSE},
}
# Their updates depend on other parameters, or it cannot be told: sparse snapshots are refused,
# dense ones are exact.
DENSE_ONLY = (
    "torch.optim.LBFGS",
    "torch.optim.LBFGS(strong_wolfe)",
    "torch.optim.SparseAdam",
    "prodigyopt Prodigy",
    "prodigyopt Prodigy(slice_p=11)",
    "schedulefree AdamWScheduleFree",
    "schedulefree SGDScheduleFree",
    "schedulefree RAdamScheduleFree",
    "heavyball AdamW",
    "heavyball SOAP",
    "heavyball PSGDKron",
    "heavyball Muon",
    "pytorch_optimizer DAdaptAdam",
    "pytorch_optimizer Kron",
    "pytorch_optimizer Lookahead(AdamW)",
    "SAM(AdamW)",
    "Lookahead, a plain object",
    "one with a random generator",
    "one that draws from torch's generator",
)
ROWS = [
    Row(
        "tests.habits.optimizers",
        name,
        window=window,
        ranks=ranks,
        refused=refused,
        imports=tuple(filter(None, [package_of(name)])),
    )
    for name in MAKERS
    for window in (1, 3)
    for ranks in (1, 2)
    for refused in [REFUSED.get(name, {3: DENSE} if name in DENSE_ONLY else {}).get(window)]
]


@pytest.mark.parametrize("row", some(ROWS))
def test_exact_or_refused(row: Row, tmp_path: Path, daemon: DaemonProcess, parents: Parents) -> None:
    package = package_of(row.name)
    # Found, not imported: the process of the tests has no use for it.
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'ckptd[habits]'")
    outcome = play(row, tmp_path, daemon.endpoint, parents)
    OPTIMIZERS.note(row, outcome)
    check(row, outcome)


def test_ranks_that_come_apart_later_are_told(
    tmp_path: Path, daemon: DaemonProcess, parents: Parents
) -> None:
    """An optimizer that begins to draw random numbers after the ranks have shared out what they
    capture: there is no further snapshot.

    Each rank has the other's values only as they were. pytorch_optimizer's Kron, which draws from
    its first step on, came back with the weights of the wrong rank.
    """
    lives = training(
        Row("tests.habits.late_draws", "late", ranks=2, steps=300),
        tmp_path / "life",
        ("--daemon", daemon.endpoint, "--run", uuid.uuid4().hex[:8]),
    )
    row = Row("tests.habits.late_draws", "late", ranks=2)
    assert parents.of(row).live([lives]) == [[0, 0]]
    for life in lives:
        told = re.findall(r"optimizer Dithered drew random numbers before step (\d+)", life.log)
        assert len(told) == 1, life.log
        # Told at the first top after that update; before, there were snapshots.
        notes = [json.loads(line) for line in life.out.with_suffix(".notes").read_text().splitlines()]
        first = next(note["draws from"] for note in notes if "draws from" in note)
        assert int(told[0]) == first + 1
        assert [n["taken"] for n in notes if "taken" in n][-1] > 0
