"""`make gpu`: its plan, its stages on the CPU (some hang, some fail), its page, and the command as a whole."""

from __future__ import annotations

import datetime
import json
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu_profile import account, read_trace
from bench.gpu_run import (
    GRACE_S,
    MINUTES,
    STAGES,
    Machine,
    Outcome,
    Planned,
    Stage,
    allowed_s,
    json_lines,
    main,
    page,
    page_name,
    plan_run,
    run_stage,
    scratch,
    shown,
    tidy,
)
from tests.long import long

ROOT = Path(__file__).resolve().parents[2]
H100 = Machine(
    gpu="NVIDIA H100 80GB HBM3", driver="580.1", cores=16, commit="abc", versions={"torch": "2.11"}
)
HERE = Machine(cores=2, missing={"triton": "ModuleNotFoundError"})
RECORD = json.dumps(
    {"bench": "fake", "machine": {}, "commit": "abc", "metrics": {"rate": 1.25, "note": "a|b"}}
)


def fake(name: str, code: str, *, budget_s: float = 60.0, shows: bool = False) -> Stage:
    """A stage that runs some Python, on a device and on the CPU alike."""
    return Stage(name, "a fake", ("-c", code), budget_s, twin=("-c", code), needs=frozenset(), shows=shows)


def reasons(planned: list[Planned]) -> dict[str, str]:
    return {each.stage.name: each.skipped for each in planned}


# --- the plan ----------------------------------------------------------------------------------------------


def test_the_most_important_comes_first_and_all_fits_in_the_time() -> None:
    assert [stage.name for stage in STAGES] == [
        *("smoke", "headline", "tests", "copies", "profile", "dispatch", "elastic", "largest")
    ]
    describing_s = 20
    assert sum(stage.budget_s for stage in STAGES) + sum(GRACE_S) + describing_s <= 60 * MINUTES <= 25 * 60
    for stage in STAGES:
        for command in filter(None, (stage.command, stage.twin)):
            assert command[0] == "-m"
            paths = [part for part in command if part.startswith("tests/")]
            assert bool(paths) is stage.tests
            assert all((ROOT / path).exists() for path in paths)
            if not stage.tests:
                assert (ROOT / f"{command[1].replace('.', '/')}.py").is_file()


def test_on_a_device_everything_runs() -> None:
    planned = plan_run(STAGES, H100)
    assert set(reasons(planned).values()) == {""}
    assert all(each.command[-2:] == ("-n", "8") for each in planned if each.stage.tests)
    alone = plan_run(STAGES, replace(H100, missing={"xdist": "ModuleNotFoundError"}))
    assert not any("-n" in each.command for each in alone)


def test_what_cannot_run_is_skipped_with_its_reason() -> None:
    assert set(reasons(plan_run(STAGES, HERE)).values()) == {"there is no CUDA device"}
    twin = reasons(plan_run(STAGES, HERE, cpu_twin=True))
    assert twin == {
        **dict.fromkeys(("smoke", "headline", "tests", "copies", "profile", "dispatch"), ""),
        **dict.fromkeys(("elastic", "largest"), "it has no twin on the CPU"),
    }
    lacking = reasons(plan_run(STAGES, replace(H100, missing={"pytest": "x", "hypothesis": "x"})))
    assert lacking["tests"] == "this interpreter lacks hypothesis, pytest"
    assert lacking["headline"] == ""


def test_a_run_goes_on_where_one_has_ended() -> None:
    found = reasons(plan_run(STAGES, H100, done=("smoke", "headline")))
    assert found["headline"] == "done before"
    assert found["tests"] == ""
    again = reasons(plan_run(STAGES, H100, done=("smoke", "headline"), only=("headline",)))
    assert (again["smoke"], again["headline"], again["tests"]) == ("done before", "", "not asked for")
    with pytest.raises(ValueError, match="no stage heat: there are smoke, headline"):
        plan_run(STAGES, H100, only=("heat",))


@pytest.mark.parametrize(
    ("budgets", "left_s", "expected"),
    [
        ([60, 100], 300, 200),  # what nobody needs is the first one's
        ([60, 100], 160, 60),
        ([60, 100], 100, 60),  # the later ones lose
        ([60, 100], 40, 40),
        ([60], 500, 500),
        ([60], -5, -5),
    ],
)
def test_time_that_is_left_over_is_for_the_next(budgets: list[float], left_s: float, expected: float) -> None:
    assert allowed_s(budgets, left_s) == expected


# --- output and page -----------------------------------------------------------------------------------------


def test_records_are_found_among_other_lines() -> None:
    older = json.dumps({"bench": "fake", "metrics": {"rate": 1.0}})
    other = json.dumps({"bench": "other", "metrics": {}})
    text = "\n".join([older, "{'a': 1}", other, '{"no": "record"}', RECORD, RECORD[:40]])
    assert [record["bench"] for record in json_lines(text)] == ["fake", "other"]
    assert json_lines(text)[0]["metrics"] == {"rate": 1.25, "note": "a|b"}


