"""`ckptctl top`: the view as lines of text, and a terminal that shows them anew once a second."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ckptd.dash.dash_view import TIERS, DashView, RankView, RunSummary, TierGrade, TierView
from ckptd.printable import one_line
from ckptd.transport.messages import EventInfo
from ckptd.units import format_age, format_bytes, format_table

_EVERY_S = 1.0
_RANKS = 16
_EVENTS = 12
_BARS = "▁▂▃▄▅▆▇█"
_SPARK = 40
_WORDS = {
    TierGrade.NONE: "NOT PROTECTED",
    TierGrade.FAR: "WARNING",
    TierGrade.BEHIND: "behind",
    TierGrade.CURRENT: "OK",
    TierGrade.UNKNOWN: "unknown",
    TierGrade.OFF: "off",
}
_LEGEND = "+ current  ~ behind  ! far behind  x none  ? not known here  . not configured"
_SLOT_LEGEND = "slots: S sealed, and needed to resume  s sealed  f filled  > filling  Q quarantined  . free"
_SLOTS = {"free": ".", "filling": ">", "filled": "f", "sealed": "s", "quarantined": "Q"}


class ScreenLine(NamedTuple):
    """A line, and what it means for the operator; None: nothing in particular."""

    text: str
    grade: TierGrade | None = None


# -- lines ----------------------------------------------------------------------------------------


def screen_text(view: DashView) -> str:
    """All lines, without colours."""
    return "\n".join(line.text for line in screen_lines(view))


def screen_lines(view: DashView) -> list[ScreenLine]:
    """What matters first: whether every rank is protected, and how old the newest copies are."""
    used = f"{view.used_bytes / view.quota_bytes:.0%}" if view.quota_bytes else "-"
    head = (
        f"ckptd {view.version} on {view.node}, up {format_age(view.uptime_s)}; memory "
        f"{format_bytes(view.used_bytes)} of {format_bytes(view.quota_bytes)} ({used}); "
        f"{view.sealing} to seal; {_clock(view.at_s)}"
    )
    lines = [ScreenLine(head)]
    if view.error:
        lines.append(ScreenLine(f"THE DAEMON DOES NOT ANSWER; this is old: {view.error}", TierGrade.NONE))
    if not view.runs:
        lines += [ScreenLine(""), ScreenLine("no run is known on this node")]
    for run in view.runs:
        lines += [ScreenLine(""), *_run_lines(run)]
    lost = [peer for peer in view.peers if not peer.alive]
    if view.peers:
        names = ", ".join(f"{peer.node} silent for {format_age(peer.silent_s)}" for peer in lost[:4])
        text = f"peers     {len(view.peers) - len(lost)} of {len(view.peers)} answer; {names}".rstrip("; ")
        lines += [ScreenLine(""), ScreenLine(text, TierGrade.FAR if lost else None)]
    lines += [ScreenLine(""), ScreenLine(_LEGEND), ScreenLine(_SLOT_LEGEND), ScreenLine("")]
    return lines + [_event_line(event) for event in reversed(view.events[-_EVENTS:])]


def _run_lines(run: RunSummary) -> Iterator[ScreenLine]:
    pace = f", {run.step_s:.3g} s each" if run.step_s else ""
    live = "" if run.live else "; no trainer is attached"
    known = len(run.columns.ranks)
    ranks = f"{known} of {run.world_size or known} ranks known here"
    yield ScreenLine(f"{run.job}/{run.run}: {ranks}, iteration {run.step}{pace}{live}")
    yield ScreenLine(f"{_WORDS[run.grade]}: {run.verdict}", run.grade)
    for tier, what in zip(run.tiers, TIERS, strict=True):
        yield ScreenLine(f"  if {what:<19} {_tier(tier, run.live)}", tier.grade)
    if run.stalls:
        shown = run.stalls[-_SPARK:]
        worst = max(ms for _, ms, _ in shown)
        bars = "".join(_BARS[min(7, int(8 * ms / worst))] if worst else _BARS[0] for _, ms, _ in shown)
        yield ScreenLine(
            f"  stall  {bars} {shown[-1][1]:.3g} ms now, {worst:.3g} at most ({shown[-1][2]:.2%} of the time)"
        )
    if run.recoveries:
        last = run.recoveries[-1]
        longest = sorted(last.phases, key=lambda part: -part[1])[:4]
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in longest)
        whole = sum(seconds for _, seconds in last.phases)
        yield ScreenLine(
            f"  last recovery {_clock(last.at_s)}, rank {last.rank}: {whole:.2f} s, of which {parts}"
        )
    if run.placement is not None:
        place = run.placement
        text = f"  experts: {place.below} on fewer than {place.threshold} of {place.nodes} nodes"
        yield ScreenLine(text, TierGrade.FAR if place.below else None)
    yield from map(ScreenLine, _rank_table(run.details[:_RANKS]).splitlines())
    if known > _RANKS:
        yield ScreenLine(f"  and {known - _RANKS} more ranks, none of them worse")


def _tier(tier: TierView, live: bool) -> str:
    if tier.iteration < 0:
        return f"{tier.grade} {tier.note or _WORDS[tier.grade]}"
    age = f", about {format_age(tier.age_s)}" if tier.age_s >= 0 and live else ""
    note = f" ({tier.note})" if tier.note else ""
    return f"{tier.grade} resumes at iteration {tier.iteration}: {tier.lag} behind{age}{note}"


def _rank_table(ranks: Sequence[RankView]) -> str:
    header = ("  rank", "step", "in memory (behind)", "on peers", "in storage", "slots", "replicas")
    return format_table(header, [_rank_row(rank) for rank in ranks])


def _rank_row(rank: RankView) -> tuple[object, ...]:
    cells = [
        f"{tier.grade} {tier.iteration} ({tier.lag})" if tier.iteration >= 0 else str(tier.grade)
        for tier in rank.tiers
    ]
    slots = "".join("S" if slot.in_suffix else _SLOTS.get(slot.state, "?") for slot in rank.slots)
    elsewhere = "-" if rank.slots else f"rank of {rank.node or 'another node'}"
    where = ", ".join(rank.targets) or elsewhere
    return f"  {rank.rank:>4}", rank.step, *cells, slots or "-", where


def _event_line(event: EventInfo) -> ScreenLine:
    grade = {"warning": TierGrade.FAR, "error": TierGrade.NONE}.get(event.level)
    return ScreenLine(
        f"{_clock(event.time_ns / 1e9)}  {event.level:<7}  {event.kind:<18} {event.message}", grade
    )


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


# -- the terminal ---------------------------------------------------------------------------------

_COLOURS = {
    TierGrade.NONE: "\x1b[1;97;41m",
    TierGrade.FAR: "\x1b[1;33m",
    TierGrade.BEHIND: "\x1b[33m",
    TierGrade.CURRENT: "\x1b[32m",
}


def watch(view: Callable[[], DashView]) -> DashView:
    """Show the view on this process's terminal until q is pressed; returns the last one."""
    with _full_screen():
        while True:
            shown = view()
            size = os.get_terminal_size(sys.stdout.fileno())  # not COLUMNS, which no resize changes
            sys.stdout.write(_frame(screen_lines(shown), *size))
            sys.stdout.flush()
            if _key_within(_EVERY_S) in ("q", "Q", "\x04"):
                return shown


def _frame(lines: Sequence[ScreenLine], width: int, height: int) -> str:
    """One screen; what does not fit is left out. Each line clears its rest, so that nothing flickers."""
    colours = {} if os.environ.get("NO_COLOR") else _COLOURS
    rows = []
    for text, grade in (*lines[: height - 1], ScreenLine("q: quit")):
        colour = colours.get(grade, "") if grade else ""
        rows.append(f"{colour}{one_line(text)[:width]}\x1b[0m\x1b[K")
    return "\x1b[H" + "\n".join(rows) + "\x1b[J"


def _key_within(seconds: float) -> str:
    """The key that is pressed within this time, or ""; the end of the input counts as Ctrl-D."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return (os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") or "\x04") if ready else ""


@contextmanager
def _full_screen() -> Iterator[None]:
    """The other screen of the terminal, without echo and cursor; all as before afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
