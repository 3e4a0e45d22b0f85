"""All that a CUDA device is needed for, by one command: `make gpu`.

Stages run one after the other, the most important first. Each has a budget; what an earlier one leaves over
is for the next. A stage that fails, or is cut off at its deadline, keeps its output, and the run goes on. The
page in `bench/results/` has machine, versions, commit, the outcome of each stage and its numbers; raw output,
traces and curves are in the folder of `--out`. `--resume` goes on in that folder where a run has ended: with
`--minutes 9` for each, a device that takes short commands only gets through all of it: then a stage is not begun
with less than its budget.

This program imports nothing but the standard library, so that it can say what is missing. The interpreter is
the one that runs it; nothing is installed. Exit codes: 0 all stages passed, 1 some did not, 2 there is no
device (`--cpu-twin` runs what has a twin on the CPU, at small sizes, to try the command itself).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = [
    "STAGES",
    "Machine",
    "Outcome",
    "Planned",
    "Stage",
    "allowed_s",
    "json_lines",
    "main",
    "page",
    "page_name",
    "plan_run",
    "run_stage",
]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
MINUTES = 25.0
# A stage is not begun with less.
LEAST_S = 20.0
# From the request to end until the kill, and from there until its end is awaited no longer.
GRACE_S = (15.0, 5.0)
DESCRIBE_S = 120.0
POLL_S = 0.1
SHM = Path("/dev/shm")
# Folders there of benchmarks and tests, which remove them unless they are killed.
SCRATCH = ("ckptd-demo-", "ckptd-own-", "ckptd-peers-", "ckptd-test-")
SHOWN_LINES = 60
PACKAGES = ("torch", "triton", "numpy", "pyzmq", "xxhash", "msgspec", "cuda-bindings", "pytest", "ckptd")
OURS = frozenset(
    ("torch", "numpy", "zmq", "msgspec", "msgpack", "xxhash", "blake3", "cryptography", "fsspec")
)
FOR_TESTS = frozenset(("pytest", "pytest_timeout", "hypothesis"))
# Runs tests in several processes, where it is there.
IN_PARALLEL = "xdist"
TEST_PROCESSES = 8
SMALL_MODEL = ("--width", "64", "--layers", "1", "--experts", "2", "--batch-size", "1", "--memory-gib", "1")

DONE_BEFORE, NOT_ASKED_FOR = "done before", "not asked for"
NO_TWIN = "it has no twin on the CPU"
PASSED, FAILED, CUT_OFF, SKIPPED = "passed", "failed", "cut off", "skipped"


@dataclass(frozen=True, slots=True)
class Stage:
    """One process of the run.

    Args:
        command: arguments of the interpreter; `{out}` is the folder for raw output.
        budget_s: seconds that it has for certain.
        twin: the same on the CPU at small sizes; empty if there is none.
        needs: modules without which it is not begun.
        tests: it is pytest, which runs in several processes where it can.
        shows: what it prints before its metrics belongs on the page.
    """

    name: str
    about: str
    command: tuple[str, ...]
    budget_s: float
    twin: tuple[str, ...] = ()
    needs: frozenset[str] = OURS
    tests: bool = False
    shows: bool = False


def _tests(*paths: str) -> tuple[str, ...]:
    # pytest-benchmark, where it is there, warns of several processes, which here is an error.
    return ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark", *paths)


STAGES = (
    Stage(
        "smoke",
        "the copy engine: bytes to registered memory and back, and their rates",
        ("-m", "bench.gpu", "--json", "--smoke", "--rounds", "3"),
        60,
        twin=(
            *("-m", "bench.gpu_copies", "--json", "--device", "cpu", "--rounds", "1", "--size-mib", "1"),
            *("--products", "1", "--width", "16"),
        ),
    ),
    Stage(
        "headline",
        "overhead, capture and restore against the link, delays of small copies, torch's saves",
        (
            *("-m", "bench.gpu", "--json", "--block", "4", "--rounds", "20", "--limit-s", "75"),
            *("--saves", "2", "--kinds", "ckptd", "fixed", "--settle", "30"),
        ),
        300,
        twin=(
            *(
                "-m",
                "bench.gpu",
                "--json",
                "--device",
                "cpu",
                "--block",
                "1",
                "--rounds",
                "1",
                "--saves",
                "1",
            ),
            *("--kinds", "fixed", "--settle", "2", *SMALL_MODEL),
        ),
    ),
    Stage(
        "tests",
        "jobs on the device that are killed and resume, and the tests of engine and dispatcher",
        _tests("tests/cuda", "tests/e2e/test_cuda.py"),
        330,
        twin=_tests("tests/cuda/test_copy_plan.py", "tests/cuda/test_cuda_engine.py"),
        needs=OURS | FOR_TESTS,
        tests=True,
    ),
    Stage(
        "copies",
        "ways across the link, alone and beside a load; the plan of this device's own points",
        ("-m", "bench.gpu_copies", "--json", "--rounds", "10", "--curve", "{out}/curve.json"),
        180,
        twin=(
            *("-m", "bench.gpu_copies", "--json", "--device", "cpu", "--rounds", "2", "--size-mib", "2"),
            *("--products", "1", "--width", "32"),
        ),
        shows=True,
    ),
    Stage(
        "profile",
        "every millisecond of an iteration by kind, without and with ckptd",
        ("-m", "bench.gpu_profile", "--json", "--out", "{out}"),
        150,
        twin=(
            *("-m", "bench.gpu_profile", "--json", "--device", "cpu", "--iterations", "2", "--window", "1"),
            *("--out", "{out}", "--settle", "2", *SMALL_MODEL),
        ),
        shows=True,
    ),
    Stage(
        "dispatch",
        "the elastic layer's dispatcher",
        ("-m", "bench.dispatch", "--json", "--nodes", "64"),
        60,
        twin=("-m", "bench.dispatch", "--json", "--rounds", "1", "--nodes", "64", "--layers", "2"),
    ),
    Stage(
        "elastic",
        "the remaining tests that need a device: token routing, boundary logs, random states",
        _tests(
            *("-m", "gpu", "tests/client/elastic/layer", "tests/client/test_rng_state.py"),
            "tests/client/pipeline/test_boundary_log.py",
        ),
        60,
        needs=OURS | FOR_TESTS,
        tests=True,
    ),
    Stage(
        "largest",
        "the largest model that fits, with the device to itself",
        ("-m", "bench.gpu", "--json", "--largest", "--block", "2", "--rounds", "10", "--settle", "20"),
        150,
    ),
)


# --- what needs neither device nor processes -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """What the stages will find.

    Args:
        gpu: the device's name; empty if there is none.
        missing: modules that cannot be imported, with the reason.
    """

    gpu: str = ""
    driver: str = ""
    gpu_memory_gib: float = 0.0
    cpu: str = ""
    cores: int = 0
    memory_gib: float = 0.0
    shm_gib: float = 0.0
    kernel: str = ""
    python: str = ""
    commit: str = "unknown"
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planned:
    """A stage of this run: its command, or why it is skipped."""

    stage: Stage
    command: tuple[str, ...]
    skipped: str = ""


def plan_run(
    stages: Sequence[Stage],
    machine: Machine,
    *,
    cpu_twin: bool = False,
    only: Sequence[str] = (),
    done: Sequence[str] = (),
) -> list[Planned]:
    """All stages in their order, those that cannot or need not run with the reason.

    Args:
        only: names of stages; none: all.
        done: names of those that an earlier run in the same folder has ended.
    Raises:
        ValueError: there is no stage of a name.
    """
    names = [stage.name for stage in stages]
    unknown = [name for name in (*only, *done) if name not in names]
    if unknown:
        raise ValueError(f"no stage {', '.join(unknown)}: there are {', '.join(names)}")
    return [_planned(stage, machine, cpu_twin=cpu_twin, only=only, done=done) for stage in stages]


def _planned(
    stage: Stage, machine: Machine, *, cpu_twin: bool, only: Sequence[str], done: Sequence[str]
) -> Planned:
    command = stage.twin if cpu_twin else stage.command
    if stage.tests and IN_PARALLEL not in machine.missing and machine.cores >= TEST_PROCESSES:
        command += ("-n", str(TEST_PROCESSES))
    missing = sorted(stage.needs & machine.missing.keys())
    reason = ""
    if stage.name in done and stage.name not in only:
        reason = DONE_BEFORE
    elif only and stage.name not in only:
        reason = NOT_ASKED_FOR
    elif cpu_twin and not stage.twin:
        reason = NO_TWIN
    elif not cpu_twin and not machine.gpu:
        reason = "there is no CUDA device"
    elif missing:
        reason = f"this interpreter lacks {', '.join(missing)}"
    return Planned(stage, command, reason)


def allowed_s(budgets: Sequence[float], left_s: float) -> float:
    """What the first of these stages may take so that the others keep their budgets, as far as time is left.

    Of less time than all budgets together, earlier stages get theirs first.
    """
    own, later = budgets[0], sum(budgets[1:])
    return max(min(own, left_s), left_s - later)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended.

    Args:
        state: passed, failed, cut off, or skipped.
        note: the reason.
        text: the end of its output, or what it shows.
        shows: that text belongs on the page in any case.
        records: JSON lines among its output, of each benchmark the last.
    """

    name: str
    state: str
    note: str = ""
    seconds: float = 0.0
    text: str = ""
    shows: bool = False
    records: tuple[Mapping[str, Any], ...] = ()


