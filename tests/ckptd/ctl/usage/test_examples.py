"""What ``--help`` promises: examples that parse, options on both sides of the command, and exit codes."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.ctl import command
from ckptd.ctl.command import EXIT_MEANINGS
from ckptd.ctl.main import command_parser, main, parse
from ckptd.ctl.usage.examples import EXAMPLES

PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "ckptctl.md"
BEFORE = ("--json", "--endpoint", "ipc:///x", "--timeout", "7")


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of commands without subcommands."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for each in group.choices.values():
            yield from leaves(each)


def test_each_command_has_an_example_and_no_other_has() -> None:
    names = {parser.prog for parser in leaves(command_parser())}
    assert len(names) > 25, "the commands were not found"
    assert names == EXAMPLES.keys()
    for parser in leaves(command_parser()):
        assert 1 <= len(EXAMPLES[parser.prog]) <= 2
        assert re.fullmatch(r"[A-Z].*[^.]\.", parser.description or "")
        assert parser.format_help().endswith("\n  ".join(["", *EXAMPLES[parser.prog]]) + "\n")


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in EXAMPLES.items() for line in lines]
)
def test_an_example_parses(name: str, line: str) -> None:
    program, *words = shlex.split(line)
    found = parse(words)
    assert program == "ckptctl"
    places = [line.find(f" {word}") for word in name.split()[1:]]
    assert places == sorted(places)
    assert min(places) >= 0
    assert callable(found.function)
    assert found.timeout > 0


def commands(parser: argparse.ArgumentParser) -> set[str]:
    (group,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return set(group.choices)


def test_a_command_is_there_without_those_of_other_modules() -> None:
    every = commands(command_parser())
    assert len(every) > 20, "the commands were not found"
    for name in every - {"completion"}:  # it needs all of them
        found = commands(command_parser(name))
        assert name in found
        assert found < every


def test_the_help_lists_each_command_once_in_a_group() -> None:
    """There were 27 commands in one list, and those for an emergency were between those for a set-up."""
    listed = re.findall(r"^    ([a-z]+)", command_parser().format_help(), re.MULTILINE)
    assert sorted(listed) == sorted(commands(command_parser()))
    assert listed[0] == "top"
    assert "\n  set-up:\n" in command_parser().format_help()


@pytest.mark.parametrize("words", [("keys", "list"), ("--json", "--endpoint", "status", "keys", "list")])
def test_only_the_module_of_the_command_is_imported(words: tuple[str, ...]) -> None:
    program = f"""
import sys
from ckptd.ctl.main import parse
assert parse({words!r}).function.__module__ == "ckptd.ctl.keys_command"
print(*sorted(name for name in sys.modules if name.startswith("ckptd.ctl.") and name.endswith(("command", "commands"))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ckptd.ctl.command", "ckptd.ctl.keys_command"]


@pytest.mark.parametrize(
    "words", [("status",), ("keys", "list"), ("checkpoints", "list"), ("elastic", "show")]
)
def test_global_options_are_the_same_before_and_after_the_command(words: tuple[str, ...]) -> None:
    for arguments in ((*BEFORE, *words), (words[0], *BEFORE[:3], *words[1:], *BEFORE[3:]), (*words, *BEFORE)):
        found = parse(arguments)
        assert (found.json, found.endpoint, found.timeout) == (True, "ipc:///x", 7.0), arguments


def test_the_nearer_option_wins_and_the_default_is_that_of_the_command() -> None:
    assert parse(["--timeout", "7", "wait", "--timeout", "3"]).timeout == 3
    assert [parse([name]).timeout for name in ("status", "wait")] == [10, 60]
    assert parse(["status"]).json is False


@pytest.mark.parametrize(
    ("words", "prog"),
    [
        (["--json", "stauts"], "ckptctl"),
        (["status", "--json", "--bogus"], "ckptctl"),
        (["checkpoints", "show", "moe", "--json"], "ckptctl checkpoints show"),
    ],
)
def test_wrong_usage_is_a_document_too(
    capsys: pytest.CaptureFixture[str], words: list[str], prog: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert ended.value.code == found["exit_status"] == 2
    assert printed.err.startswith(f"usage: {prog} ")
    assert printed.err.endswith(f"{prog}: error: {found['error']}\n")


def test_wrong_usage_without_json_prints_nothing_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "--bogus", "--", "train", "--json"])
    assert capsys.readouterr().out == ""


def test_exit_codes_are_one_table_in_code_help_and_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    constants = {
        number for name, number in vars(command).items() if re.fullmatch("EXIT_(?!MEAN)[A-Z_]+", name)
    }
    assert {0, *constants} == EXIT_MEANINGS.keys()
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    table = PAGE.read_text().partition("| exit code of `ckptctl` | meaning |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE))
    assert {int(code) for code in rows} == EXIT_MEANINGS.keys()
    for code, meaning in EXIT_MEANINGS.items():
        assert f"{code}: {meaning}" in shown
        assert rows[str(code)].startswith(meaning)
