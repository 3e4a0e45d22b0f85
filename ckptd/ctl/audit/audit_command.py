"""`ckptctl audit`: audit one step now, or one every so often."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptd.ctl.audit.audit_run import Audited, audit_step, cost_text, differences_text, run_program
from ckptd.ctl.command import (
    EXIT_FAILED,
    TIME,
    CommandError,
    CommandOutcome,
    Commands,
    add_verify_iterations,
    connected,
    count_from,
    show,
)
from ckptd.ctl.peers_command import choose_run
from ckptd.errors import DaemonUnavailable
from ckptd.printable import for_terminal
from ckptd.transport import messages as m
from ckptd.transport.wire import RefusedError, RequestTimeout, WireError

_TIMEOUT_S = 600.0  # for the program, each time that it runs
_STEP_S = 30.0  # for the snapshots of a step
_TEXT_LIMIT = 4000
_NO_ANSWER = (DaemonUnavailable, RefusedError, RequestTimeout, WireError)
_COPIES = "/dev/shm"


def add_audit_command(commands: Commands) -> None:
    """Add `audit`."""
    text = "run one step of the training program from a copy of a snapshot, and compare it bit for bit"
    parser = commands.add("audit", _audit, text, timeout_s=_TIMEOUT_S)
    parser.add_argument("--job", help="only this job")
    parser.add_argument("--run", help="only this run")
    add_verify_iterations(parser)
    parser.add_argument("--every", **TIME, help="audit a step every TIME, such as 10m")
    parser.add_argument("--times", type=count_from(1), metavar="N", help="with --every: end after N audits")
    parser.add_argument(
        "--copies", default=_COPIES, metavar="FOLDER", help=f"folder for the copies (default: {_COPIES})"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what trains")


def _audit(args: argparse.Namespace) -> CommandOutcome:
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        raise CommandError("pass the program that trains: ckptctl audit -- torchrun ... train.py ...")
    if args.times is not None and (args.every is None or args.times < 1):
        raise CommandError("--times N is for --every, and N is at least 1")
    if args.every is None:
        return _outcome(_audit_step(args, program, -1))
    newest, failed = -1, False
    for number in itertools.count(1):
        try:
            audited = _audit_step(args, program, newest)
            newest, outcome = audited.end, _outcome(audited)
        except (CommandError, *_NO_ANSWER) as error:  # the next one may succeed
            outcome = CommandOutcome({"error": str(error)}, f"no step was audited: {error}", EXIT_FAILED)
        failed = failed or outcome.code != 0
        if number == args.times:
            return replace(outcome, code=EXIT_FAILED if failed else 0)
        show(args, outcome)
        sys.stdout.flush()
        time.sleep(args.every)
    raise AssertionError("unreachable")


def _audit_step(args: argparse.Namespace, program: Sequence[str], newest: int) -> Audited:
    """Audit a step that ends after iteration ``newest``, and tell the daemon of the run."""
    with connected(args) as client:
        job, run = choose_run(client, args)
        segments = Path(client.ask(m.GetStatus(), m.Status).segment_dir)
    step, audited = audit_step(
        segments,
        Path(args.copies),
        job,
        run,
        partial(run_program, program, args.timeout),
        verify_iterations=args.verify_iterations,
        wait_s=min(_STEP_S, args.timeout),
        newer_than=newest,
    )
    told = m.TellAudit(
        job,
        run,
        step.start,
        step.end,
        step.epoch,
        audited.passed,
        audited.certain,
        audited.verdict[:_TEXT_LIMIT],
        tuple(m.AuditedSnapshot(rank, digest) for rank, digest in sorted(step.digests.items())),
        tuple(sorted(audited.differences)),
    )
    try:
        with connected(args) as client:
            client.ask(told, m.Done)
    except _NO_ANSWER as error:
        text = f"the daemon was not told of this audit: {error}"
        print(f"ckptctl: {for_terminal(text)}", file=sys.stderr, flush=True)
    return audited


def _outcome(audited: Audited) -> CommandOutcome:
    lines = [f"{'passed' if audited.passed else 'FAILED'}: {audited.verdict}"]
    lines += [text for text in (differences_text(audited), cost_text(audited)) if text]
    return CommandOutcome(audited, "\n".join(lines), 0 if audited.passed else EXIT_FAILED)