def json_lines(text: str) -> tuple[Mapping[str, Any], ...]:
    """The records of benchmarks in some output; of several of one benchmark the last, which is the fullest."""
    found: dict[str, Mapping[str, Any]] = {}
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off in the middle
        if isinstance(record, dict) and isinstance(record.get("metrics"), dict) and "bench" in record:
            found[str(record["bench"])] = record
    return tuple(found.values())


def page_name(gpu: str, day: datetime.date, taken: Sequence[str] = ()) -> str:
    """`h100_202611.md` for an NVIDIA H100 80GB HBM3; with a number if that name is taken."""
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    short = next((w for w in words if w not in ("nvidia", "geforce", "tesla", "rtx", "gpu")), "cpu")
    stem = f"{short}_{day:%Y%m}"
    number = 1
    while (name := f"{stem}{'' if number == 1 else f'_{number}'}.md") in taken:
        number += 1
    return name


def page(machine: Machine, outcomes: Sequence[Outcome], *, twin: bool = False) -> str:
    """The results page, in Markdown."""
    title = machine.gpu or "no device"
    lines = [f"# {title}: `make gpu`" + (" on the CPU, to try the command" if twin else ""), ""]
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines += [
        f"Commit {machine.commit}; driver {machine.driver or 'none'}, {machine.gpu_memory_gib:.0f} GiB on the device;",
        f"{machine.cores} cores ({machine.cpu}), {machine.memory_gib:.0f} GiB of memory, {machine.shm_gib:.0f} GiB free",
        f"in /dev/shm; kernel {machine.kernel}, Python {machine.python}; {versions}.",
        "",
    ]
    lines += ["| stage | outcome | seconds | note |", "|---|---|---|---|"]
    for each in outcomes:
        strong = each.state if each.state in (PASSED, SKIPPED) else f"**{each.state}**"
        lines.append(f"| {each.name} | {strong} | {each.seconds:.0f} | {_cell(each.note)} |")
    for each in outcomes:
        lines += _section(each)
    return "\n".join(lines) + "\n"


