"""The plan with which a rank begins, where ranks find out at different moments what they can capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.client.schedule import initial_schedule
from ckptd.client.schedule.initial_schedule import FirstPlan


class Windows:
    """Stands for what the other ranks say: they answer once this one has asked twice."""

    def __init__(self, memory: Any) -> None:
        self.asked = 0

    def first(
        self, window: int, *, dense: bool, stride: int, every: int
    ) -> tuple[int, bool, int, int] | None:
        self.asked += 1
        return (window, dense, stride, every + 6) if self.asked > 1 else None

    def waits(self, step: int) -> None:
        """Nothing of it is told here."""

    def shares_agree(self, window: int, prints: Any) -> bool:
        return True


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(initial_schedule, "InitialSchedule", Windows)
    sharing = SimpleNamespace(replicas=(), fingerprints=lambda *_: {})
    return SimpleNamespace(limits=(1, 1), policy="sliding", dense=False, sharing=sharing)


def test_a_rank_that_finds_out_while_it_waits_that_only_dense_is_exact_plans_anew(
    planner: Any,
) -> None:
    """An optimizer turned out to hold gradients while another one stepped, after this rank had made
    its sparse plan and before the others had answered. It kept that plan, refused what all agreed
    on, and was not protected for as long as it trained.
    """
    failed: list[Exception] = []
    intervals: list[int] = []
    memory: Any = SimpleNamespace(session=SimpleNamespace(connected=True))
    changes: Any = SimpleNamespace(strides=SimpleNamespace(shortest=1), calendar=None)
    found = FirstPlan(
        SimpleNamespace(),  # type: ignore[arg-type]
        memory,
        planner,
        lambda step, why, error: failed.append(error),
    )

    def make(window: int | None) -> Any:
        window = 1 if planner.dense else (window or 3)
        schedule = SimpleNamespace(window=window, phases=())
        return SimpleNamespace(
            schedule=schedule, operators=(), owners=(), selectable=(), every=1, use_interval=intervals.append
        )

    assert found.find(0, "no ring yet", changes, make) is None  # the others have not answered
    planner.policy, planner.dense = "dense", True
    plan = found.find(1, "no ring yet", changes, make)
    assert not failed
    assert plan is not None
    assert plan.schedule.window == 1
    assert intervals == [7], "the longest of all ranks"
