"""`ckptctl`: inspect a node's daemon, its snapshots, and the checkpoints in object storage.

Exit codes: 0 success; 1 a check failed (`doctor`, `whatif`, `drill`, `verify`, `elastic`), `park`
did not park every rank, or a bug; 2 wrong usage, or a store that cannot be used; 3 no daemon
answers; 4 the request was refused or its object was not found; 5 a snapshot is damaged. With
`--json` the answer is one JSON document on stdout (`events --follow`: one per line). An error is a
document too: ``{"error": …, "exit_status": …}``. Error messages go to stderr in either case.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import ckptd
from ckptd.config.daemon_config import ConfigError, LoadedConfig, default_endpoint, load_config
from ckptd.core.export.export_errors import DamagedSnapshot, ExportError
from ckptd.core.recovery.global_plan import VERIFY_ITERATIONS
from ckptd.ctl import render
from ckptd.ctl.doctor import Grade, as_rows, diagnose
from ckptd.ctl.elastic.elastic_arguments import add_elastic_commands
from ckptd.ctl.export_command import (
    add_export_arguments,
    add_import_arguments,
    run_export,
    run_import,
)
from ckptd.ctl.keys_command import add_keys_commands, run_keys
from ckptd.ctl.peers_command import (
    as_json,
    ask_what_if,
    ask_whereabouts,
    choose_run,
    render_drill,
    render_peers,
    render_what_if,
    run_drill,
)
from ckptd.ctl.store.checkpoints import (
    CommandOutcome,
    add_checkpoints_commands,
    add_verify_arguments,
    run_checkpoints,
    run_verify,
)
from ckptd.ctl.store.store_access import StoreProblem
from ckptd.errors import DaemonUnavailable, ElasticError, RemoteProtocolError
from ckptd.launch import answers, connect
from ckptd.printable import for_json, for_terminal
from ckptd.saved import saved_iterations
from ckptd.storage.checkpoints.signing import SigningError
from ckptd.transport import messages as m
from ckptd.transport.access.keys import KeysError
from ckptd.transport.wire import ControlClient, RefusedError, RequestTimeout, WireError

__all__ = ["main"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_REFUSED = 4
EXIT_DAMAGED = 5

_BEYOND = 1 << 61  # above any event number: returns only the newest one
_FOLLOW_S = 0.5
_WAIT_STEP_S = 0.2
_CONNECT_S = 10.0  # requests that take longer set their own limit


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ckptctl`; returns the exit code."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.function
    try:
        return command(args)
    except (RequestTimeout, DaemonUnavailable) as error:
        hint = "is it running? `ckptctl doctor` looks for causes"
        return _fail(args, EXIT_NO_DAEMON, f"{error} ({hint})")
    except RefusedError as error:
        return _fail(args, EXIT_REFUSED, str(error))
    except WireError as error:
        return _fail(args, EXIT_NO_DAEMON, str(error))
    except DamagedSnapshot as error:
        return _fail(args, EXIT_DAMAGED, str(error))
    except ExportError as error:
        return _fail(args, EXIT_REFUSED, str(error))
    except (ConfigError, KeysError, SigningError) as error:
        return _fail(args, EXIT_USAGE, str(error))
    except StoreProblem as error:
        return _fail(args, error.code, str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0  # the reader, such as `head`, has seen enough


def _status(args: argparse.Namespace) -> int:
    with _connect(args) as client:
        status = client.ask(m.GetStatus(), m.Status)
    _show(args, status, lambda: render.status(status))
    return 0


def _snapshots(args: argparse.Namespace) -> int:
    wanted = m.GetSnapshots(args.job or "", args.run or "", _rank(args), args.operators)
    with _connect(args) as client:
        found = client.ask(wanted, m.Snapshots)
    _show(
        args,
        found,
        lambda: render.snapshots(found, operators=args.operators, verify_iterations=args.verify_iterations),
    )
    return 0


def _iterations(args: argparse.Namespace) -> int:
    with _connect(args) as client:
        job, run = args.job, args.run
        if job is None or run is None:
            job, run = choose_run(client, args)
    found = saved_iterations(job, run, daemon=_endpoint(args), verify_iterations=args.verify_iterations)
    _show(args, found, lambda: render.iterations(job, run, found))
    return 0 if found else EXIT_FAILED


def _events(args: argparse.Namespace) -> int:
    with _connect(args) as client:
        newest = client.ask(m.GetEvents(since=_BEYOND, limit=1), m.Events).last_seq
        since = max(args.since, newest - args.limit)
        page = client.ask(m.GetEvents(since=since, limit=args.limit), m.Events)
        if not args.follow:
            _show(args, page, lambda: render.events(page.events))
            return 0
        while True:
            for event in page.events:
                _show(args, event, partial(render.events, (event,)))
                since = event.seq
            sys.stdout.flush()
            if not page.events:
                since = min(since, page.last_seq)  # a restarted daemon counts anew
                time.sleep(_FOLLOW_S)
            page = client.ask(m.GetEvents(since=since, limit=args.limit), m.Events)


def _park(args: argparse.Namespace) -> int:
    wanted = m.Park(args.job or "", args.run or "", args.timeout)
    with _connect(args) as client:
        found = client.ask(wanted, m.Parks, timeout_s=args.timeout + _CONNECT_S)
    _show(args, found, lambda: render.parks(found))
    everybody = found.ranks and all(rank.iteration >= 0 for rank in found.ranks)
    return 0 if everybody else EXIT_FAILED


def _doctor(args: argparse.Namespace) -> int:
    findings = diagnose(_settings(args), os.environ)
    _show(args, as_rows(findings), lambda: render.findings(findings))
    return EXIT_FAILED if any(finding.grade is Grade.FAIL for finding in findings) else 0


def _forget(args: argparse.Namespace) -> int:
    if not args.yes:
        question = f"Free all snapshots of {args.job}/{args.run}? They cannot be recovered. [y/N] "
        if not sys.stdin.isatty():
            return _fail(
                args,
                EXIT_USAGE,
                "stdin is not a terminal: pass --yes to free snapshots without confirmation",
            )
        if input(question).strip().lower() not in ("y", "yes"):
            return _fail(args, EXIT_USAGE, "nothing was freed")
    with _connect(args) as client:
        done = client.ask(m.Forget(args.job, args.run), m.Done)
    _show(args, done, lambda: done.message)
    return 0


def _unquarantine(args: argparse.Namespace) -> int:
    with _connect(args) as client:
        done = client.ask(m.Unquarantine(args.job, args.run), m.Done)
    _show(args, done, lambda: done.message)
    return 0


def _admit(args: argparse.Namespace) -> int:
    with _connect(args) as client:
        done = client.ask(m.AdmitNodes(args.job, args.run, tuple(args.nodes)), m.Done)
    _show(args, done, lambda: done.message)
    return 0


def _export(args: argparse.Namespace) -> int:
    return _show_outcome(args, run_export(args, lambda: _segment_dir(args), partial(_whereabouts, args)))


def _import(args: argparse.Namespace) -> int:
    return _show_outcome(args, run_import(args))


def _wait(args: argparse.Namespace) -> int:
    endpoint = _endpoint(args)
    deadline = time.monotonic() + args.timeout
    while not answers(endpoint):
        if time.monotonic() > deadline:
            return _fail(args, EXIT_NO_DAEMON, f"no daemon on {endpoint} within {args.timeout:g} s")
        time.sleep(_WAIT_STEP_S)
    _show(args, {"endpoint": endpoint}, lambda: f"a daemon answers on {endpoint}")
    return 0


def _peers(args: argparse.Namespace) -> int:
    with _connect(args) as client:
        found = client.ask(m.GetPeers(), m.Peers)
    _show(args, found, lambda: render_peers(found))
    return 0


def _what_if(args: argparse.Namespace) -> int:
    with _connect(args) as client:
        try:
            found = ask_what_if(client, args, args.verify_iterations)
        except ValueError as error:
            if isinstance(error, WireError):
                raise
            return _fail(args, EXIT_USAGE, str(error))
    _show(args, as_json(found), lambda: render_what_if(found))
    return 0 if found.recoverable else EXIT_FAILED


def _elastic(args: argparse.Namespace) -> int:
    try:  # the only command that needs NumPy and SciPy
        from ckptd.ctl.elastic.elastic_command import run_elastic
        from ckptd.ctl.elastic.elastic_input import InputProblem
    except ImportError as error:
        hint = "`ckptctl elastic` plans with NumPy and SciPy: pip install 'ckptd[elastic]'"
        return _fail(args, EXIT_USAGE, f"{error}; {hint}")
    try:
        return _show_outcome(args, run_elastic(args, partial(_connect, args)))
    except InputProblem as error:
        return _fail(args, EXIT_USAGE, str(error))
    except ElasticError as error:
        return _fail(args, EXIT_FAILED, str(error))


def _drill(args: argparse.Namespace) -> int:
    with _connect(args) as client:
        report = run_drill(client, args)
    _show(args, report, lambda: render_drill(report))
    return 0 if report.recoverable else EXIT_FAILED


def _keys(args: argparse.Namespace) -> int:
    found, text = run_keys(args)
    _show(args, found, lambda: text)
    return 0


def _checkpoints(args: argparse.Namespace) -> int:
    return _show_outcome(args, run_checkpoints(args))


def _verify(args: argparse.Namespace) -> int:
    return _show_outcome(args, run_verify(args))


def _show_outcome(args: argparse.Namespace, outcome: CommandOutcome) -> int:
    _show(args, outcome.answer, lambda: outcome.text)
    return outcome.code


def _segment_dir(args: argparse.Namespace) -> str:
    """The daemon's segment folder; the configured one if no daemon answers."""
    try:
        with _connect(args) as client:
            return client.ask(m.GetStatus(), m.Status, timeout_s=1.0).segment_dir
    except RequestTimeout:
        return _settings(args).config.segment_dir


