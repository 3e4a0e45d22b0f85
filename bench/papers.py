"""What three papers print, beside what `ckptd.core.advice` says of the same jobs, and why they differ.

MoEvement: ETTR in tables 3 and 7, intervals and windows there, and what is told of figure 11. Ours is the
closed form with the printed seconds of an iteration, overheads and intervals. A recovery is 3/2 W iterations
for MoEvement; for CheckFreq and Gemini half of an interval and a restart, which is not printed: one number for
each table is fitted (`fitted_restart`). Where an input is lost it follows from sizes, at the one rate at which
the paper's Gemini copies (`copy_rate`). MoC-System: sizes by equations 5 and 6, and the lost tokens of figure
15. MoEtion: sizes by its equation 5, and the order of its systems.

A difference counts as one from 0.02 (ETTR and other shares) or 10 % (everything else) on. Then *why* says
which input the printed figure would follow from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from bench.common import Metric, emit, parser, table
from bench.printed_figures import (
    CLUSTERS,
    RUN_S,
    SYSTEMS,
    TABLE_3,
    TABLE_7,
    PrintedCell,
    PrintedJob,
    parameters_of_expert,
)
from ckptd.core.advice.job_shape import Layout, ModelShape, Precision, RankShape, rank_shape
from ckptd.core.advice.outlook import Conditions, dense_outlook, ettr, partial_outlook
from ckptd.core.partial_experts import LOST_TOKENS_LIMIT, window_within
from ckptd.core.schedule import order_operators, plan_aligned

__all__ = [
    "Row",
    "best_interval",
    "copy_rate",
    "cumulative_losses",
    "ettr_rows",
    "figure_10_row",
    "figure_11_ettr",
    "figure_11_rows",
    "figure_15",
    "fitted_restart",
    "interval_rows",
    "main",
    "moc_rows",
    "moetion_outlooks",
    "moetion_rows",
    "sliding_ettr",
    "two_level_losses",
]

_NEAR, _NEAR_SHARE = 0.02, 0.10
_BOUND = 0.03  # CheckFreq's, of an iteration
# The rate to the hosts, of all GPUs together, at which most windows of table 7 follow; nothing printed tells
# it. Copies of Gemini's snapshots are half as fast.
_TABLE_7_TO_HOSTS_BPS = 26e9


@dataclass(frozen=True, slots=True)
class Row:
    """Some printed figures, and ours; None where an input is lost.

    Attributes:
        absolute: compared by their difference, as ETTR are; otherwise by its share of what is printed.
        bound: ours may be more.
    """

    what: str
    printed: tuple[float, ...]
    ours: tuple[float | None, ...]
    why: str = ""
    absolute: bool = False
    bound: bool = False

    @property
    def compared(self) -> int:
        """How many there are of both."""
        return sum(each is not None for each in self.ours)

    @property
    def far(self) -> list[int]:
        """Which of them differ."""
        pairs = zip(self.printed, self.ours, strict=True)
        return [n for n, (printed, ours) in enumerate(pairs) if ours is not None and self._far(printed, ours)]

    def _far(self, printed: float, ours: float) -> bool:
        if self.bound:
            return ours < printed
        return abs(printed - ours) > (_NEAR if self.absolute else _NEAR_SHARE * abs(printed))

    def cells(self) -> list[str]:
        """For a table."""
        near = f"{self.compared - len(self.far)} of {self.compared}"
        why = self.why if self.far else ""
        return [self.what, self._text(self.printed), self._text(self.ours), near, why]

    def _text(self, figures: Sequence[float | None]) -> str:
        form = ".3f" if self.absolute else ".4g"
        return " ".join("-" if each is None else format(each, form) for each in figures)


# -- MoEvement, tables 3 and 7 ---------------------------------------------------------------------


def copy_rate(jobs: Sequence[PrintedJob]) -> float:
    """Bytes a second of all GPUs together at which Gemini's snapshots are copied: the median of what its
    printed intervals and overheads say. A snapshot has masters and optimizer state.
    """
    return statistics.median(
        _state_bytes(job) / (cell.every * cell.overhead_s)
        for job in jobs
        for cell in job.cells["Gemini"].values()
        if cell.every is not None and cell.overhead_s is not None
    )


def _state_bytes(job: PrintedJob) -> float:
    return job.parameters * 1e9 * job.state


@cache
def best_interval(iteration_s: float, snapshot_s: float, mtbf_s: float) -> int:
    """Of dense snapshots, as MoEvement's Gemini chooses it: that with the highest ETTR."""

    def of(every: int) -> float:
        return ettr(iteration_s, snapshot_s / every, every * iteration_s / 2, mtbf_s)

    return max(range(1, 4000), key=of)


