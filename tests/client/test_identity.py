"""Who this trainer is: arguments before torchrun's environment before defaults."""

from __future__ import annotations

import pytest

from ckptd.client.identity import Identity, identify


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["/home/me/my train.py"])


def test_alone() -> None:
    assert identify(None, None, None, None) == Identity("my-train", "default", 0, 1)


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
