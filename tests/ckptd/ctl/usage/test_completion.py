"""The completion scripts, sourced by real shells, with the names of a real daemon."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.ctl.main import main
from ckptd.transport import messages as m
from tests.ckptd.running import ROOT, DaemonProcess, running_daemon
from tests.long import long

# Each prints what a shell would offer after the words of its arguments, the last of which is not complete.
SHELLS = {
    "bash": """
        source <(ckptctl completion bash)
        COMP_WORDS=(ckptctl "$@") COMP_CWORD=$#
        _ckptctl
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    # As bashcompinit calls a function of bash; what it offers is in the same variable.
    "zsh": """
        source <(ckptctl completion zsh)
        emulate sh
        setopt kshglob noshglob braceexpand ksharrays
        COMP_WORDS=(ckptctl "$@") COMP_CWORD=$#
        _ckptctl
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "fish": """
        ckptctl completion fish | source
        complete -C "ckptctl $WORDS" | string replace -r '\\t.*' ''
    """,
}
COMMANDS = {"zsh": ("-f",), "fish": ("--no-config",), "bash": ("--norc",)}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """With a trainer of run moe/run-1."""
    with running_daemon() as started, started.client() as client:
        client.ask(m.Hello("1", 1), m.Welcome)
        client.ask(m.Attach("moe", "run-1", 0, 1, "t", 1, 0), m.Attached)
        yield started


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed here")
    return str(request.param)


def offered(shell: str, daemon: DaemonProcess, *words: str) -> set[str]:
    """What the shell offers; `ckptctl` is that of this tree, which has written the shell's script once."""
    own = daemon.folder / "bin"
    own.mkdir(exist_ok=True)
    script = own / f"completion.{shell}"
    if not script.exists():
        script.write_text(daemon.ctl("completion", shell).stdout)
    program = own / "ckptctl"
    program.write_text(
        f'''#!/bin/sh
        [ "$*" = "completion {shell}" ] && exec cat "{script}"
        exec "{sys.executable}" -m ckptd.ctl "$@"
        '''
    )
    program.chmod(0o755)
    env = daemon.env | {
        "PATH": f"{own}:{daemon.env['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(daemon.folder),
        "WORDS": " ".join(words),  # fish would read options among its own arguments
    }
    arguments = () if shell == "fish" else ("ckptctl", *words)
    command = [shell, *COMMANDS[shell], "-c", SHELLS[shell], *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    found = set(done.stdout.split())
    # In zsh the caller of the function drops what does not fit.
    return {word for word in found if word.startswith(words[-1])} if shell == "zsh" else found


def test_commands_options_and_choices_are_offered_where_they_may_stand(
    shell: str, daemon: DaemonProcess
) -> None:
    assert offered(shell, daemon, "st") == {"status", "stop"}
    assert {"status", "keys", "checkpoints"} <= offered(shell, daemon, "--json", "")
    of_keys = offered(shell, daemon, "keys", "")
    assert of_keys >= {"list", "new", "trust"}
    assert "status" not in of_keys
    assert offered(shell, daemon, "keys", "trust", "--keep") == {"--keep-previous-hours"}
    assert offered(shell, daemon, "--timeout", "5", "snapshots", "--op") == {"--operators"}
    assert offered(shell, daemon, "export", "--format", "") == {"safetensors", "hf", "dcp"}
    assert offered(shell, daemon, "completion", "f") == {"fish"}


@pytest.mark.parametrize(
    "shell", ["bash", pytest.param("zsh", marks=long), pytest.param("fish", marks=long)], indirect=True
)
def test_jobs_and_runs_are_those_of_the_daemon(shell: str, daemon: DaemonProcess) -> None:
    assert daemon.ctl("completion", "names").stdout == "moe/run-1\n"
    assert offered(shell, daemon, "snapshots", "--job", "") == {"moe"}
    assert offered(shell, daemon, "snapshots", "--job", "moe", "--run", "r") == {"run-1"}
    assert "moe" in offered(shell, daemon, "park", "m")
    assert "run-1" in offered(shell, daemon, "forget", "moe", "r")


def test_without_a_daemon_no_name_is_offered_and_no_error_is_shown(shell: str, daemon: DaemonProcess) -> None:
    gone = DaemonProcess()
    try:
        assert "moe" not in offered(shell, gone, "snapshots", "--job", "m")
    finally:
        gone.clean_up()


def test_names_of_files_are_left_to_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    assert "complete -o default -F _ckptctl ckptctl" in script
    assert '/export/--to) choices="" ;;' in script