def fitted_restart(jobs: Sequence[PrintedJob]) -> int:
    """The seconds, of CheckFreq's and Gemini's failures besides half of an interval, with which most of their
    ETTR are near.
    """

    def near(restart_s: int) -> tuple[int, int]:
        rows = ettr_rows(jobs, restart_s, ("CheckFreq", "Gemini"))
        return sum(row.compared - len(row.far) for row in rows), -restart_s

    return max(range(0, 300, 10), key=near)


def ettr_rows(jobs: Sequence[PrintedJob], restart_s: float, systems: Sequence[str] = SYSTEMS) -> list[Row]:
    """The ETTR of each job and system, by MTBF."""
    rate = copy_rate(jobs)
    return [_ettr_row(job, each, _state_bytes(job) / rate, restart_s) for job in jobs for each in systems]


def _ettr_row(job: PrintedJob, system: str, snapshot_s: float, restart_s: float) -> Row:
    cells = job.cells[system]
    known = [_inputs(job, system, m, cell, snapshot_s, restart_s) for m, cell in cells.items()]
    ours = tuple(
        None if each is None else ettr(job.iteration_s, *each, mtbf_s)
        for each, mtbf_s in zip(known, cells, strict=True)
    )
    row = Row(f"{job.name}: {system}", tuple(cell.ettr for cell in cells.values()), ours, absolute=True)
    far = [
        (mtbf_s, cell, each)
        for n, ((mtbf_s, cell), each) in enumerate(zip(cells.items(), known, strict=True))
        if n in row.far and each is not None
    ]
    if not far:
        return row
    if system in ("CheckFreq", "Gemini"):
        return replace(row, why=_longer_recovery(job, far, restart_s))
    return replace(row, why=_larger_overhead(job, far))


def _inputs(
    job: PrintedJob, system: str, mtbf_s: float, cell: PrintedCell, snapshot_s: float, restart_s: float
) -> tuple[float, float] | None:
    """The overhead of an iteration, and a recovery."""
    if system == "MoEvement":
        assert cell.overhead_s is not None
        return cell.overhead_s, 1.5 * job.window * job.iteration_s
    if system == "MoC":
        return None if cell.overhead_s is None else (cell.overhead_s, job.iteration_s / 2)
    every = cell.every or best_interval(job.iteration_s, snapshot_s, mtbf_s)
    overhead_s = cell.overhead_s
    if overhead_s is None:
        overhead_s = _BOUND * job.iteration_s if system == "CheckFreq" else snapshot_s / every
    return overhead_s, every * job.iteration_s / 2 + restart_s


Far = Sequence[tuple[float, PrintedCell, tuple[float, float]]]


def _longer_recovery(job: PrintedJob, far: Far, restart_s: float) -> str:
    """What failures would cost besides half of an interval, and what they do by the printed recoveries."""
    needed = [
        mtbf_s * (1 / (cell.ettr * (1 + overhead_s / job.iteration_s)) - 1) - recovery_s + restart_s
        for mtbf_s, cell, (overhead_s, recovery_s) in far
    ]
    told = [
        cell.recovery_s * mtbf_s / RUN_S - recovery_s + restart_s
        for mtbf_s, cell, (_, recovery_s) in far
        if cell.recovery_s is not None
    ]
    printed = f"; by printed recoveries {_span(told)} s" if told else ""
    return f"needs restarts of {_span(needed)} s{printed}"


def _larger_overhead(job: PrintedJob, far: Far) -> str:
    needed = [1 / (cell.ettr * (1 + recovery_s / mtbf_s)) - 1 for mtbf_s, cell, (_, recovery_s) in far]
    told = [overhead_s / job.iteration_s for _, _, (overhead_s, _) in far]
    percents = [[100 * each for each in shares] for shares in (needed, told)]
    return f"needs overheads of {_span(percents[0])} %; printed {_span(percents[1])} %"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"


