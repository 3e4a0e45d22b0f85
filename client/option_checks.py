"""Checks and sums before the attach: options, the user's state objects, operators, and the least
memory needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch import nn

from ckptd.client import values
from ckptd.client.capture.step_state import Stateful
from ckptd.client.data.loaders import advice_for_state, check_in_state
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import Grouping, Operator, ParameterRows, discover_operators
from ckptd.client.model.replicated_params import ReplicatedParams
from ckptd.client.schedule.planner import MIN_SCALARS
from ckptd.client.schedule.planning import MAX_WINDOW
from ckptd.client.schedule.snapshot_plan import fixed_bytes, operator_costs
from ckptd.core.schedules.schedule import OperatorKind, Ordering

__all__ = [
    "all_operators",
    "check_choice",
    "check_options",
    "check_parking",
    "check_state",
    "check_verification",
    "needed_memory",
    "own_share_bytes",
    "wanted_iteration",
]


logger = get_logger(__name__)


def all_operators(
    model: nn.Module, binding: LiveState, grouping: Grouping | None
) -> list[Operator]:
    """The model's operators, and one for each parameter that only an optimizer knows."""
    found = discover_operators(model, rows_allowed=binding.rows_allowed, grouping=grouping)
    extras = [n for n in binding.params if n.startswith("extra/")]
    return found + [
        Operator(n, OperatorKind.DENSE, (ParameterRows(n),), layer="extra") for n in extras
    ]


def needed_memory(
    binding: LiveState,
    operators: Sequence[Operator],
    policy: str,
    window: int | None,
    sharing: ReplicatedParams,
) -> tuple[int, str]:
    """The least memory with which this rank can be protected, for the daemon to check at the
    attach, and how it comes about.
    """
    costs = sharing.mean_costs(operators, operator_costs(binding, operators, {}))
    anchor, compute = sum(c.anchor_bytes for c in costs), sum(c.compute_bytes for c in costs)
    windows = (
        [1] if policy == "dense" else [window] if window is not None else range(1, MAX_WINDOW + 1)
    )
    sizes = {w: (w + 2) * (compute + (anchor - compute) // w + MIN_SCALARS) for w in windows}
    best = min(sizes, key=lambda w: sizes[w])
    return sizes[
        best
    ], f"{best + 2} slots of {sizes[best] // (best + 2)} bytes for a window of {best}"


def own_share_bytes(
    sharing: ReplicatedParams, operators: Sequence[Operator], binding: LiveState, policy: str
) -> int:
    """What every snapshot of this rank takes beside what it has in common with others."""
    shared = {i for indices in sharing.groups(operators).values() for i in indices}
    costs = operator_costs(binding, operators, {})
    return fixed_bytes(binding, 0) + sum(
        cost.anchor_bytes if policy == "dense" else cost.compute_bytes
        for i, cost in enumerate(costs)
        if i not in shared
    )


def check_options(
    policy: str, window: int | None, every: int, on_mismatch: str, ordering: str, daemon: str | None
) -> None:
    if policy not in ("sliding", "aligned", "dense"):
        raise ValueError(f"policy={policy!r}: choose 'sliding', 'aligned' or 'dense'")
    if ordering not in list(Ordering):
        raise ValueError(
            f"ordering={ordering!r}: choose {', '.join(repr(str(o)) for o in Ordering)}"
        )
    if daemon not in (None, "auto") and not str(daemon).startswith("ipc:///"):
        raise ValueError(
            f"daemon={daemon!r}: use 'auto', None, or an endpoint such as 'ipc:///run/ckptd/ckptd.sock'"
        )
    if window is not None and not (isinstance(window, int) and 1 <= window <= 64):
        raise ValueError(f"window={window}: a window has 1 to 64 snapshots")
    if every < 1 or (every > 1 and policy != "dense"):
        raise ValueError(
            f"every={every}: only policy='dense' takes a snapshot every few iterations (1 or more)"
        )
    if on_mismatch not in ("raise", "warn"):
        raise ValueError(f"on_mismatch={on_mismatch!r}: choose 'raise' or 'warn'")


def check_choice(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: choose {' or '.join(repr(each) for each in allowed)}")


def wanted_iteration(resume_at: int | None) -> int | None:
    """Where this start is to go back to; None: nowhere.

    Raises:
        ValueError: it is no iteration.
    """
    if resume_at is None:
        return None
    if not isinstance(resume_at, int) or isinstance(resume_at, bool) or resume_at < 0:
        raise ValueError(f"resume_at={resume_at!r}: pass the number of an iteration, or None")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        logger.warning(
            "resume_at=%d was for the first start; this one goes on from the newest state",
            resume_at,
        )
        return None
    return resume_at


def check_verification(verify_iterations: int) -> None:
    if isinstance(verify_iterations, bool) or not (
        isinstance(verify_iterations, int) and verify_iterations >= 0
    ):
        raise ValueError(
            f"verify_iterations={verify_iterations!r}: pass how many iterations a resume may replay to compare, or 0 for none"
        )


def check_parking(park: bool | None, park_after_s: float | None) -> None:
    if park not in (None, True, False):
        raise ValueError(f"park={park!r}: pass True, False, or None (where boundaries are logged)")
    if park_after_s is not None and not park_after_s > 0:
        raise ValueError(f"park_after_s={park_after_s}: pass seconds above 0, or None")


def check_state(state: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    """Everything in ``state=`` can be captured, now rather than at the first snapshot."""
    if state is not None and not isinstance(state, Mapping):
        raise ValueError(
            f"state= is a {type(state).__name__}; pass a dict of named objects, such as {{'sched': sched}}"
        )
    found = dict(state or {})
    for name, item in found.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                advice = (
                    advice_for_state(item) or "pass objects with state_dict() and load_state_dict()"
                )
                raise ValueError(  # noqa: TRY004 - one kind of error for all that users pass
                    f"state[{name!r}] is a {type(item).__name__} without {method}(): {advice}"
                )
        check_in_state(item)
        values.pack(item.state_dict(), f"state[{name!r}]")
    return found
