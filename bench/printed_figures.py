"""What three papers print: the figures that `bench.papers` and its tests compare the model with.

MoEvement (NSDI '26): tables 2, 3 and 7, and the prose of section 5.4, for figure 11's curves are not in the
text. MoC-System (ASPLOS '25): tables 1 and 3, sections 3.1, 4.2 and 6. MoEtion: sections 4.1 and 7.2.

Cells that the text of the tables has lost are None: in table 3 Gemini's intervals, of which section 5 names
one, and in table 7 the recoveries at 30 minutes, and CheckFreq's overheads, which it bounds to 3 %. The first
overhead of each row there is Gemini's: times its interval it is as many seconds as at shorter MTBFs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "CLUSTERS",
    "RUN_S",
    "SYSTEMS",
    "TABLE_3",
    "TABLE_7",
    "PrintedCell",
    "PrintedJob",
    "parameters_of_expert",
]

RUN_S = 12 * 3600.0
"""Of each run in tables 3 and 7."""


@dataclass(frozen=True, slots=True)
class PrintedCell:
    """One system at one MTBF.

    Attributes:
        overhead_s: of an iteration.
        recovery_s: of all failures of the run.
    """

    ettr: float
    every: int | None
    overhead_s: float | None
    recovery_s: float | None


@dataclass(frozen=True, slots=True)
class PrintedJob:
    """One model of table 3, or one precision of table 7.

    Attributes:
        iteration_s: follows from MoC's overheads in seconds and in percent, which are the largest and so the
            least rounded.
        parameters, active: of the model, in billions (table 2).
        state, compute: bytes of a parameter's masters and optimizer state, and of its compute weights.
        stages, expert_ranks: of the layout.
        window: MoEvement's.
        cells: by system, and there by MTBF.
    """

    name: str
    iteration_s: float
    gpus: int
    parameters: float
    active: float
    layers: int
    experts: int
    used: int
    state: int
    compute: int
    stages: int
    expert_ranks: int
    window: int
    cells: Mapping[str, Mapping[float, PrintedCell]]


SYSTEMS = ("CheckFreq", "Gemini", "MoC", "MoEvement")
_HOUR = 3600.0


def _column(
    mtbfs: tuple[float, ...],
    ettr: tuple[float, ...],
    recovery: tuple[float | None, ...],
    every: tuple[int | None, ...],
    overhead: tuple[float | None, ...],
) -> dict[float, PrintedCell]:
    """One value for all MTBFs, or one for each."""
    count = len(mtbfs)
    everys = every * count if len(every) == 1 else every
    overheads = overhead * count if len(overhead) == 1 else overhead
    rows = zip(mtbfs, ettr, everys, overheads, recovery, strict=True)
    return {mtbf: PrintedCell(*found) for mtbf, *found in rows}  # type: ignore[arg-type]


_T3 = (2 * _HOUR, _HOUR, 1800.0, 1200.0, 600.0)


def _of_table_3(
    overheads: tuple[float, float, float, float],
    every: int,
    gemini: int | None,
    recovery: tuple[tuple[int, ...], ...],
    ettr: tuple[tuple[float, ...], ...],
) -> dict[str, dict[float, PrintedCell]]:
    """Gemini's and MoC's overheads are those of 2 hours; at other MTBFs the text has lost them."""
    at_2_hours: tuple[int | None, ...] = (gemini, None, None, None, None)
    intervals: tuple[tuple[int | None, ...], ...] = ((every,), at_2_hours, (1,), (1,))
    shown = [(o,) if n in (0, 3) else (o, None, None, None, None) for n, o in enumerate(overheads)]
    return {
        name: _column(_T3, ettr[n], recovery[n], intervals[n], shown[n]) for n, name in enumerate(SYSTEMS)
    }


TABLE_3 = (
    PrintedJob(
        *("MoE-LLaVa", 0.14 / 0.08, 96, 2.9, 2.0, 32, 4, 2, 12, 2, 6, 4, 3),
        _of_table_3(
            (0.03, 0.02, 0.14, 0.01),
            57,
            None,
            (
                (1265, 2530, 5059, 7589, 11178),
                (938, 1551, 2203, 2570, 4161),
                (10, 20, 41, 61, 98),
                (11, 24, 57, 74, 117),
            ),
            (
                (0.945, 0.914, 0.853, 0.792, 0.712),
                (0.959, 0.939, 0.897, 0.852, 0.764),
                (0.922, 0.375, 0.328, 0.231, 0.184),
                (0.981, 0.979, 0.975, 0.971, 0.964),
            ),
        ),
    ),
    PrintedJob(
        *("GPT-MoE", 0.18 / 0.09, 96, 7.3, 1.6, 12, 32, 6, 12, 2, 3, 8, 3),
        _of_table_3(
            (0.03, 0.03, 0.18, 0.03),
            78,
            None,
            (
                (1424, 2848, 4486, 8543, 13086),
                (1121, 1718, 2160, 3259, 4627),
                (13, 25, 50, 76, 132),
                (18, 28, 78, 105, 161),
            ),
            (
                (0.937, 0.903, 0.834, 0.765, 0.687),
                (0.947, 0.923, 0.868, 0.815, 0.722),
                (0.919, 0.384, 0.326, 0.220, 0.179),
                (0.979, 0.976, 0.971, 0.966, 0.959),
            ),
        ),
    ),
    PrintedJob(
        *("QWen-MoE", 0.19 / 0.09, 96, 14.3, 2.7, 24, 64, 8, 12, 2, 6, 8, 5),
        _of_table_3(
            (0.05, 0.04, 0.19, 0.04),
            113,
            None,
            (
                (1170, 2340, 4680, 7020, 10040),
                (961, 1402, 2114, 2331, 3495),
                (15, 30, 60, 90, 146),
                (17, 33, 83, 140, 207),
            ),
            (
                (0.927, 0.898, 0.841, 0.783, 0.703),
                (0.934, 0.915, 0.868, 0.819, 0.717),
                (0.927, 0.380, 0.325, 0.205, 0.162),
                (0.981, 0.977, 0.970, 0.963, 0.957),
            ),
        ),
    ),
    PrintedJob(
        *("DeepSeek-MoE", 0.22 / 0.08, 96, 16.4, 3.7, 28, 64, 8, 12, 2, 12, 8, 6),
        _of_table_3(
            (0.08, 0.07, 0.22, 0.06),
            124,
            92,  # section 5.3
            (
                (992, 1984, 3967, 5951, 9402),
                (800, 1218, 1879, 1983, 3236),
                (17, 35, 70, 104, 176),
                (22, 43, 104, 167, 241),
            ),
            (
                (0.902, 0.877, 0.827, 0.777, 0.672),
                (0.910, 0.894, 0.853, 0.814, 0.728),
                (0.933, 0.349, 0.324, 0.168, 0.134),
                (0.975, 0.970, 0.965, 0.956, 0.951),
            ),
        ),
    ),
)

_T7 = (_HOUR, 1800.0, 600.0)


def _of_table_7(
    every: int,
    gemini: tuple[tuple[int, ...], tuple[float, ...]],
    moc: tuple[float, ...],
    overhead: float,
    recovery: tuple[tuple[int, int], ...],
    ettr: tuple[tuple[float, ...], ...],
) -> dict[str, dict[float, PrintedCell]]:
    intervals = ((every,), gemini[0], (1,), (1,))
    overheads = ((None,), gemini[1], moc, (overhead,))
    lost = [(first, None, last) for first, last in recovery]
    return {
        name: _column(_T7, ettr[n], lost[n], intervals[n], overheads[n]) for n, name in enumerate(SYSTEMS)
    }


def _low_precision(
    name: str,
    iteration_s: float,
    compute: int,
    state: int,
    window: int,
    cells: Mapping[str, Mapping[float, PrintedCell]],
) -> PrintedJob:
    """DeepSeek-MoE on 128 H100s (section 5.7)."""
    return PrintedJob(
        name, iteration_s, 128, 16.4, 3.7, 28, 64, 8, state, compute, 8, 8, window=window, cells=cells
    )


# Named by the precisions of compute weights, masters, and the two moments.
TABLE_7 = (
    _low_precision(
        *("16, 16, 16+16", 1.16 / 0.39, 2, 6, 3),
        _of_table_7(
            77,
            ((71, 48, 27), (0.11, 0.16, 0.29)),
            (1.16, 2.91, 3.51),
            0.06,
            ((2036, 10648), (1854, 4324), (79, 246), (86, 268)),
            (
                (0.918, 0.876, 0.706),
                (0.925, 0.886, 0.885),
                (0.613, 0.459, 0.425),
                (0.984, 0.979, 0.973),
            ),
        ),
    ),
    _low_precision(
        *("8, 32, 32+32", 10.70 / 4.65, 1, 12, 6),
        _of_table_7(
            227,
            ((182, 94, 46), (0.09, 0.17, 0.34)),
            (3.53, 8.89, 10.70),
            0.05,
            ((5162, 28574), (3591, 5446), (48, 185), (59, 232)),
            (
                (0.853, 0.748, 0.302),
                (0.878, 0.839, 0.718),
                (0.357, 0.196, 0.115),
                (0.952, 0.946, 0.941),
            ),
        ),
    ),
    _low_precision(
        *("8, 16, 32+32", 8.73 / 4.16, 1, 10, 4),
        _of_table_7(
            205,
            ((157, 79, 43), (0.08, 0.16, 0.30)),
            (2.88, 7.25, 8.73),
            0.04,
            ((3763, 22581), (2846, 4756), (45, 151), (53, 172)),
            (
                (0.881, 0.793, 0.439),
                (0.893, 0.852, 0.738),
                (0.368, 0.226, 0.163),
                (0.966, 0.958, 0.953),
            ),
        ),
    ),
    _low_precision(
        *("8, 16, 8+16", 3.52 / 1.85, 1, 5, 3),
        _of_table_7(
            94,
            ((68, 61, 29), (0.10, 0.11, 0.22)),
            (1.16, 2.92, 3.52),
            0.04,
            ((1554, 9322), (1108, 2934), (52, 196), (57, 213)),
            (
                (0.916, 0.889, 0.739),
                (0.923, 0.894, 0.806),
                (0.557, 0.349, 0.321),
                (0.976, 0.968, 0.965),
            ),
        ),
    ),
    _low_precision(
        *("8, 8, 8+16", 2.63 / 1.55, 1, 4, 3),
        _of_table_7(
            78,
            ((59, 52, 24), (0.09, 0.18, 0.31)),
            (0.87, 2.19, 2.63),
            0.03,
            ((1153, 6921), (876, 2100), (40, 162), (44, 178)),
            (
                (0.937, 0.905, 0.752),
                (0.943, 0.907, 0.816),
                (0.584, 0.381, 0.326),
                (0.979, 0.976, 0.971),
            ),
        ),
    ),
)

CLUSTERS = ((32, 512, 16, 4), (67, 1536, 24, 8), (145, 4096, 32, 16), (671, 16384, 64, 32))
"""Figure 11: parameters in billions, GPUs, stages, pipelines; experts are shared by 8 ranks."""


def parameters_of_expert(job: PrintedJob) -> float:
    """In billions: what is left out of a token's parameters are its other experts."""
    return (job.parameters - job.active) / (job.layers * (job.experts - job.used))
