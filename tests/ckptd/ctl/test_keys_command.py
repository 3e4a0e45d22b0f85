"""`ckptctl keys` as an operator uses it: on folders, with no daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.ctl.main import main
from ckptd.transport.access.keys import Keys

OTHER = "A" * 40  # forty characters of Z85 are a key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def keys(folder: Path, *arguments: str) -> int:
    """The exit code."""
    action, *rest = arguments
    try:
        return main(["keys", action, "--keys-dir", str(folder), *rest])
    except SystemExit as error:
        return int(error.code or 0)


def test_a_pair_is_made_once_and_the_secret_stays_secret(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(folder, "new") == 0
    shown = capsys.readouterr().out.strip()
    made = Keys.load(folder)
    assert shown == made.public
    assert made.secret not in shown
    assert (folder / "node.key_secret").stat().st_mode & 0o077 == 0
    assert keys(folder, "new") != 0, "an existing key is never overwritten"
    assert "exists and is not overwritten: `ckptctl keys list` prints the public" in capsys.readouterr().err
    assert Keys.load(folder).public == made.public


def test_trusting_by_key_and_by_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys(folder, "new")
    keys(tmp_path / "other", "new")
    public = Keys.load(tmp_path / "other").public
    assert keys(folder, "trust", "n1", str(tmp_path / "other" / "node.key")) == 0
    assert keys(folder, "trust", "n2", OTHER) == 0
    capsys.readouterr()
    assert keys(folder, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"this node: {Keys.load(folder).public}",
        f"n1: {public}",
        f"n2: {OTHER}",
    ]
    assert keys(folder, "list", "--json") == 0
    assert json.loads(capsys.readouterr().out)["trusted"] == {"n1": public, "n2": OTHER}


def test_a_new_key_of_a_node_replaces_the_old_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys(folder, "new")
    keys(folder, "trust", "n1", OTHER)
    keys(tmp_path / "other", "new")
    assert keys(folder, "trust", "n1", Keys.load(tmp_path / "other").public) == 0
    capsys.readouterr()
    keys(folder, "list")
    assert OTHER not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("node", "key", "reason"),
    [
        ("n1", "too-short", "40 characters of Z85"),
        ("n1", "\\" * 40, "40 characters of Z85"),
        ("n1", "A" * 41, "40 characters of Z85"),
        ("../n1", OTHER, "not a node name"),
        ("", OTHER, "not a node name"),
        ("n" * 65, OTHER, "not a node name"),
    ],
)
def test_what_is_no_key_or_name_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], node: str, key: str, reason: str
) -> None:
    keys(folder, "new")
    capsys.readouterr()
    assert keys(folder, "trust", node, key) == 2
    assert reason in capsys.readouterr().err
    assert not list((folder / "trusted").iterdir())


def test_a_file_that_holds_no_key_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys(folder, "new")
    for content in (b"nothing", b"\xff\xfe\x00", b'public-key = "short"'):
        path = tmp_path / "some.key"
        path.write_bytes(content)
        capsys.readouterr()
        assert keys(folder, "trust", "n1", str(path)) == 2
        assert capsys.readouterr().err.strip()
    assert not list((folder / "trusted").iterdir())


def test_one_key_is_one_node(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys(folder, "new")
    keys(folder, "trust", "n1", OTHER)
    capsys.readouterr()
    assert keys(folder, "trust", "n2", OTHER) == 2
    assert "trusted as 'n1' already" in capsys.readouterr().err


def test_a_list_without_a_key_says_where_it_looked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(folder, "list") == 2
    assert str(folder) in capsys.readouterr().err


def test_a_secret_that_others_may_read_is_not_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys(folder, "new")
    (folder / "node.key_secret").chmod(0o644)
    assert keys(folder, "list") == 2
    assert "chmod 600" in capsys.readouterr().err


def test_wrong_commands_say_how(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(folder, "frobnicate") == 2
    assert keys(folder, "trust", "n1") == 2
    assert "usage" in capsys.readouterr().err


def test_the_folder_is_the_configured_one(folder: Path) -> None:
    """Without --keys-dir; as a process of its own, since the environment is read."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    done = subprocess.run(
        [sys.executable, "-m", "ckptd.ctl", "keys", "new"],
        env={**env, "CKPTD_KEYS_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == Keys.load(folder).public


def test_a_node_is_untrusted_and_a_key_rotated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys(folder, "new")
    first = Keys.load(folder).public
    assert keys(folder, "rotate") == 0
    assert capsys.readouterr().out.splitlines() == [first, Keys.load(folder).public]
    assert Keys.load(folder).public != first
    assert keys(folder, "trust", "n1", OTHER, "--valid-days", "0.5") == 0
    assert keys(folder, "trust", "n1", "B" * 40, "--keep-previous-hours", "2") == 0
    capsys.readouterr()
    assert keys(folder, "list") == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0] == f"n1: {'B' * 40}"
    assert lines[1].startswith(f"n1: {OTHER} (previous), expires in ")
    assert keys(folder, "untrust", "n1") == 0
    assert keys(folder, "untrust", "n1") != 0
    assert "'n1' is not trusted" in capsys.readouterr().err
    assert keys(folder, "list", "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["trusted"], told["keys"]) == ({}, [])