def sliding_ettr(job: PrintedJob) -> list[float]:
    """With the window and overhead of MoEvement, and half of an iteration lost where it loses half a window."""
    recovery_s = (job.window - 0.5) * job.iteration_s
    cells = job.cells["MoEvement"].items()
    return [ettr(job.iteration_s, cell.overhead_s or 0.0, recovery_s, mtbf_s) for mtbf_s, cell in cells]


def interval_rows() -> list[Row]:
    """Intervals and windows, from sizes and one rate for each table."""
    rows = []
    for number, jobs in ((3, TABLE_3), (7, TABLE_7)):
        rate = copy_rate(jobs)
        longest = max(jobs, key=lambda job: job.cells["CheckFreq"][600.0].every or 0)
        every = longest.cells["CheckFreq"][600.0].every
        assert every is not None
        disk = _state_bytes(longest) / (every * _BOUND * longest.iteration_s)
        rows.append(
            Row(
                f"table {number}: CheckFreq's intervals",
                tuple(job.cells["CheckFreq"][600.0].every or 0 for job in jobs),
                tuple(math.ceil(_state_bytes(job) / disk / (_BOUND * job.iteration_s)) for job in jobs),
                f"one rate for all, {disk / 1e9:.3g} GB/s, of {longest.name}; smaller states are copied "
                f"{'slower' if number == 3 else 'faster'}",
            )
        )
        rows += [_gemini_intervals(number, job, _state_bytes(job) / rate) for job in jobs]
        to_hosts = rate if number == 3 else _TABLE_7_TO_HOSTS_BPS
        rows.append(
            Row(
                f"table {number}: windows",
                tuple(job.window for job in jobs),
                tuple(_window(job, to_hosts) for job in jobs),
                f"{to_hosts / 1e9:.3g} GB/s to the hosts; nothing printed tells the rate of each job",
            )
        )
    return [row for row in rows if row.printed]


def _gemini_intervals(number: int, job: PrintedJob, snapshot_s: float) -> Row:
    cells = {m: cell.every for m, cell in job.cells["Gemini"].items() if cell.every is not None}
    return Row(
        f"table {number}: Gemini's intervals, {job.name}",
        tuple(cells.values()),
        tuple(best_interval(job.iteration_s, snapshot_s, mtbf_s) for mtbf_s in cells),
        f"ETTR at the printed ones within {_flatness(job, snapshot_s, cells):.2g} of the best",
    )


def _flatness(job: PrintedJob, snapshot_s: float, cells: dict[float, int]) -> float:
    def of(every: int, mtbf_s: float) -> float:
        return ettr(job.iteration_s, snapshot_s / every, every * job.iteration_s / 2, mtbf_s)

    return max(
        (of(best_interval(job.iteration_s, snapshot_s, m), m) - of(every, m) for m, every in cells.items()),
        default=0.0,
    )


def _shape(job: PrintedJob) -> RankShape:
    expert = parameters_of_expert(job) * 1e9
    dense = job.active * 1e9 / job.layers - job.used * expert
    model = ModelShape(job.layers, int(dense), 0, job.experts, job.used, int(expert))
    return rank_shape(
        model, Layout(job.gpus, job.stages, job.expert_ranks), Precision(job.compute, job.state)
    )


def _window(job: PrintedJob, rate: float) -> int:
    """The smallest of aligned windows whose snapshots are copied within an iteration (algorithm 1)."""
    operators = _shape(job).operators
    order = order_operators(operators, [0.0] * len(operators), dense_last=True)
    budget = int(rate / job.gpus * job.iteration_s)
    return plan_aligned(operators, budget_bytes=budget, order=order).window


# -- MoEvement, figure 11 --------------------------------------------------------------------------


_AT_10_MIN, _GEMINI_AT_10_MIN, _WINDOW, _OVERHEAD = 0.86, 0.55, 6, 0.02


def figure_11_iteration_s() -> float:
    """From 0.86 for 671B parameters at 10 minutes, with the overhead and window of table 3's DeepSeek-MoE."""
    return 600 * (1 / (_AT_10_MIN * (1 + _OVERHEAD)) - 1) / (1.5 * _WINDOW)


