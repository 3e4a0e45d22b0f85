"""Runs the user's program on copies of snapshots, and concludes from the reports of its ranks.

The copies are served by a daemon of the audit's own, which knows no peers and no store, so that the program
can harm nothing of the run: whatever it captures or frees are copies. The folder goes when the audit is over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ckptd.config.daemon_config import endpoint_for
from ckptd.config.runtime_dir import AUDIT_VARIABLE, AUDITED_RUN_VARIABLE, audit_runtime_dir
from ckptd.core.export_plan import named_ranks
from ckptd.ctl.audit.step_copies import CopiedStep, copy_step
from ckptd.ctl.command import EXIT_FAILED, CommandError
from ckptd.launch import answers
from ckptd.transport.messages import AuditDifference, AuditReport
from ckptd.units import count_of, format_bytes
from ckptd.unpacking import unpack

_PREFIX = "ckptd-audit-"
_COPIES = "-copies"
_SHORT = "/tmp"  # a socket's path has at most 107 bytes
_LOCK = "lock"  # held while the audit runs
_LINK = "copies"  # leads to their folder
_START_S = 180.0  # on a busy machine
_STOP_S = 20.0
_IDLE_EXIT_S = 120  # of a daemon whose `ckptctl` was killed
_NICE = 19  # training goes first
_POLL_S = 0.05
_SHOWN = 8
_MOST_BYTES = 16 << 20

# Runs the user's program in this environment; returns its exit status, None if it took too long.
Program = Callable[[Mapping[str, str]], int | None]

_decoder = msgspec.msgpack.Decoder(AuditReport)


@dataclass(frozen=True, slots=True)
class Audited:
    """The outcome of an audit.

    Attributes:
        passed: every compared value has the bits of the snapshot.
        certain: whether that, or the opposite, was shown; false if the machine or the step may be the cause.
        verdict: in words.
        replay_s: seconds that the replayed steps took, on the slowest rank.
        took_s: seconds that the whole audit took.
        differences: by rank, the largest ones.
    """

    job: str
    run: str
    start: int
    end: int
    passed: bool
    certain: bool
    verdict: str
    compared: int
    copied_bytes: int
    copy_s: float
    replay_s: float
    took_s: float
    differences: Mapping[int, Sequence[AuditDifference]]


def audit_step(
    segments: Path,
    copies: Path,
    job: str,
    run: str,
    program: Program,
    *,
    verify_iterations: int,
    wait_s: float,
    newer_than: int = -1,
) -> tuple[CopiedStep, Audited]:
    """Audit the newest step of a run; if it differs, the program runs twice.

    Args:
        segments: the folder of a daemon's segments.
        copies: the folder in which that of the audit is made.
        verify_iterations, wait_s, newer_than: as for `copy_step`.
    Raises:
        CommandError: nothing could be audited.
    """
    began_s = time.monotonic()
    with AuditFolder.made(copies) as folder:
        step = copy_step(
            segments,
            folder.copies,
            job,
            run,
            verify_iterations=verify_iterations,
            wait_s=wait_s,
            newer_than=newer_than,
        )
        with folder.daemon(step):
            reports = folder.run(program, step)
            differs = any(report.num_differences for report in reports)
            again = folder.run(program, step) if differs else []
    return step, conclude(step, reports, again, time.monotonic() - began_s)


class AuditFolder:
    """The folders of one audit: that of the daemon's socket and of the reports, and that of the copies.

    Args:
        path: has a short name, for the socket.
        copies: like ``path`` it exists until the end of the block that made it.
    """

    def __init__(self, path: Path, copies: Path) -> None:
        self._path, self.copies = path, copies
        self._runtime = Path(audit_runtime_dir(str(path)))

    @classmethod
    @contextlib.contextmanager
    def made(cls, parent: Path) -> Iterator[AuditFolder]:
        """New ones; those of audits that were killed are removed.

        Args:
            parent: of the folder of the copies.
        Raises:
            CommandError: they cannot be made.
        """
        with contextlib.ExitStack() as undo:
            try:
                _remove_abandoned()
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_SHORT))
                undo.callback(shutil.rmtree, path, ignore_errors=True)
                copies = parent.resolve() / f"{path.name}{_COPIES}"
                (path / _LINK).symlink_to(copies)
                lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                copies.mkdir(mode=0o700)
                undo.callback(shutil.rmtree, copies, ignore_errors=True)
                Path(audit_runtime_dir(str(path))).mkdir(mode=0o700)
            except OSError as error:
                raise CommandError(
                    f"the audit has no folder: {error} (--copies names another one)"
                ) from error
            yield cls(path, copies)

    @contextlib.contextmanager
    def daemon(self, step: CopiedStep) -> Iterator[None]:
        """A daemon that serves the copies, in the block.

        Raises:
            CommandError: it does not start, with its log.
        """
        settings = {
            "runtime_dir": str(self._runtime),
            "segment_dir": str(self.copies),
            "allow_disk_segments": "true",
            "memory": f"{2 * step.file_bytes + (64 << 20)}",
            "idle_exit_s": str(_IDLE_EXIT_S),
            "mlock": "off",
            "scrub_interval_s": "0",
        }
        environment = self._environment(step) | {
            f"CKPTD_{key.upper()}": text for key, text in settings.items()
        }
        command = [sys.executable, "-m", "ckptd", "run"]
        endpoint, log = endpoint_for(str(self._runtime)), self._path / "daemon.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        try:
            give_up = time.monotonic() + _START_S
            while not answers(endpoint):
                if process.poll() is not None or time.monotonic() > give_up:
                    text = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                    raise CommandError(f"the daemon of the audit did not start:\n{text}", EXIT_FAILED)
                time.sleep(_POLL_S)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, program: Program, step: CopiedStep) -> list[AuditReport]:
        """Run the program, and return what its ranks reported, by rank.

        Raises:
            CommandError: it did not come to the end of the step.
        """
        for report in self._path.glob("rank-*.report"):
            report.unlink()
        code = program(self._environment(step))
        reports = [
            unpack(_decoder, path.read_bytes(), max_bytes=_MOST_BYTES)
            for path in self._path.glob("rank-*.report")
        ]
        if len(reports) == step.world_size:
            return sorted(reports, key=lambda report: report.rank)
        how = "took too long (--timeout) and was ended" if code is None else f"ended with status {code}"
        raise CommandError(
            f"the program {how}, and {len(reports)} of {count_of(step.world_size, 'rank')} came to the end "
            f"of the step from iteration {step.start} to {step.end}; its messages are above. It must be the "
            f"program that trains {step.job}/{step.run}, with the same arguments",
            EXIT_FAILED,
        )

    def _environment(self, step: CopiedStep) -> dict[str, str]:
        """That of this process, without the node's settings of ckptd: the run's daemon is not for audits."""
        found = {name: text for name, text in os.environ.items() if not name.startswith("CKPTD_")}
        return found | {
            "CKPTD_CONFIG": os.devnull,
            "CKPTD_RUNTIME_DIR": str(self._runtime),
            AUDIT_VARIABLE: str(self._path),
            AUDITED_RUN_VARIABLE: f"{step.job}~{step.run}",
        }


def _remove_abandoned() -> None:
    for path in Path(_SHORT).glob(f"{_PREFIX}*"):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it is being made, or removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            copies = (path / _LINK).readlink()
            if copies.name == f"{path.name}{_COPIES}":
                shutil.rmtree(copies, ignore_errors=True)
            shutil.rmtree(path, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):
            continue  # it is in use, or another audit is removing it
        finally:
            os.close(lock)


def run_program(command: Sequence[str], timeout_s: float, environment: Mapping[str, str]) -> int | None:
    """Run a program in this environment; what it prints goes to stderr.

    Returns:
        Its exit status; None: it took too long, and was ended with its process group.
    Raises:
        CommandError: it cannot be started.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, env=environment, start_new_session=True
        )
    except OSError as error:
        raise CommandError(f"{command[0]} cannot be started: {error}") from error
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# -- the conclusion --------------------------------------------------------------------------------


