"""In a process that is to be hurt: compiles the points in (see `points`), counts how often each is reached, and does
there what the plan says.

``FAILPOINTS_DIR`` names a folder of the campaign: ``plan`` (one `Arm`, written by the campaign, read again when it
changes), ``fired.N`` (who has done what plan N says, or that nobody may any more; ``then.N``: the same of the
second half of a plan), ``hits`` (what was reached, and after which injected error). ``FAILPOINTS_WHO`` names the
process's node; a trainer is named by its rank. Nothing of this is in a process that does not import it.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import importlib.machinery
import itertools
import json
import marshal
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests.failpoints.points import CALL, REACH, compiled, in_scope

__all__ = [
    "CLOCK_STEPS_S",
    "ERRORS",
    "Arm",
    "Fired",
    "Runtime",
    "answers",
    "arm",
    "disarm",
    "fired",
    "forget_reached",
    "install",
    "reached",
]

ERRORS = ("EIO", "ENOSPC", "EMFILE", "ECONNRESET")  # the last one of connections
CLOCK_STEPS_S = {"ahead": 3600, "behind": -3600}
_DELAY_S = 0.3
_numbers = itertools.count(1)
_Key = tuple[str, str, str]  # kind of process, point, before or after


@dataclass(frozen=True, slots=True)
class Arm:
    """What happens where.

    Attributes:
        process: the kind of process: trainer, daemon, keeper, recompute, ctl.
        who: one of them (``r0`` is a rank, ``n0`` a node); "" is whichever comes first.
        when: ``before`` or ``after``.
        nth: counted in the life of a process, from when it has read the plan.
        often: whether it is reached again and again, and not in a start alone.
        number: of this plan in its campaign; `arm` gives it.
        action: ``kill``, ``stop``, ``delay``, ``ahead`` or ``behind`` (the wall clock that this process sees is
            stepped by an hour, for the rest of its life), or an error that the call raises instead of being
            made (before only).
        then: for an error: a point, and before or after, at which the same process is killed when it comes
            there next; points of an answer to an error are reached in no other way.
    """

    point: str
    process: str
    when: str
    nth: int
    action: str
    who: str = ""
    often: bool = True
    number: int = 0
    then: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Fired:
    """Who did it."""

    who: str
    pid: int


# -- for the campaign -------------------------------------------------------------------------------------


def arm(folder: Path, what: Arm) -> None:
    """Give all processes the plan; what was there is over."""
    disarm(folder)
    (folder / "plan.new").write_text(json.dumps(asdict(replace(what, number=next(_numbers)))))
    (folder / "plan.new").rename(folder / "plan")


def disarm(folder: Path) -> Fired | None:
    """Nothing fires from now on, not even in a process that has just come to the point; who had fired."""
    try:
        plan = json.loads((folder / "plan").read_text())
    except FileNotFoundError:
        return None
    (folder / "plan").unlink()
    _withdraw(folder, "then", plan["number"])
    return _withdraw(folder, "fired", plan["number"])


def _withdraw(folder: Path, what: str, number: int) -> Fired | None:
    """From now on nobody does this part of the plan; who has done it."""
    try:
        os.close(os.open(folder / f"{what}.{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return _fired(folder, what, number)
    return None


def fired(folder: Path, what: str = "fired") -> Fired | None:
    """Who did what the plan says, or (``then``) its second half; None if nobody has, yet, or there is none."""
    try:
        return _fired(folder, what, json.loads((folder / "plan").read_text())["number"])
    except FileNotFoundError:
        return None


def _fired(folder: Path, what: str, number: int) -> Fired:
    return Fired(**json.loads((folder / f"{what}.{number}").read_text()))


def reached(folder: Path) -> dict[_Key, int]:
    """The most often that one process has reached each point, by kind of process, point and before or after."""
    most: Counter[_Key] = Counter()
    for key, count, _ in _hits(folder):
        most[key] = max(most[key], count)
    return dict(most)


def answers(folder: Path) -> dict[_Key, str]:
    """The injected error after which each was reached (`EIO@point`), of those never reached without one."""
    found: dict[_Key, str] = {}
    for key, _, after in _hits(folder):
        found[key] = found.get(key, after) and after
    return {key: after for key, after in found.items() if after}


def _hits(folder: Path) -> Iterator[tuple[_Key, int, str]]:
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "hits").read_text().splitlines():
            words = line.split()
            # Else the last words of a process that was killed.
            if len(words) in (4, 5) and words[3].isdecimal():
                yield (words[0], words[1], words[2]), int(words[3]), "".join(words[4:])


def forget_reached(folder: Path) -> None:
    """Count from here on. The file stays: the fork server has it open."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(folder / "hits", 0)


