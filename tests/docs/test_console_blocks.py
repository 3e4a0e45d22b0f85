"""Every command in the documentation: those of ckptd are run on a real node, the syntax of all is checked."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from ckptd import cli
from ckptd.config.daemon_config import load_config
from ckptd.ctl import main as ctl
from tests.docs.code_blocks import ROOT, CodeBlock, code_blocks, pages
from tests.docs.conftest import Node

# What runs whole, in order: tests/docs/test_tutorial.py.
TUTORIAL = "docs/tutorial.md"
BLOCKS = code_blocks("console")
_PROMPT = re.compile(r"^(?:[\w.-]+)?[$#] (.+)$")
_LEFT_OUT = "…"  # a page shows the beginning of a key or a password

# Programs that are not ours, or that a test must not start: only their syntax is checked.
NOT_RUN = {
    "/opt/ckptd/bin/pip": "installs",
    "cat": "shows or writes a file of the reader",
    "curl": "asks a daemon or a service of the reader",
    "docker": "needs a container engine",
    "done": "the end of a loop",
    "for": "the shell's: what it repeats is run once",
    "grep": "reads what another program prints",
    "helm": "needs a cluster",
    "install": "writes to the system's folders",
    "kubectl": "needs a cluster",
    "ln": "writes to the system's folders",
    "make": "runs for minutes; the target is looked for in the Makefile",
    "pip": "installs; tests/test_packaging.py builds and installs the wheel",
    "python": "runs for minutes, or is the reader's script; a module of ours is looked for",
    "python3": "installs",
    "sbatch": "needs a cluster",
    "scontrol": "needs a cluster",
    "systemctl": "changes the system; tests/systemd.py runs the units",
    "systemd-sysusers": "changes the system",
    "torchrun": "several processes; tests/e2e start them",
    "usermod": "changes the system",
}
# Commands of ckptctl that are parsed, and not run.
CTL_NOT_RUN = {
    "audit": "starts the reader's program: tests/e2e/test_audit.py",
    "stop": "ends the daemon of the other commands: tests/ckptd/ctl/lifecycle",
}
# What these print is the same each time, and is compared with what the page shows.
EXACT = ("ckptctl elastic plan", "ckptctl advise --model")


@dataclass(frozen=True, slots=True)
class Command:
    """One line with its prompt, as the reader types it, and the lines that follow: what it prints."""

    block: CodeBlock
    line: str
    output: str

    def __str__(self) -> str:
        return f"{self.block.page}: {self.line}"

    def programs(self) -> Iterator[tuple[dict[str, str], list[str]]]:
        """The variables and the words of each program of the line."""
        text = self.line.partition("\n")[0] if "<<" in self.line else self.line.replace("do\n", "do ")
        lexer = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars=True)
        lexer.whitespace_split, words = True, list[str]()
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                variables = {}
                words = words[1:] if words[:1] == ["do"] else words
                while words and (found := re.fullmatch(r"(\w+)\+?=(.*)", words[0], re.DOTALL)):
                    variables[found[1]] = found[2]
                    words.pop(0)
                if words or variables:
                    yield variables, words
                words = []
            else:
                words.append(word)


def commands() -> list[Command]:
    found = []
    for block in BLOCKS:
        line, output = "", list[str]()
        for text in [*block.text.replace("\\\n", " ").splitlines(), "$ end"]:
            if _goes_on(line):
                line += f"\n{text}"
            elif prompt := _PROMPT.match(text):
                if line:
                    found.append(Command(block, line, "\n".join(output).strip()))
                line, output = prompt[1], []
            else:
                assert line, f"{block}: a console block begins with a prompt: {text}"
                output.append(text.rstrip())
    return found


def _goes_on(line: str) -> bool:
    """Whether the next line of a page belongs to it: a loop, or a document."""
    if found := re.search(r"<<'(\w+)'", line):
        return not line.endswith(f"\n{found[1]}")
    return line.startswith("for ") and not line.endswith("done")


COMMANDS = commands()


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_one(command: Command) -> None:
    """Its syntax, its programs, the settings of ckptd that it sets, and its modules and targets."""
    subprocess.run(["bash", "-n", "-c", command.line], check=True)
    for variables, words in command.programs():
        ours = {name: value for name, value in variables.items() if name.startswith("CKPTD_")}
        words = [word for word in words if "=" in word] if words[:1] == ["export"] else words
        if words and all(re.match(r"\w+=", word) for word in words):
            ours |= {k: v for k, _, v in (word.partition("=") for word in words) if k.startswith("CKPTD_")}
            words = []
        load_config(environ={"CKPTD_CONFIG": "/dev/null", **ours}) if ours else None
        if not words or words[0] in ("ckptctl", "ckptd", "echo"):
            continue
        assert words[0] in NOT_RUN, f"{command}: say in NOT_RUN why {words[0]} is not run"
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert all(re.search(rf"^{t}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for t in targets)
        for module in re.findall(r"-m (?:-- )?((?:ckptd|bench|examples)\b[\w.]*)", command.line):
            assert importlib.util.find_spec(module) is not None, f"{command}: there is no {module}"


def test_no_reason_is_left_over() -> None:
    typed = [words for command in COMMANDS for _, words in command.programs() if words]
    assert NOT_RUN.keys() - {words[0] for words in typed} == set()
    assert CTL_NOT_RUN.keys() - {words[1] for words in typed if words[0] == "ckptctl"} == set()
    assert tuple(e for e in EXACT if any(c.line.startswith(e) and c.output for c in COMMANDS)) == EXACT


def test_what_a_page_installs_is_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        extra
        for page in pages()
        for extras in re.findall(r"(?:\bckptd|'\.)\[([^\]]+)\]", page.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert {"elastic", "s3"} <= named
    assert named - project["optional-dependencies"].keys() == set()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by dcp.save, in this process alone
def test_the_commands_of_ckptd_run(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the pages, each block in a folder of its own."""
    monkeypatch.setenv("CKPTD_STORE", node.store)
    ran = 0
    for command in (each for each in COMMANDS if each.block.page != TUTORIAL):
        folder = tmp_path / f"{command.block.page.replace('/', '-')}-{command.block.line}"
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        if command.line.startswith("echo "):
            subprocess.run(["bash", "-c", command.line.partition("&&")[0]], check=True)
        if "--from checkpoints/2" in command.line:
            model = nn.Linear(2, 2)
            state = get_state_dict(model, torch.optim.AdamW(model.parameters()))
            save({"app": dict(zip(("model", "optim"), state, strict=True))}, checkpoint_id="checkpoints/2")
        for variables, words in command.programs():
            if words[:1] in (["ckptctl"], ["ckptd"]):
                ran += run(words, variables, command, node, monkeypatch, capsys)
    assert ran > 10


def run(
    words: list[str],
    variables: dict[str, str],
    command: Command,
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> int:
    """Run one program in this process; 1 if it was run, and not only parsed."""
    given = [there(word, node) for word in words[1:]]
    if words[0] == "ckptd":
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert cli.main([*given, "--print-config"]) == 0, command
        capsys.readouterr()
        return 1
    parsed = ctl.parse(given)
    follows = getattr(parsed, "follow", False) or getattr(parsed, "refresh_s", None)
    if _LEFT_OUT in command.line or follows or words[1] in CTL_NOT_RUN:
        return 0
    status = ctl.main(given)
    printed = capsys.readouterr()
    assert status == 0, f"{command}: {printed.err}"
    if command.line.startswith(EXACT):
        assert printed.out.split() == command.output.split(), command
    return 1


def there(word: str, node: Node) -> str:
    """What this node has instead of a name of the page."""
    oldest, newest = str(node.checkpoints[0]), str(node.checkpoints[-1])
    return {"s3://bucket/prefix": node.store, "100": oldest, "120": newest}.get(word, word)