def conclude(
    step: CopiedStep, reports: Sequence[AuditReport], again: Sequence[AuditReport], took_s: float
) -> Audited:
    """What the replay of a step shows.

    Args:
        reports: of all ranks.
        again: of a second replay; empty if the first one has found nothing.
    """
    different = [report for report in reports if report.num_differences]
    compared = sum(report.compared for report in reports)
    replay_s = max(report.replay_s for report in reports)
    changed = next((report.changed for report in reports if report.changed), "")
    repeated = [report.result for report in reports] == [report.result for report in again]
    which = f"{step.job}/{step.run}: the step from iteration {step.start} to {step.end}"
    if not different:
        verdict = (
            f"{which} came to the bits that were recorded: {count_of(compared, 'tensor')} of "
            f"{count_of(len(reports), 'rank')}, and random state, options and the user's state"
        )
    else:
        verdict = (
            f"{which} did not come to what was recorded. {_cause(different, changed, repeated=repeated)}"
        )
    return Audited(
        step.job,
        step.run,
        step.start,
        step.end,
        not different,
        not different or (repeated and not changed),
        verdict,
        compared,
        step.copied_bytes,
        step.copy_s,
        replay_s,
        took_s,
        {report.rank: report.differences for report in different},
    )


def _cause(different: Sequence[AuditReport], changed: str, *, repeated: bool) -> str:
    ranks = named_ranks([report.rank for report in different])
    if changed:
        return (
            f"But this machine does not compute as the one that trains: {changed}. Audit on one that does: "
            "this says nothing about the trainer"
        )
    if not repeated:
        return (
            "But a second replay came to other values than the first: the step is not deterministic, or this "
            "machine computes wrong. This says nothing about the trainer"
        )
    head = "A second replay came to the same values as the first: the trainer's are wrong"
    found = [d for report in different for d in report.differences]
    names = dict.fromkeys(d.param for d in found)
    if len(names) == 1 and "" not in names and len(found) == sum(r.num_differences for r in different):
        return (
            f"{head}. Only {next(iter(names))} differs ({ranks}): a bit has flipped in its weight, its "
            "gradient or its optimizer state, or in their copy, or its update was computed wrong"
        )
    if any(d.what.startswith("batch") for d in found):
        return f"{head}, or its batches were others ({ranks})"
    return (
        f"{head}. Many values differ ({ranks}), so the wrong one was there before the gradients: a weight, "
        f"an activation or an expert's output. The largest difference is in {found[0].what}"
    )


def differences_text(audited: Audited) -> str:
    """The differences for a terminal, the largest first."""
    lines = []
    for rank, differences in audited.differences.items():
        for found in differences[:_SHOWN]:
            bits = ""
            if found.elements:
                bits = (
                    f": {count_of(found.bits, 'bit')} in {found.differing} of "
                    f"{count_of(found.elements, 'element')}, by up to {found.ratio:.2g} of the largest value"
                )
            lines.append(f"  rank {rank}, iteration {found.iteration}: {found.what}{bits}")
        if len(differences) > _SHOWN:
            lines.append(f"  rank {rank}: and {len(differences) - _SHOWN} more (--json has all)")
    return "\n".join(lines)


def cost_text(audited: Audited) -> str:
    """What the audit took."""
    return (
        f"{audited.took_s:.1f} s, of which {audited.replay_s:.3f} s for the step; "
        f"{format_bytes(audited.copied_bytes)} copied in {audited.copy_s * 1e3:.1f} ms"
    )