def test_what_is_shown_ends_before_the_metrics() -> None:
    text = "way  GB/s\nburst  50\n\nmetric   value\n------\nrate   1\n" + RECORD
    assert shown(text, before_metrics=True) == "way  GB/s\nburst  50"
    assert shown(text, before_metrics=False).endswith("rate   1")
    tests = f"tests/a.py::test_a PASSED [ 50%]\n{ROOT}/tests/a.py::test_b FAILED [100%]"
    assert shown(tests, before_metrics=False) == "tests/a.py::test_b FAILED [100%]"
    assert len(shown("x\n" * 500, before_metrics=True).splitlines()) == 60


def test_pages_are_named_after_device_and_month() -> None:
    day = datetime.date(2026, 11, 24)
    assert page_name("NVIDIA H100 80GB HBM3", day) == "h100_202611.md"
    assert page_name("NVIDIA GeForce RTX 4090", day) == "4090_202611.md"
    assert (
        page_name("Tesla V100-SXM2-16GB", day, ["v100_202611.md", "v100_202611_2.md"]) == "v100_202611_3.md"
    )
    assert page_name("", day) == "cpu_202611.md"


def test_the_page_names_what_failed_and_has_the_numbers() -> None:
    outcomes = [
        Outcome("one", "passed", seconds=3.0, text="hidden", records=json_lines(RECORD)),
        Outcome("two", "failed", "exit code 1", 2.0, text="Traceback"),
        Outcome("three", "skipped", "there is no CUDA device"),
    ]
    text = page(H100, outcomes)
    assert text.startswith("# NVIDIA H100 80GB HBM3: `make gpu`\n")
    for line in (
        "| one | passed | 3 |  |",
        "| two | **failed** | 2 | exit code 1 |",
        "| three | skipped | 0 | there is no CUDA device |",
        "| rate | 1.25 |",
        "| note | a/b |",
        RECORD,
        "Traceback",
    ):
        assert line in text.splitlines()
    assert "driver 580.1" in text
    assert "hidden" not in text


# --- stages that run -------------------------------------------------------------------------------------------


def run(stage: Stage, out: Path, *, limit_s: float = 60.0) -> Outcome:
    return run_stage(Planned(stage, stage.command), out, limit_s, grace_s=(20.0, 20.0))


def test_a_stage_that_writes_json_lines(tmp_path: Path) -> None:
    stage = fake("fine", f"print('before'); print('''{RECORD}'''); open('{{out}}/raw', 'w').close()")
    found = run(stage, tmp_path)
    assert (found.state, found.note) == ("passed", "")
    assert found.records[0]["metrics"]["rate"] == 1.25
    assert (tmp_path / "raw").is_file()
    assert (tmp_path / "fine.log").read_text().startswith("before")


def test_a_stage_that_fails_keeps_its_output(tmp_path: Path) -> None:
    found = run(fake("bad", "print('half'); raise SystemExit(3)"), tmp_path)
    assert (found.state, found.note, found.text) == ("failed", "exit code 3", "half")
    killed = run(fake("dead", "import os; os.kill(os.getpid(), 9)"), tmp_path)
    assert (killed.state, killed.note) == ("failed", "ended by signal 9")


def test_a_stage_that_hangs_is_asked_to_end(tmp_path: Path) -> None:
    """By the time of its deadline it has printed a record, which is kept."""
    code = f"""
import time
print('''{RECORD}''', flush=True)
try:
    while True: time.sleep(0.05)
except KeyboardInterrupt:
    print('so far', flush=True)
"""
    found = run(fake("slow", code), tmp_path, limit_s=5.0)
    assert found.state == "cut off"
    if found.records:  # a machine that starts Python within five seconds
        assert found.text.endswith("so far")
        assert found.note == "its 5 s were over; ended when asked"


def test_a_stage_that_does_not_listen_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    code = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.pause()'])
print(child.pid, flush=True)
signal.pause()
"""
    stage = fake("deaf", code)
    found = run_stage(Planned(stage, stage.command), tmp_path, 5.0, grace_s=(0.2, 20.0))
    assert found.state == "cut off"
    assert found.note.endswith("killed")
    if found.text:  # a machine that starts Python within five seconds
        assert gone(int(found.text))


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has collected yet counts."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_what_a_stage_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
print(child.pid)
"""
    found = run(fake("untidy", code), tmp_path)
    assert found.state == "passed"
    assert gone(int(found.text))


def test_what_a_killed_stage_leaves_in_memory_is_removed(tmp_path: Path) -> None:
    """But nothing that was there before, that others own by their name, or that a living process has mapped."""
    before, others, left, alive = (
        tmp_path / name for name in ("ckptd-demo-old", "somebody", "ckptd-own-a", "ckptd-demo-b")
    )
    before.mkdir()
    there = scratch(tmp_path)
    for folder in (others, left, alive):
        folder.mkdir()
        (folder / "segment").write_bytes(bytes(4096))
    with (alive / "segment").open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert tidy(tmp_path, there) == [left]
    assert {path.name for path in tmp_path.iterdir()} == {before.name, others.name, alive.name}
    assert tidy(tmp_path / "absent", set()) == []


