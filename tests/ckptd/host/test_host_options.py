"""What a host is told by its command line and by the launcher."""

from __future__ import annotations

import math

import pytest

from ckptd.host.host_options import (
    HostOptions,
    UsageError,
    interpreter_flags,
    options_from,
    place_in_step,
    place_without,
)

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "exp",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
}


def given(*words: str, **environ: str) -> HostOptions:
    return options_from(words, environ)


def test_a_script_with_arguments_that_look_like_ours() -> None:
    script = given("--no-fork", "train.py", "--max-restarts", "-m").script
    assert (script.target, script.is_module) == ("train.py", False)
    assert script.arguments == ("--max-restarts", "-m")


def test_a_module() -> None:
    script = given("--max-restarts", "7", "-m", "pkg.train", "--lr", "1").script
    assert script.words == ["-m", "pkg.train", "--lr", "1"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "no script"),
        (["-m"], "no script"),
        (["--max-restarts", "many", "t.py"], "without a number"),
        (["--what"], "unknown"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_refused(words: list[str], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        options_from(words, {})


def test_the_place_among_the_ranks_comes_from_torchrun() -> None:
    options = options_from(["t.py"], TORCHRUN)
    assert (options.rank, options.local_rank, options.world_size) == (3, 1, 4)
    assert (options.restarts_before, options.launched, options.has_store) == (2, True, True)
    assert options.error_file == "/tmp/error.json"
    assert (options.store, options.run_id) == (("127.0.0.1", 29500), "exp")
    assert not options.one_machine


@pytest.mark.parametrize(
    ("environ", "one"),
    [
        ({}, True),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "SLURM_NNODES": "1"}, True),
        ({"WORLD_SIZE": "4", "SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "1"}, True),
        ({"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, False),
    ],
)
def test_whether_all_ranks_are_on_this_machine(environ: dict[str, str], one: bool) -> None:
    assert options_from(["t.py"], {"RANK": "0", **environ}).one_machine is one


def test_how_long_a_host_may_be_silent() -> None:
    assert given("t.py").silence_s == 2
    assert given("t.py", CKPTD_HOST_SILENCE_S="30").silence_s == 30


def test_with_how_many_ranks_a_job_can_go_on() -> None:
    world = {"WORLD_SIZE": "8", "RANK": "0"}
    assert given("t.py", **world).min_ranks == 8, "all, if nothing is said"
    assert given("t.py", CKPTD_HOST_MIN_RANKS="2", **world).min_ranks == 2
    assert given("--min-ranks", "4", "t.py", CKPTD_HOST_MIN_RANKS="2", **world).min_ranks == 4
    assert given("--min-ranks", "9", "t.py", **world).min_ranks == 8, "it has begun with fewer"


def test_a_job_that_reroutes_keeps_its_ranks() -> None:
    assert not given("t.py").reroute
    assert given("--reroute", "t.py").reroute
    for both in (("--reroute", "--min-ranks", "2"), ("--min-ranks", "2", "--reroute")):
        with pytest.raises(UsageError, match="leave one of them out"):
            given(*both, "t.py")


@pytest.mark.parametrize(
    ("environ", "node"),
    [({}, None), ({"GROUP_RANK": "3"}, 3), ({"SLURM_NODEID": "2"}, 2), ({"GROUP_RANK": "", "SLURM_NODEID": ""}, None)],
)  # fmt: skip
def test_which_node_this_is(environ: dict[str, str], node: int | None) -> None:
    assert given("t.py", **environ).node == node


STEP = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def test_a_task_of_srun_needs_no_other_launcher() -> None:
    place = place_in_step(STEP)
    assert {name: place[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "MASTER_ADDR": "gpu007",
    }
    options = options_from(["t.py"], STEP | place)
    assert (options.rank, options.node, options.one_machine) == (9, 1, False)
    assert options.store == ("gpu007", int(place["MASTER_PORT"]))
    assert place_in_step(STEP | {"SLURM_PROCID": "0"})["MASTER_PORT"] == place["MASTER_PORT"], (
        "all meet there"
    )
    assert place_in_step(STEP | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] != place["MASTER_PORT"]
    assert place_in_step(STEP | {"SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"


def test_what_is_set_stays_and_a_batch_script_is_no_task() -> None:
    given_by_user = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}
    assert place_in_step(STEP | given_by_user) == {"RANK": "9"}
    assert place_in_step(STEP | {"RANK": "3"}) == {}, "torchrun within srun"
    assert place_in_step({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711"}) == {}
    with pytest.raises(UsageError, match="this step of Slurm has 16 tasks"):
        place_in_step(STEP | {"WORLD_SIZE": "8"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[01-03,7],m", "n01"),
        ("r[2-3]n[10,12]", "r2n10"),
        ("gpu[5]-ib,x", "gpu5-ib"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert place_in_step(STEP | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_a_step_without_nodes_is_refused() -> None:
    with pytest.raises(UsageError, match="set MASTER_ADDR"):
        place_in_step(STEP | {"SLURM_STEP_NODELIST": ""})


def test_ranks_and_nodes_that_are_left_close_up() -> None:
    """Two ranks on each of four nodes; those of nodes 0 and 2 are lost."""
    place = {"RANK": "7", "WORLD_SIZE": "8", "ROLE_RANK": "7", "ROLE_WORLD_SIZE": "8"}
    place |= {"GROUP_RANK": "3", "GROUP_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert place_without(place, [0, 1, 4, 5], [0, 2]) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }
    assert place_without(place, [], []) == {}
    assert place_without({"RANK": "1", "WORLD_SIZE": "3"}, [0], []) == {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize("environ", [{}, {"MASTER_ADDR": "a"}, {"MASTER_PORT": "29500"}])
def test_a_store_without_address_or_port_is_none(environ: dict[str, str]) -> None:
    assert given("t.py", **environ).store == ("", 0)


def test_another_start_of_the_job_is_another_meeting_place() -> None:
    first = options_from(["t.py"], TORCHRUN)
    assert options_from(["t.py"], {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}).job == first.job
    assert options_from(["t.py"], {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}).job != first.job
    assert options_from(["t.py"], {**TORCHRUN, "MASTER_PORT": "29501"}).job != first.job


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"RANK": "x"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "not below"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"CKPTD_HOST_MAX_RESTARTS": "-1"}, "CKPTD_HOST_MAX_RESTARTS"),
        ({"CKPTD_HOST_MIN_RANKS": "two"}, "CKPTD_HOST_MIN_RANKS"),
        ({"CKPTD_HOST_SILENCE_S": "0"}, "CKPTD_HOST_SILENCE_S"),
        ({"CKPTD_HOST_SILENCE_S": "9999"}, "CKPTD_HOST_SILENCE_S"),
        ({"CKPTD_HOST_SILENCE_S": "0.5"}, "CKPTD_HOST_SILENCE_S"),
        ({"MASTER_PORT": "65536"}, "not a port"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(environ: dict[str, str], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        options_from(["t.py"], environ)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (["python", "-u", "-X", "dev", "-m", "ckptd.host", "-u"], ("-u", "-X", "dev")),
        (["python", "-mckptd.host", "t.py"], ()),
        (["python", "-c", "..."], ()),
    ],
)
def test_the_flags_of_the_interpreter(command: list[str], flags: tuple[str, ...]) -> None:
    assert interpreter_flags(command) == flags


@pytest.mark.parametrize(
    ("text", "expected"), [("", None), ("learned", None), ("off", math.inf), ("90", 90.0)]
)
def test_the_deadline_of_a_step(text: str, expected: float | None) -> None:
    assert given("t.py", CKPTD_HOST_STEP_DEADLINE_S=text).step_deadline_s == expected


@pytest.mark.parametrize("text", ["0", "-1", "soon", "1.5"])
def test_a_deadline_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="CKPTD_HOST_STEP_DEADLINE_S"):
        given("t.py", CKPTD_HOST_STEP_DEADLINE_S=text)