def figure_11_ettr(parameters: float, gpus: int, mtbf_s: float, restart_s: float) -> tuple[float, float]:
    """MoEvement's and Gemini's. Gemini's snapshots are copied at the rate of each of table 7's GPUs."""
    iteration_s = figure_11_iteration_s()
    snapshot_s = _figure_11_snapshot_s(parameters, gpus)
    every = best_interval(iteration_s, snapshot_s, mtbf_s)
    recovery_s = every * iteration_s / 2 + restart_s
    return (
        ettr(iteration_s, _OVERHEAD * iteration_s, 1.5 * _WINDOW * iteration_s, mtbf_s),
        ettr(iteration_s, snapshot_s / every, recovery_s, mtbf_s),
    )


def _figure_11_snapshot_s(parameters: float, gpus: int) -> float:
    return 12e9 * parameters / (gpus * copy_rate(TABLE_7) / TABLE_7[0].gpus)


def figure_10_row(restart_s: float) -> Row:
    """The goodput of its windows as a multiple of CheckFreq's and Gemini's (section 5.3), by the formula.

    The intervals are printed, and an MTBF of 19 minutes, although 24 failures within 6 hours are 15 apart.
    """
    job, mtbf_s = TABLE_3[-1], 19 * 60.0
    windows = ettr(job.iteration_s, 0.06, 1.5 * job.window * job.iteration_s, mtbf_s)
    dense = [
        ettr(job.iteration_s, overhead_s, every * job.iteration_s / 2 + restart_s, mtbf_s)
        for every, overhead_s in ((124, 0.08), (92, 0.07))
    ]
    return Row("figure 10: times CheckFreq, Gemini", (1.25, 1.15), (windows / dense[0], windows / dense[1]))


def figure_11_rows() -> list[Row]:
    """What section 5.4 tells of it: neither iterations nor windows nor overheads."""
    parameters, gpus, _, _ = CLUSTERS[-1]
    restart_s = fitted_restart(TABLE_7)
    windows, _ = figure_11_ettr(parameters, gpus, 3600, restart_s)
    _, dense = figure_11_ettr(parameters, gpus, 600, restart_s)
    needed_s = next(
        s for s in range(2000) if figure_11_ettr(parameters, gpus, 600, s)[1] <= _GEMINI_AT_10_MIN
    )
    return [
        Row("figure 11: 671B, 1 h: MoEvement, above", (0.91,), (windows,), absolute=True, bound=True),
        Row(
            "figure 11: 671B, 10 min: Gemini",
            (_GEMINI_AT_10_MIN,),
            (dense,),
            f"needs restarts of {needed_s} s; fitted to table 7, of 128 GPUs: {restart_s} s",
            absolute=True,
        ),
        Row("figure 11: 671B, 10 min: times faster, 0.86 / 0.55", (1.55,), (_AT_10_MIN / _GEMINI_AT_10_MIN,)),
    ]


# -- MoC-System ------------------------------------------------------------------------------------


def _gpt(layers: int, hidden: int, sparse: int, experts: int) -> tuple[int, int]:
    """Parameters outside experts, and of experts, of table 1's language models without their embeddings."""
    return (4 * layers + 8 * (layers - sparse)) * hidden**2, 8 * sparse * experts * hidden**2


