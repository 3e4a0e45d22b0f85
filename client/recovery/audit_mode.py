"""A process that audits a step: `ckptctl audit` has started the user's program for it.

The environment names the audit's folder: copies of sealed snapshots, which a daemon of its own serves. The
program attaches to that daemon, whatever it says about daemons, and resumes as after a failure: it loads the
snapshot of iteration t, and its own loop runs the step to t + 1 (with sparse snapshots, a window of steps).
At the top of the next step everything is compared with the snapshot of that iteration. Then this process
leaves an `AuditReport` in the folder, and ends at once: nothing is captured, and no code of the program runs
any more, which would think that its training is over.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Never

import msgspec
import torch
import xxhash

from ckptd.client import values
from ckptd.client.capture.comparison import Differences
from ckptd.client.identity import Identity
from ckptd.client.log_lines import get_logger
from ckptd.client.options import (
    DaemonOptions,
    OptionGroups,
    RecoveryOptions,
    daemon_options,
    run_options,
)
from ckptd.client.recovery.replay import Replay
from ckptd.config.daemon_config import endpoint_for
from ckptd.config.runtime_dir import AUDIT_VARIABLE, AUDITED_RUN_VARIABLE, audit_runtime_dir
from ckptd.core.slots.segment_format import SegmentDescriptor
from ckptd.private_files import replace_private_file
from ckptd.transport.messages import AuditDifference, AuditReport

logger = get_logger(__name__)

_MOST_REPORTED = 1 << 10
_TEXT_LIMIT = 1000
_OTHERS_S = 60.0
_POLL_S = 0.02


class AuditAsked(NamedTuple):
    """The audit for which this process was started: its folder, and the run that it is about."""

    folder: Path
    job: str
    run: str


def audit_of_environment(environ: Mapping[str, str] = os.environ) -> AuditAsked | None:
    """The audit for which this process was started; None: it trains."""
    text = environ.get(AUDIT_VARIABLE, "")
    job, _, run = environ.get(AUDITED_RUN_VARIABLE, "").partition("~")
    return AuditAsked(Path(text), job, run) if text else None


def under_audit(given: OptionGroups, audit: AuditAsked) -> OptionGroups:
    """The options of a program, as an audit needs them.

    The names of job and run may depend on the environment (a folder, a launcher's id, another user's daemon),
    which an audit does not share with the trainer. So they are given.

    Raises:
        ValueError: the program has no daemon, so that it has no snapshots either.
    """
    if daemon_options(given.get("daemon", "auto")).off:
        raise ValueError(
            "this process was started by `ckptctl audit`, and daemon=None turns ckptd off: there is no step "
            "to audit"
        )
    recovery = replace(
        given.get("recovery", RecoveryOptions()),
        resume_at=None,
        on_mismatch="warn",
        verify_iterations=sys.maxsize,  # the folder has no older snapshots than the audit wants
        rehearse=False,
        start_from=None,
        park=False,
        in_process=None,
    )
    daemon = DaemonOptions(endpoint=endpoint_for(audit_runtime_dir(str(audit.folder))))
    run = replace(run_options(given.get("run")), job=audit.job, name=audit.run)
    return {**given, "run": run, "daemon": daemon, "recovery": recovery}


class StepAudit:
    """Follows the replay of an audit on one rank, in place of a `Verification`.

    Args:
        folder: of the audit.
        start: the iteration of the oldest snapshot.
        changed: how this machine differs from the one that recorded, in what can change bits; "" if not.
    """

    def __init__(self, folder: Path, identity: Identity, start: int, changed: str) -> None:
        self._folder, self._rank, self._world_size = folder, identity.rank, identity.world_size
        self._start, self._changed = start, changed
        self._found: list[AuditDifference] = []
        self._result = xxhash.xxh3_128()
        self._began_s = time.perf_counter()

    def advance(self, replay: Replay, sent: Differences) -> None:
        """The top of a replayed step; at the last one this process ends.

        Args:
            sent: what the step sent to other stages otherwise than when it ran first.
        """
        iteration = replay.next_iteration
        found = replay.advance()
        found.extend(sent)
        if found:
            self._result.update(f"{iteration} {found.got}".encode())
        self._found += [_difference(iteration, what, found) for what in found.texts]
        if replay.dense:
            self._end(iteration, replay.compared)

    def reproduced(self) -> None:
        """Not called: the process has ended."""

    def _end(self, iteration: int, compared: int) -> Never:
        """Report, and end this process once the other ranks have reported: they may need what it serves."""
        largest = sorted(self._found, key=lambda d: (d.iteration, -d.ratio))[:_MOST_REPORTED]
        report = AuditReport(
            self._rank,
            self._world_size,
            self._start,
            iteration,
            compared,
            time.perf_counter() - self._began_s,
            self._changed[:_TEXT_LIMIT],
            self._result.hexdigest() if self._found else "",
            len(self._found),
            tuple(largest),
        )
        path = self._folder / f"rank-{self._rank}.report"
        replace_private_file(path, msgspec.msgpack.encode(report), synced=False)
        give_up = time.monotonic() + _OTHERS_S
        while len(list(self._folder.glob("rank-*.report"))) < self._world_size and time.monotonic() < give_up:
            time.sleep(_POLL_S)
        logger.info("audited iterations %d to %d: %d differences", self._start, iteration, len(self._found))
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not SystemExit: what a program does at its end (a last checkpoint, an upload) is not for an audit.
        os._exit(0)


def compute_as_recorded(descriptor: SegmentDescriptor) -> None:
    """Compute with as many threads as the run did: with others, sums are added up in another order."""
    recorded = values.unpack(descriptor.client)["threads"]
    if recorded != torch.get_num_threads():
        torch.set_num_threads(recorded)


def _difference(iteration: int, what: str, found: Differences) -> AuditDifference:
    tensor = found.tensors.get(what)
    text = what[:_TEXT_LIMIT]
    if tensor is None:
        return AuditDifference(iteration, text, ratio=sys.float_info.max)
    return AuditDifference(
        iteration,
        text,
        tensor.param[:256],
        tensor.elements,
        tensor.differing,
        tensor.bits,
        tensor.ratio,
    )