def _whereabouts(args: argparse.Namespace, job: str, run: str, iteration: int) -> Mapping[int, Sequence[str]]:
    """The nodes that hold other ranks' snapshots, by rank; empty if no daemon can answer (the caller
    then reports that the nodes are not known).
    """
    try:
        with _connect(args) as client:
            return ask_whereabouts(client, job, run, iteration)
    except (RequestTimeout, DaemonUnavailable, RefusedError, WireError, RemoteProtocolError):
        return {}


def _connect(args: argparse.Namespace) -> ControlClient:
    path = Path(_endpoint(args).removeprefix("ipc://"))
    if not path.exists():  # connecting would wait for the socket
        raise DaemonUnavailable(f"no daemon serves {_endpoint(args)}: there is no socket")
    return connect(_endpoint(args), min(args.timeout, _CONNECT_S))


def _endpoint(args: argparse.Namespace) -> str:
    return args.endpoint or default_endpoint()


def _settings(args: argparse.Namespace) -> LoadedConfig:
    return load_config({"listen": args.endpoint} if args.endpoint else {})


def _rank(args: argparse.Namespace) -> int:
    return -1 if args.rank is None else int(args.rank)


def _show(args: argparse.Namespace, answer: Any, text: Callable[[], str]) -> None:
    if args.json:
        print(for_json(msgspec.json.encode(answer).decode()))
    else:
        print(for_terminal(text()))