# --- the command -------------------------------------------------------------------------------------------------


def options(tmp_path: Path, *more: str) -> list[str]:
    return ["--out", str(tmp_path / "out"), "--pages", str(tmp_path / "pages"), *more]


def test_without_a_device_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(tmp_path), machine=HERE) == 2
    assert "there is no CUDA device here" in capsys.readouterr().err
    assert not (tmp_path / "pages").exists()
    assert main(options(tmp_path, "--list"), machine=HERE) == 0
    assert "headline     300 s  there is no CUDA device" in capsys.readouterr().out
    assert main(options(tmp_path, "--stages", "heat"), machine=HERE) == 1


def test_the_run_goes_on_after_a_failure(tmp_path: Path) -> None:
    stages = (fake("a", "raise SystemExit(1)"), fake("b", f"print('''{RECORD}''')"))
    assert main(options(tmp_path), stages=stages, machine=H100) == 1
    (text,) = [path.read_text() for path in (tmp_path / "pages").iterdir()]
    assert "| a | **failed** |" in text
    assert "| b | passed |" in text
    assert main(options(tmp_path, "--stages", "b"), stages=stages, machine=H100) == 0
    assert len(list((tmp_path / "pages").iterdir())) == 2, "the first page is kept"


def test_a_run_is_resumed_into_the_same_page(tmp_path: Path) -> None:
    """What has failed is not tried again, unless it is asked for."""
    flag = tmp_path / "fixed"
    stages = (
        fake("a", f"import os; raise SystemExit(not os.path.exists({str(flag)!r}))"),
        fake("b", f"print('''{RECORD}''')"),
    )
    assert main(options(tmp_path, "--stages", "a", "--commit", "c0ffee"), stages=stages, machine=H100) == 1
    assert main(options(tmp_path, "--resume"), stages=stages, machine=H100) == 1
    (path,) = (tmp_path / "pages").iterdir()
    assert "| a | **failed** |" in path.read_text()
    assert "| rate | 1.25 |" in path.read_text().splitlines()
    flag.touch()
    assert main(options(tmp_path, "--resume", "--stages", "a"), stages=stages, machine=H100) == 0
    (path,) = (tmp_path / "pages").iterdir()
    assert "| a | passed |" in path.read_text()
    assert "| b | passed |" in path.read_text()


def test_without_time_a_stage_is_not_begun(tmp_path: Path) -> None:
    stages = (fake("a", "raise SystemExit(1)"),)
    assert main(options(tmp_path, "--minutes", "0.1"), stages=stages, machine=H100) == 1
    (path,) = (tmp_path / "pages").iterdir()
    assert "s were left |" in path.read_text()
    assert not (tmp_path / "out" / "a.log").exists()


def test_a_run_that_goes_on_later_begins_no_stage_that_it_would_cut_off(tmp_path: Path) -> None:
    """Not even if a minute is left; the first one is begun in any case."""
    stages = tuple(fake(name, f"print('''{RECORD}''')", budget_s=1000) for name in "abc")
    for expected in (["a"], ["a", "b"], ["a", "b", "c"]):
        main(options(tmp_path, "--resume", "--minutes", "2"), stages=stages, machine=H100)
        assert sorted(path.stem for path in (tmp_path / "out").glob("*.log")) == expected
    (path,) = (tmp_path / "pages").iterdir()
    assert path.read_text().count("| passed |") == 3


@long
@pytest.mark.slow
def test_the_command_on_the_cpu(tmp_path: Path) -> None:
    """The whole command in a process of its own, with the stages whose twins are quick."""
    command = [
        sys.executable,
        "-m",
        "bench.gpu_run",
        "--cpu-twin",
        "--stages",
        "smoke",
        "headline",
        "copies",
        "profile",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.md")
    text = path.read_text()
    assert "`make gpu` on the CPU, to try the command" in text
    for stage in ("smoke", "headline", "copies", "profile"):
        assert f"| {stage} | passed |" in text
    assert "| tests | skipped | 0 | not asked for |" in text
    assert "idle, the training thread has not come so far" in text
    for bench in ("gpu_twin", "gpu_copies", "gpu_profile"):
        (record,) = [r for r in json_lines(text) if r["bench"] == bench]
        assert not any(name.startswith("failed_") for name in record["metrics"])
    assert {
        "overhead_p99_fraction_cuda_window8",
        "resume_s",
        "attach_s",
        "stall_vs_best_peer_cuda_window8",
    } <= next(r["metrics"].keys() for r in json_lines(text) if r["bench"] == "gpu_twin")
    for name in ("plain", "ckptd"):
        trace = read_trace(tmp_path / f"trace_{name}.json.gz")
        assert account(trace).iterations == 2, "a real trace of the profiler's"