# -- in the process ---------------------------------------------------------------------------------------


class Runtime:
    """Counts what a process reaches, and does what the plan says."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._plan_path = folder, str(folder / "plan")
        self._log = os.open(folder / "hits", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._process = _kind_of_process()
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._plan: Arm | None = None
        self._plan_is = 0, 0
        self._nth = 0
        self._then: Arm | None = None
        self._after = ""  # which injected error

    def call(self, point: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.reach(point, "before")
        result = function(*args, **kwargs)
        self.reach(point, "after")
        return result

    def reach(self, point: str, when: str) -> None:
        key = point, when
        self._counts[key] = count = self._counts[key] + 1
        if not count & (count - 1):  # 1, 2, 4, …
            os.write(self._log, f"{self._process} {point} {when} {count} {self._after}\n".encode())
        then = self._then
        if then is not None and then.then == key:
            self._then = None
            if self._is_mine(then, "then"):
                os.kill(os.getpid(), signal.SIGKILL)
        self._look()
        plan = self._plan
        if plan is not None and plan.point == point and plan.when == when:
            self._nth += 1
            if self._nth >= plan.nth:
                self._plan = None
                self.fire(plan)

    def _look(self) -> None:
        try:
            found = os.stat(self._plan_path)
        except FileNotFoundError:
            self._plan, self._plan_is = None, (0, 0)
            return
        is_now = found.st_ino, found.st_mtime_ns  # a number of a file is used again
        if is_now != self._plan_is:
            with contextlib.suppress(FileNotFoundError):
                plan = _read(Path(self._plan_path).read_text())
                mine = plan.process == self._process and plan.who in ("", _who())
                self._plan, self._plan_is, self._nth = plan if mine else None, is_now, 0

    def _is_mine(self, plan: Arm, what: str) -> bool:
        """Say that this process does it; false if another one has, or nobody may any more."""
        own = f"{self._folder}/fires.{os.getpid()}.{threading.get_native_id()}"
        Path(own).write_text(json.dumps(asdict(Fired(_who(), os.getpid()))))
        try:
            # Whole, and only one of all processes, and none after `disarm`.
            os.link(own, f"{self._folder}/{what}.{plan.number}")
        except FileExistsError:
            return False
        finally:
            os.unlink(own)
        return True

    def fire(self, plan: Arm) -> None:
        if not self._is_mine(plan, "fired"):
            return
        if plan.action == "delay":
            time.sleep(_DELAY_S)
        elif plan.action in CLOCK_STEPS_S:
            _step_clock(CLOCK_STEPS_S[plan.action])
        elif plan.action in ERRORS:
            self._after, self._then = f"{plan.action}@{plan.point}", plan if plan.then else None
            number = getattr(errno, plan.action)
            raise OSError(number, f"{os.strerror(number)} (of a failpoint)")
        else:
            os.kill(os.getpid(), signal.SIGKILL if plan.action == "kill" else signal.SIGSTOP)


def _read(text: str) -> Arm:
    values = json.loads(text)
    then = values.pop("then", None)
    return Arm(**values, then=None if then is None else (then[0], then[1]))


def _step_clock(by_s: int) -> None:
    """Of this process and those that it forks; a monotonic clock does not step."""
    wall, wall_ns = time.time, time.time_ns
    time.time = lambda: wall() + by_s
    time.time_ns = lambda: wall_ns() + by_s * 1_000_000_000


def _kind_of_process() -> str:
    words = sys.orig_argv
    for module, kind in (
        ("ckptd.persistence.keeper", "keeper"),
        ("ckptd.recompute.recompute_worker", "recompute"),
        ("ckptd.ctl", "ctl"),
    ):
        if module in words:
            return kind
    return "daemon" if words[1:4] == ["-m", "ckptd", "run"] else "trainer"


def _who() -> str:
    return os.environ.get("FAILPOINTS_WHO") or f"r{os.environ.get('RANK', '0')}"


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles points in, and keeps the outcome for the campaign's other processes."""

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname))
        kept = Path(os.environ["FAILPOINTS_DIR"]) / "code" / fullname
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            new = kept.with_name(f"{fullname}.{os.getpid()}")
            new.write_bytes(marshal.dumps(compiled(path.read_text(encoding="utf-8"), fullname, str(path))))
            new.rename(kept)
        code: CodeType = marshal.loads(kept.read_bytes())
        return code


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is None or not in_scope(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def install() -> None:
    """From now on modules are imported with their points."""
    runtime = Runtime(Path(os.environ["FAILPOINTS_DIR"]))
    setattr(builtins, CALL, runtime.call)
    setattr(builtins, REACH, runtime.reach)
    sys.meta_path.insert(0, _Finder())