def _section(outcome: Outcome) -> list[str]:
    lines: list[str] = []
    for record in outcome.records:
        lines += ["", f"## {outcome.name}: {record['bench']}", "", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {_cell(_short(value))} |" for name, value in record["metrics"].items()]
        lines += ["", "```json", json.dumps(record), "```"]
    if outcome.text and (outcome.shows or outcome.state != PASSED or not outcome.records):
        lines += ["", f"## {outcome.name}: what it printed", "", "```text", outcome.text, "```"]
    return lines


def shown(text: str, *, before_metrics: bool) -> str:
    """The end of some output, less its JSON lines, tests that passed, and where this tree lies.

    Args:
        before_metrics: only what comes before a benchmark's table of metrics.
    """
    lines = text.replace(f"{ROOT}/", "").splitlines()
    lines = [line for line in lines if not line.startswith("{") and " PASSED" not in line]
    if before_metrics:
        heads = [at for at, line in enumerate(lines) if line.split() == ["metric", "value"]]
        lines = lines[: heads[0]] if heads else lines
    return "\n".join(lines[-SHOWN_LINES:]).strip()


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


# --- running ---------------------------------------------------------------------------------------------


def run_stage(
    planned: Planned, out: Path, limit_s: float, *, grace_s: tuple[float, float] = GRACE_S
) -> Outcome:
    """Run it for at most ``limit_s``; its output is in ``<out>/<name>.log`` as it comes.

    At the deadline its process group is asked to end as by Ctrl-C (pytest then says what passed), and killed
    after the first of ``grace_s``.
    """
    name, log = planned.stage.name, out / f"{planned.stage.name}.log"
    there = scratch(SHM)
    command = [sys.executable, *(part.replace("{out}", str(out)) for part in planned.command)]
    begun = time.monotonic()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So it is in the background of a shell; the stage inherits that, and could not be asked to end.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            state, note = _ended(process, limit_s, grace_s)
        finally:
            # Whatever it started and left: the next stage needs device and memory. Its own number stays taken
            # until `wait`.
            _signal_group(process, signal.SIGKILL)
            code = process.wait()
            _await_group(process.pid, grace_s[1])
    if state != CUT_OFF:
        state, note = _judged(code)
    if state != PASSED:
        tidy(SHM, there)
    text = log.read_text(errors="replace")
    shows = planned.stage.shows
    return Outcome(
        name=name,
        state=state,
        note=note,
        seconds=time.monotonic() - begun,
        text=shown(text, before_metrics=shows and state == PASSED),
        shows=shows,
        records=json_lines(text),
    )


def _ended(process: subprocess.Popen[bytes], limit_s: float, grace_s: tuple[float, float]) -> tuple[str, str]:
    """Wait for its end, and bring it about at the deadline."""
    if _has_ended(process, limit_s):
        return PASSED, ""
    how = "killed"
    _signal_group(process, signal.SIGINT)
    if _has_ended(process, grace_s[0]):
        how = "ended when asked"
    else:
        _signal_group(process, signal.SIGKILL)
        _has_ended(process, grace_s[1])
    return CUT_OFF, f"its {limit_s:.0f} s were over; {how}"


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether it ends in time; it is not collected yet, so no other process gets its number."""
    deadline = time.monotonic() + within_s
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while os.waitid(os.P_PID, process.pid, flags) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _await_group(group: int, within_s: float) -> None:
    """Until no process of it is left: they hold memory, here and on the device, until they are gone."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(POLL_S)


def scratch(shm: Path) -> set[Path]:
    """Folders of benchmarks and tests in memory."""
    if not shm.is_dir():
        return set()
    return {path for path in shm.iterdir() if path.name.startswith(SCRATCH) and path.is_dir()}


def tidy(shm: Path, there: set[Path]) -> list[Path]:
    """Remove what a stage that was killed has left in memory, tens of gigabytes perhaps; returns what it was.

    Args:
        there: what was there before the stage. What a living process has mapped stays, too.
    """
    left = sorted(scratch(shm) - there)
    mapped = _mapped() if left else ""
    gone = [path for path in left if f" {path}/" not in mapped and path.stat().st_uid == os.getuid()]
    for path in gone:
        print(f"   removing {path.name}, which it left in memory", flush=True)
        shutil.rmtree(path, ignore_errors=True)
    return gone


def _mapped() -> str:
    """The mappings of all processes that we may look into."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found.append(maps.read_text(errors="replace"))
    return "".join(found)


def _judged(code: int) -> tuple[str, str]:
    if code == 0:
        return PASSED, ""
    return FAILED, f"exit code {code}" if code > 0 else f"ended by signal {-code}"


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    # All of the group may have ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def environment() -> dict[str, str]:
    """Ours, with this tree first on the path, and output that is not held back."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run_all(
    planned: Sequence[Planned], out: Path, *, deadline_s: float, whole: bool = False
) -> Iterator[Outcome]:
    """All stages in their order; an outcome is written to ``<out>/<name>.json`` when it is known.

    Args:
        deadline_s: by `time.monotonic`.
        whole: a later run goes on, so a stage that would not get its budget any more is left to that, unless
            it is the first one.
    """
    first = True
    for at, each in enumerate(planned):
        name, path = each.stage.name, out / f"{each.stage.name}.json"
        if each.skipped:
            outcome = before(path) if each.skipped == DONE_BEFORE else None
            yield outcome or Outcome(name, SKIPPED, each.skipped)
            continue
        left_s = deadline_s - time.monotonic()
        budgets = [e.stage.budget_s for e in planned[at:] if not e.skipped]
        limit_s = allowed_s(budgets, left_s - sum(GRACE_S))
        if limit_s < LEAST_S or (whole and not first and limit_s < each.stage.budget_s):
            print(f"== {name}: skipped, no time is left", flush=True)
            yield Outcome(name, SKIPPED, f"{max(0.0, left_s):.0f} s were left")
            continue
        first = False
        print(f"== {name}: {each.stage.about} (at most {limit_s:.0f} s)", flush=True)
        outcome = run_stage(each, out, limit_s)
        path.write_text(json.dumps(asdict(outcome)) + "\n")
        print(f"   {outcome.state} after {outcome.seconds:.0f} s {outcome.note}", flush=True)
        if outcome.state != PASSED or outcome.shows:
            print(outcome.text, flush=True)
        yield outcome