def _fail(args: argparse.Namespace, code: int, message: str) -> int:
    message = for_terminal(message)
    print(f"ckptctl: {message}", file=sys.stderr)
    if args.json:
        print(for_json(msgspec.json.encode({"error": message, "exit_status": code}).decode()))
    return code


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON document")
    common.add_argument(
        "--endpoint",
        help="address of the daemon (default: CKPTD_LISTEN, or the socket in the runtime folder)",
    )
    common.add_argument("--timeout", type=float, default=10.0, help="seconds to wait (default 10)")
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("--job", help="only this job")
    which.add_argument("--run", help="only this run")
    which.add_argument("--rank", type=int, help="only this rank")

    parser = argparse.ArgumentParser(
        prog="ckptctl",
        description="Inspect a node's daemon, its snapshots, and the checkpoints in object storage.",
        epilog="Exit codes: 0 success, 1 a check failed, 2 wrong usage or an unusable store, "
        "3 no daemon answers, 4 refused or not found, 5 damaged snapshot.",
    )
    parser.add_argument("--version", action="version", version=f"ckptctl {ckptd.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace], int], text: str, *parents: Any) -> Any:
        sub = commands.add_parser(name, help=text, description=text, parents=[common, *parents])
        sub.set_defaults(function=function)
        return sub

    add("status", _status, "show the daemon, its memory, its trainers and its segments")
    snapshots = add(
        "snapshots",
        _snapshots,
        "list the slots of each rank and the iteration that can be recovered",
        which,
    )
    snapshots.add_argument("--operators", action="store_true", help="list operators by name")
    text = "list the iterations that a run can resume at, for RecoveryOptions(resume_at=N)"
    iterations = add("iterations", _iterations, text, which)
    events = add("events", _events, "list the events of this node")
    events.add_argument("--follow", action="store_true", help="keep printing new events")
    events.add_argument("--since", type=int, default=0, help="only events after this number")
    events.add_argument("--limit", type=int, default=1000, help="print at most this many (default 1000)")
    text = "park: attached trainers copy their state to memory now, and a restart resumes from that copy"
    park = add("park", _park, text)
    park.add_argument("job", nargs="?", help="only this job")
    park.add_argument("run", nargs="?", help="only this run of it")
    park.set_defaults(timeout=60.0)
    add("doctor", _doctor, "check this machine's settings, and print a fix for each problem")
    admit = add(
        "admit",
        _admit,
        "allow nodes that are not members of a run to read its snapshots from this node",
    )
    admit.add_argument("job")
    admit.add_argument("run")
    admit.add_argument("nodes", nargs="+", metavar="node", help="node ids whose keys are trusted")
    forget = add("forget", _forget, "free the snapshots of a run that has no live trainer")
    forget.add_argument("job")
    forget.add_argument("run")
    forget.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    text = "lift the quarantine of snapshots that no replay reproduced; the next start may use them"
    lift = add("unquarantine", _unquarantine, text)
    lift.add_argument("job")
    lift.add_argument("run")
    text = "write the model of one iteration as safetensors, Hugging Face or torch.distributed.checkpoint"
    add_export_arguments(add("export", _export, text, which))
    add_import_arguments(
        add(
            "import",
            _import,
            "convert a model from another tool into a checkpoint that a run can start from",
        )
    )
    add("peers", _peers, "list the other nodes, the replicas and their lag")
    lose = add(
        "whatif",
        _what_if,
        "predict a recovery after the loss of nodes: sources, replay, lost iterations",
        which,
    )
    lose.add_argument(
        "--lose",
        required=True,
        help="the lost nodes, by name or label: node=host-3,rack=A (nodes that match any of these)",
    )
    for each in (snapshots, iterations, lose):
        each.add_argument(
            "--verify-iterations",
            type=int,
            default=VERIFY_ITERATIONS,
            metavar="N",
            help="value of RecoveryOptions(verify_iterations=N) in the trainers (default: %(default)s)",
        )
    drill = add("drill", _drill, "rehearse the recovery of --rank from other nodes", which)
    drill.set_defaults(timeout=600.0)
    elastic = add("elastic", _elastic, "show or plan the placement of experts, and rate it")
    add_elastic_commands(elastic, [common, which])
    keys = add("keys", _keys, "manage this node's keys and the peers that it trusts")
    add_keys_commands(keys, common)
    stored = add("checkpoints", _checkpoints, "list, verify, pin and remove checkpoints in object storage")
    add_checkpoints_commands(stored, common)
    add_verify_arguments(add("verify", _verify, "verify every checkpoint in a store; needs no daemon"))
    add("wait", _wait, "wait until the daemon answers, for at most --timeout")
    return parser