def moc_rows() -> list[Row]:
    """Sizes by equations 5 and 6; weights have 2 bytes, masters and moments 12."""
    other, experts = _gpt(24, 1024, 12, 16)
    dense_model, _ = _gpt(24, 1024, 0, 16)
    rank = rank_shape(ModelShape(12, other // 12, 0, 16, 1, experts // 12 // 16), Layout(1), Precision(2, 14))
    conditions = Conditions(1.0, 600.0, 20e9, 5e9)
    one = partial_outlook(rank, conditions, 16).snapshot_bytes
    saved_w, saved_o, saved_both = 1 - 0.88, 1 - 0.54, 1 - 0.42
    share = saved_both / (1 - 1 / 16)
    return [
        Row("table 1: GPT-350M-16E, 2^30 parameters", (1.7,), ((other + experts) / 2**30,)),
        Row("3: K=1, of a dense model's checkpoint", (1.0,), (one / (dense_model * 14),)),
        Row(
            "4.2: weights outside experts, of all state",
            (0.02,),
            (2 * other / rank.dense_bytes,),
            absolute=True,
        ),
        Row(
            "6.2.1: K=1, of the full checkpoint",
            (0.423,),
            (one / rank.dense_bytes,),
            f"by equation 6, {experts / (other + experts):.2f} of the parameters are experts'; 0.423 needs "
            f"{share:.2f}",
            absolute=True,
        ),
        Row("table 3: W and O together save WO", (saved_both,), (saved_w + saved_o,), absolute=True),
    ]


def cumulative_losses(
    faults: int, gap: int, window: int, every: int, rule: Callable[[float, int], int]
) -> list[float]:
    """The PLT after each of so many faults, of all tokens of the run, which are even.

    Args:
        gap: iterations between two faults.
        window: with K = 1.
        rule: the window up to the next fault, from the iterations that are lost so far, and from its own.
    """
    lost, found = 0.0, []
    for fault in range(1, faults + 1):
        lost += every * (min(window, rule(lost, fault * gap)) - 1) / 2
        found.append(lost / (faults * gap))
    return found


def figure_15(faults: int = 32, gap: int = 2000, window: int = 16, every: int = 32) -> dict[str, list[float]]:
    """Its curves for faults every 2,000 iterations (figure 14) and a snapshot every 32 (figure 5)."""
    total = faults * gap

    def dynamic(lost: float, iteration: int) -> int:
        """K is doubled after a fault with which the limit is exceeded; here for each new limit."""
        doubled = int(lost / total / LOST_TOKENS_LIMIT)
        return max(1, window >> doubled)

    def ahead(lost: float, iteration: int) -> int:
        return window_within(LOST_TOKENS_LIMIT, iteration, lost_iterations=lost, every=every, longest=window)

    rules = {"K = 1": lambda lost, iteration: window, "dynamic K": dynamic, "known before": ahead}
    return {name: cumulative_losses(faults, gap, window, every, rule) for name, rule in rules.items()}


def two_level_losses(experts: int, selected: int, persisted: int, *, replicated: bool) -> float:
    """Of figure 15a: the snapshots' worth of all experts' updates that the loss of one of two nodes costs.

    Args:
        selected: experts of a layer in each snapshot (K_snapshot), of which so many are ``persisted``.
        replicated: each node has the snapshots of both, as here; otherwise the lost node's experts are those
            that were persisted.
    """
    in_memory, in_storage = (experts / selected - 1) / 2, (experts / persisted - 1) / 2
    return in_memory if replicated else (in_memory + in_storage) / 2


# -- MoEtion ---------------------------------------------------------------------------------------

_GB_OF_58_7 = 587.0  # MoE-GPT-1.6B-64E, section 7.2: ten bytes of a parameter
_MOETION_GPUS, _BLOB_BPS, _ITERATION_S = 64, 5e9, 25.0  # 40 Gb/s; stalls of 100 s are four iterations


def _grown(dense: float, sparse: float, experts: int) -> tuple[float, float]:
    """Parameters outside experts, and of an expert, in billions, of a dense model with so many experts."""
    expert = (sparse - dense) / (experts - 1)
    return dense - expert, expert


def moetion_rows() -> list[Row]:
    """Sizes by equation 5, from the parameters of section 7.1; stalls and frequencies of section 7.2."""
    other, expert = _grown(1.6, 58.7, 64)
    per_parameter = _GB_OF_58_7 / 58.7
    other_16, expert_16 = _grown(2.9, 30.1, 16)
    _, expert_8 = _grown(3.8, 46.7, 8)
    stall_s = _GB_OF_58_7 * 1e9 / _BLOB_BPS - 0.9 * _ITERATION_S
    per_100 = [0.07 * _ITERATION_S / each * 100 for each in (28.0, stall_s)]
    return [
        Row("1.6B-64E: GB, 6 of 64 experts", (61.0,), (per_parameter * (other + 6 * expert),)),
        Row(
            "2.9B-16E: experts' share of all state",
            (0.85,),
            (16 * expert_16 / (other_16 + 16 * expert_16),),
            "not by its own 30.1 billion parameters with 16 experts, and 2.9 with one",
        ),
        Row("3.8B: GB with 32 experts", (1820.0,), (per_parameter * (3.8 + 31 * expert_8),)),
        Row("1.6B-64E: stall s, CheckFreq each iteration", (100.0,), (stall_s,)),
        Row("slowdown by that", (5.0,), (1 + stall_s / _ITERATION_S,)),
        Row(
            "snapshots of 100 iterations: Gemini, CheckFreq",
            (6.0, 2.0),
            (per_100[0], per_100[1]),
            "with stalls bounded to 7 %",
        ),
    ]


def moetion_outlooks(iteration_s: float, mtbf_s: float) -> dict[str, float]:
    """The ETTR of its systems for MoE-GPT-1.6B-64E: 6 of 64 experts in each snapshot, and dense snapshots at
    the intervals of section 7.2, to hosts (28 s of stall) and to disk.
    """
    other, expert = _grown(1.6, 58.7, 64)
    model = ModelShape(1, int(other * 1e9), 0, 64, 1, int(expert * 1e9))
    rank = rank_shape(model, Layout(_MOETION_GPUS), Precision(2, 10))
    link = rank.dense_bytes / (28.0 + 0.9 * iteration_s)
    hosts = Conditions(iteration_s, mtbf_s, link, 10e9)
    disk = Conditions(iteration_s, mtbf_s, _BLOB_BPS / _MOETION_GPUS, 10e9)
    return {
        "MoEtion": partial_outlook(rank, hosts, 11).ettr,
        "Gemini": dense_outlook(rank, hosts, 16).ettr,
        "CheckFreq": dense_outlook(rank, disk, 50).ettr,
    }


# -- the page --------------------------------------------------------------------------------------


def main() -> None:
    args = parser(__doc__).parse_args()
    restarts = [fitted_restart(jobs) for jobs in (TABLE_3, TABLE_7)]
    metrics: dict[str, Metric] = {"table_3_restart_s": restarts[0], "table_7_restart_s": restarts[1]}
    parts = [
        (
            "table_3",
            "MoEvement, table 3: ETTR at 2 h, 1 h, 30, 20 and 10 min",
            ettr_rows(TABLE_3, restarts[0]),
        ),
        ("table_7", "MoEvement, table 7: ETTR at 1 h, 30 and 10 min", ettr_rows(TABLE_7, restarts[1])),
        ("intervals", "MoEvement: intervals and windows, from sizes", interval_rows()),
        ("figures", "MoEvement, figures 10 and 11", [figure_10_row(restarts[0]), *figure_11_rows()]),
        ("moc", "MoC-System", moc_rows()),
        ("moetion", "MoEtion", moetion_rows()),
    ]
    for name, title, rows in parts:
        _show(title, ["printed", "ours", "near", "why"], [row.cells() for row in rows])
        metrics[f"{name}_compared"] = sum(row.compared for row in rows)
        metrics[f"{name}_near"] = sum(row.compared - len(row.far) for row in rows)
    _show_figures(restarts[1])
    emit("papers", metrics, as_json=args.json)


def _show_figures(restart_s: float) -> None:
    hours = {"1 h": 3600.0, "30 min": 1800.0, "10 min": 600.0}
    found = [
        [
            f"{size}B on {gpus}",
            *("{:.3f} {:.3f}".format(*figure_11_ettr(size, gpus, m, restart_s)) for m in hours.values()),
        ]
        for size, gpus, _, _ in CLUSTERS
    ]
    title = f"Figure 11, ours: MoEvement and Gemini, iterations of {figure_11_iteration_s():.1f} s for all"
    _show(title, list(hours), found)
    _show(
        "Table 3, with recoveries of W - 1/2 iterations (sliding windows), ours",
        ["2 h", "1 h", "30 min", "20 min", "10 min"],
        [[job.name, *(f"{each:.3f}" for each in sliding_ettr(job))] for job in TABLE_3],
    )
    selected = (1, 2, 4, 8, 16)
    levels = {"as the paper": False, "with replicas": True}
    losses = [
        [name, *(f"{two_level_losses(16, k, 1, replicated=replicated):.2f}" for k in selected)]
        for name, replicated in levels.items()
    ]
    title = "MoC-System, figure 15a, ours: lost snapshots of all experts, by K_snapshot of 16 (K_persist = 1)"
    _show(title, [str(k) for k in selected], losses)
    after = (8, 16, 24, 32)
    rows = [[name, *(f"{plt[n - 1]:.2%}" for n in after)] for name, plt in figure_15().items()]
    _show("MoC-System, figure 15b, ours: PLT after faults", [str(n) for n in after], rows)
    systems = [moetion_outlooks(_ITERATION_S, mtbf_s) for mtbf_s in hours.values()]
    rows = [[name, *(f"{each[name]:.3f}" for each in systems)] for name in systems[0]]
    _show("MoEtion, 1.6B-64E, ours: ETTR", list(hours), rows)


def _show(title: str, header: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n\n{table(['', *header], rows)}")


if __name__ == "__main__":
    main()