def before(path: Path) -> Outcome | None:
    """What an earlier run has kept of a stage, if anything."""
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    return Outcome(**{**found, "records": tuple(found["records"])})


# --- the machine -------------------------------------------------------------------------------------------


def describe() -> Machine:
    """This machine, asked in a process of its own: the run itself must hold no memory of the device.

    Raises:
        RuntimeError: the interpreter cannot even say.
    """
    command = [sys.executable, "-m", "bench.gpu_run", "--describe"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=DESCRIBE_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{sys.executable} cannot describe this machine:\n{done.stdout}{done.stderr}")
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


def describe_here() -> Machine:
    import importlib
    import importlib.metadata
    import platform

    missing: dict[str, str] = {}
    for name in sorted(OURS | FOR_TESTS | {IN_PARALLEL}):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a library that is there and broken is missing, too
            missing[name] = f"{type(error).__name__}: {error}"
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    gpu, gpu_memory_gib = "", 0.0
    if "torch" not in missing:
        import torch

        if torch.cuda.is_available():
            gpu = torch.cuda.get_device_name(0)
            gpu_memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return Machine(
        gpu=gpu,
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        gpu_memory_gib=gpu_memory_gib,
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        shm_gib=shutil.disk_usage(SHM).free / 2**30 if SHM.is_dir() else 0.0,
        kernel=platform.release(),
        python=platform.python_version(),
        commit=_output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12") or "unknown",
        versions=versions,
        missing=missing,
    )


def _output(*command: str) -> str:
    """The first line that a command prints; empty where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


# --- the command -------------------------------------------------------------------------------------------


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("out", "gpu"), help="folder for raw output")
    options.add_argument("--minutes", type=float, default=MINUTES, help="of this run")
    options.add_argument("--stages", nargs="+", default=[], help="only these, in the order of the list")
    options.add_argument("--resume", action="store_true", help="go on where a run in --out has ended")
    options.add_argument(
        "--pages", type=Path, help="folder of the page (default: bench/results; --out for a twin)"
    )
    options.add_argument("--cpu-twin", action="store_true", help="run what has a twin on the CPU")
    options.add_argument("--commit", help="what is measured, where the tree is a copy without git")
    options.add_argument("--list", action="store_true", help="print the plan, and run nothing")
    options.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args(given)
    if not args.minutes > 0:
        options.error(f"--minutes {args.minutes}: pass a number above 0")
    return args


def main(
    given: Sequence[str] | None = None, *, stages: Sequence[Stage] = STAGES, machine: Machine | None = None
) -> int:
    """The exit code.

    Args:
        machine: what the stages will find; None: this one.
    """
    begun_s = time.monotonic()
    args = arguments(given)
    if args.describe:
        print(json.dumps(asdict(describe_here())))
        return 0
    machine = machine or describe()
    if args.commit:
        machine = replace(machine, commit=args.commit)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        done = ended_before(out, stages) if args.resume else []
        planned = plan_run(stages, machine, cpu_twin=args.cpu_twin, only=args.stages, done=done)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if args.list:
        for each in planned:
            print(
                f"{each.stage.name:10} {each.stage.budget_s:5.0f} s  {each.skipped or ' '.join(each.command)}"
            )
        return 0
    if not machine.gpu and not args.cpu_twin:
        print("there is no CUDA device here: --cpu-twin tries the command on the CPU", file=sys.stderr)
        return 2
    print(f"{machine.gpu or 'no device'}, commit {machine.commit}; raw output in {out}", flush=True)
    for name, reason in machine.missing.items():
        print(f"missing: {name}: {reason}", flush=True)
    path = page_path(args, machine, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for outcome in run_all(planned, out, deadline_s=begun_s + 60 * args.minutes, whole=args.resume):
        outcomes.append(outcome)
        # After each stage: whoever ends this program early has the page so far.
        path.write_text(page(machine, outcomes, twin=args.cpu_twin))
    print(f"results: {path}", flush=True)
    return exit_code(outcomes)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 if all that was to run has passed."""
    fine = {NOT_ASKED_FOR, NO_TWIN}
    return int(any(o.state != PASSED and o.note not in fine for o in outcomes))


def ended_before(out: Path, stages: Sequence[Stage]) -> list[str]:
    """Stages that an earlier run in this folder has passed, or given all the time that they have."""
    found = []
    for stage in stages:
        outcome = before(out / f"{stage.name}.json")
        if outcome is not None and (outcome.state != CUT_OFF or outcome.seconds >= stage.budget_s):
            found.append(stage.name)
    return found


def page_path(args: argparse.Namespace, machine: Machine, out: Path) -> Path:
    """The same page for all runs that go on in one folder; another one for others."""
    folder = args.pages or (out if args.cpu_twin else RESULTS)
    remembered = out / "page.txt"
    if args.resume and remembered.is_file():
        return folder / remembered.read_text().strip()
    taken = [path.name for path in folder.glob("*.md")]
    name = page_name(machine.gpu, datetime.datetime.now(datetime.UTC).date(), taken)
    remembered.write_text(name + "\n")
    return Path(folder / name)


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    # Children that were told to ignore Ctrl-C (as by a shell's `&`) could not be asked to end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _end)  # the stage that runs ends, too
    sys.exit(main())
