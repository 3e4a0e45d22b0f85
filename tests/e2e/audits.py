"""Trainings that wait within their last step, and audits of what they have sealed."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptd.ctl.audit.audit_run import Audited, audit_step
from ckptd.transport.messages import GetSnapshots, Snapshots
from tests.ckptd.running import eventually
from tests.e2e.harness import DaemonProcess, Jobs

__all__ = ["NEWEST", "TOTAL", "audit", "held", "newest_of", "options"]

TOTAL = 10
NEWEST = TOTAL - 2  # the last step's snapshot is still being filled


def options(run: str, window: int, *more: str, total: int = TOTAL) -> tuple[str, ...]:
    return ("--total", str(total), "--run", run, "--set", f"window={window}", *more)


def rank_environment(rank: int, world_size: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {name: str(number) for name, number in names.items()} | {"GLOO_SOCKET_IFNAME": "lo"}


def newest_of(daemon: DaemonProcess, run: str) -> list[int]:
    """The newest sealed iteration of each rank."""
    ranks = daemon.ask(GetSnapshots("e2e", run), Snapshots).ranks
    return [max((s.iteration for s in r.slots if s.state == "sealed"), default=-1) for r in ranks]


@contextlib.contextmanager
def held(
    jobs: Jobs,
    daemon: DaemonProcess,
    case: str,
    *settings: str,
    run: str,
    world_size: int = 1,
    other: DaemonProcess | None = None,
    total: int = TOTAL,
    newest: int = NEWEST,
) -> Iterator[list[Path]]:
    """A training that waits within its last step, in the block; then it goes on to its end.

    Args:
        other: the daemon of all ranks but the first.
        total: steps of the training; no snapshot finds its slots taken before the last one.
        newest: the iteration that all ranks have sealed, once it waits.
    """
    hold, store = jobs.folder / f"hold-{run}", jobs.folder / f"store-{run}"
    hold.write_text("")
    started = []
    for rank in range(world_size):
        more = () if world_size == 1 else ("--store", str(store))
        environment = {} if world_size == 1 else rank_environment(rank, world_size)
        started.append(
            jobs.start(
                case,
                *("--hold", str(hold), "--patient-until", str(total), *settings, *more),
                daemon=(daemon if other is None or not rank else other).endpoint,
                environment=environment,
            )
        )
    outs = [out for _, out in started]
    sealed = {daemon: [newest] * (world_size if other is None else 1)}
    if other is not None:
        sealed[other] = [newest] * (world_size - 1)
    try:
        try:
            eventually(
                lambda: (
                    not all(process.is_alive() for process, _ in started)
                    or all(newest_of(node, run) == expected for node, expected in sealed.items())
                ),
                "the newest snapshot is not sealed",
                timeout_s=90,
            )
            assert all(process.is_alive() for process, _ in started), "the training ended early"
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *map(jobs.log, outs)])) from error
        yield outs
        hold.unlink()
        for process, out in started:
            jobs.end(process, out)
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def audit(
    jobs: Jobs,
    daemon: DaemonProcess,
    case: str,
    *settings: str,
    run: str,
    world_size: int = 1,
    newer_than: int = -1,
    verify_iterations: int = 16,
) -> Audited:
    """Audit the newest step; the program is forked, as the jobs are."""

    def program(environment: Mapping[str, str]) -> int | None:
        own = {name: text for name, text in environment.items() if name.startswith("CKPTD_")}
        more = () if world_size == 1 else ("--store", str(jobs.folder / uuid.uuid4().hex))
        ranks = [rank_environment(rank, world_size) if world_size > 1 else {} for rank in range(world_size)]
        started = [
            jobs.start(case, *settings, *more, daemon=daemon.endpoint, environment=own | ranks[rank])
            for rank in range(world_size)
        ]
        for process, _ in started:
            process.join(90)
        codes = [process.exitcode for process, _ in started]
        if any(codes):
            print(*[jobs.log(out) for _, out in started], sep="\n")  # noqa: T201 - for a test that fails
        for process, _ in started:
            process.kill()
            process.join()
        return next((code for code in codes if code != 0), 0)

    _, found = audit_step(
        *(daemon.segment_dir, jobs.folder, "e2e", run, program),
        verify_iterations=verify_iterations,
        wait_s=90,
        newer_than=newer_than,
    )
    return found
