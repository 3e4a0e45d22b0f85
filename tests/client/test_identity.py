"""Who this trainer is: arguments before torchrun's environment before defaults."""

from __future__ import annotations

import re

import pytest

from ckptd.client.identity import Identity, identify


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "CKPTD_DAEMON_USER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["/home/me/my train.py"])


def test_alone() -> None:
    alone = identify(None, None, None, None)
    assert re.fullmatch(r"my-train-[0-9a-f]{8}", alone.job)
    assert (alone.run, alone.rank, alone.world_size) == ("default", 0, 1)
    assert "named after my train.py" in str(alone)
    assert identify(None, None, None, None) == alone


def test_scripts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By where they lie. A name that is too long is cut, and has its digest all the same."""
    here = identify(None, None, None, None).job
    monkeypatch.setattr("sys.argv", ["/home/you/my train.py"])
    assert identify(None, None, None, None).job != here
    monkeypatch.setattr("sys.argv", ["/home/you/" + "x" * 80 + ".py"])
    assert re.fullmatch(r"x{55}-[0-9a-f]{8}", identify(None, None, None, None).job)


@pytest.mark.parametrize(
    ("runs_it", "prefix"), [("54101", "u4294967294."), ("4294967294", ""), ("nobody-here", "")]
)
def test_users_of_one_daemon_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, runs_it: str, prefix: str
) -> None:
    """Their script may be the same file, started in the same folder."""
    alone = identify(None, None, None, None).job
    monkeypatch.setattr("os.geteuid", lambda: 4_294_967_294)
    monkeypatch.setenv("CKPTD_DAEMON_USER", runs_it)
    assert identify(None, None, None, None).job == prefix + alone
    assert identify("gpt", None, None, None).job == "gpt"
    monkeypatch.setattr("sys.argv", ["/home/you/" + "x" * 80 + ".py"])
    job = identify(None, None, None, None).job
    assert job.startswith(f"{prefix}x")
    assert len(job) == 64


@pytest.mark.parametrize(
    "made_up",
    ["0b0a7a3c-6e1b-4d4e-9d58-0f3f6a1c2b3d", "268291983018921029384756610293847561029"],
    ids=["standalone", "launcher"],  # the test's name is in the environment
)
def test_an_id_that_nobody_chose_is_none(monkeypatch: pytest.MonkeyPatch, made_up: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", made_up)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/{made_up}_x/error.json")
    assert identify("j", None, None, None).run == "default"
    monkeypatch.setenv("PET_RDZV_ID", made_up)
    assert identify("j", None, None, None).run == made_up
    monkeypatch.delenv("PET_RDZV_ID")
    # Nodes that meet under an id were given it.
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert identify("j", None, None, None).run == made_up


def test_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "exp/7")
    assert identify("j", None, None, None) == Identity("j", "exp-7", 3, 8)


def test_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert identify("j", "r", 1, 2) == Identity("j", "r", 1, 2)


def test_torchruns_placeholder_is_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert identify("j", None, None, None).run == "default"


@pytest.mark.parametrize("name", ["", "a/b", "ä", "x" * 65, "a b"])
def test_names_that_cannot_be_file_names(name: str) -> None:
    with pytest.raises(ValueError, match="use 1 to 64 letters"):
        identify(name, "r", 0, 1)
    with pytest.raises(ValueError, match="use 1 to 64 letters"):
        identify("j", name, 0, 1)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0)])
def test_ranks_out_of_range(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"rank={rank} is not in \[0, world_size={world_size}\)"):
        identify("j", "r", rank, world_size)


def test_an_environment_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "zero")
    with pytest.raises(ValueError, match="environment variable RANK is 'zero', not a number"):
        identify("j", "r", None, None)


def test_metadata_are_strings() -> None:
    assert Identity("j", "r", 1, 2).metadata() == {
        "job": "j",
        "run": "r",
        "rank": "1",
        "world_size": "2",
    }
