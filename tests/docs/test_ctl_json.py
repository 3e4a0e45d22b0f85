"""The answers of `ckptctl --json` on a real node are what the published JSON Schema says, key by key."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.core.slots.segment_format import encode_descriptor
from ckptd.ctl.audit.audit_run import conclude
from ckptd.ctl.audit.step_copies import CopiedStep
from ckptd.ctl.main import command_parser, main
from ckptd.ctl.usage.examples import EXAMPLES
from ckptd.transport import messages as m
from ckptd.transport.wire import ControlClient
from tests.ckptd.running import MIB, attach, descriptor
from tests.docs.code_blocks import ROOT
from tests.docs.conftest import Node
from tests.docs.ctl_answers import ANSWERS, PAGE, SCHEMA, schema, strict, written
from tests.forked_child import forked_child

__all__ = ["forked_child"]

# After the exit code, the command. These are asked beside an elastic run whose replay failed …
BESIDE_RUN_2 = """
0 elastic show --job moe --run run-2
1 elastic whatif --job moe --run run-2 --lose node=a
4 unquarantine moe run-2
4 forget moe run-2 --yes
"""
# … these when it has ended; `stop` is the last one.
COMMANDS = """
0 unquarantine moe run-2
0 forget moe run-2 --yes
0 status
0 snapshots --operators
0 iterations
0 events --limit 3
0 top
0 peers
0 whatif --lose node=node-a
1 drill --job moe --rank 0
1 park --timeout 5
0 admit moe run-1 node-x
4 forget moe run-1 --yes
0 export --to model.safetensors
0 import --from model.safetensors --to start
0 elastic plan job.json
0 elastic whatif job.json --lose node=0
1 elastic whatif job.json --lose node=0,node=1,node=2
4 elastic show
0 keys new
0 keys rotate
0 keys trust node-b KEY
0 keys list
0 keys untrust node-b
0 keys new-signer
0 keys trust-signer node-b SIGNER
0 advise --model qwen3-30b-a3b --gpus 16 --expert-ranks 8 --iteration 1s --mtbf 10m
0 checkpoints list
0 checkpoints show moe run-1 NEWEST
0 checkpoints verify moe run-1
0 checkpoints pin moe run-1 NEWEST
0 checkpoints unpin moe run-1 NEWEST
0 checkpoints gc --dry-run
0 checkpoints rm moe run-1 OLDEST
4 checkpoints show moe run-1 1
0 verify STORE
0 wait
0 completion bash
0 completion names
0 support --out report.tar.gz
0 logs --lines 2
0 stop --wait
"""


@pytest.fixture
def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return found


def check(document: Any, name: str, published: dict[str, Any]) -> None:
    """Raises ValidationError; a key that is not published is an error, too."""
    import jsonschema  # takes seconds, and every worker collects every file

    part = {"$defs": strict(published)["$defs"], **published["properties"][name]}
    jsonschema.validate(document, part, cls=jsonschema.Draft202012Validator)


def test_the_files_are_those_of_the_types() -> None:
    """If this fails: read the change as a user would (keys stay, with their types), then
    ``python -m tests.docs.ctl_answers``."""
    assert (SCHEMA.read_text(encoding="utf-8"), PAGE.read_text(encoding="utf-8")) == written(schema())


def test_every_command_has_a_schema(published: dict[str, Any]) -> None:
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(published)
    assert {name.removeprefix("ckptctl ") for name in EXAMPLES} == ANSWERS.keys()
    assert published["properties"].keys() == {*ANSWERS, "error"}
    assert command_parser().prog == "ckptctl"


def lines(commands: str, node: Node) -> Iterator[tuple[int, str, list[str]]]:
    """Exit code, name and words of each command."""
    there = {
        "KEY": "a" * 40,
        "NEWEST": str(node.checkpoints[-1]),
        "OLDEST": str(node.checkpoints[0]),
        "SIGNER": "5f" * 32,
        "STORE": node.store,
    }
    for line in commands.strip().splitlines():
        code, *words = line.split()
        name = max((each for each in ANSWERS if f"{' '.join(words)} ".startswith(f"{each} ")), key=len)
        yield int(code), name, [there.get(word, word) for word in words]


@contextmanager
def run_2(node: Node) -> Iterator[None]:
    """A rank that has told of the placement of its experts, and of a replay that did not reproduce."""
    nodes = tuple(m.ElasticNode(name, 2, holds=((0, expert),)) for name, expert in (("a", 1), ("b", 2)))
    with ControlClient(node.daemon.endpoint, timeout_s=20) as client:
        attach(client, job="moe", run="run-2", needed_bytes=MIB)
        own = encode_descriptor(descriptor("moe", "run-2"))
        client.ask(m.Reserve(1 << 16, 2, own), m.Reserved)
        client.send(m.TellElastic(m.Elastic(((4, 2, 1),), nodes, expert_bytes=((100,),))))
        failure = m.ReplayFailure(5, ((5, 0, 0),), (), "result", "drop", "unknown")
        client.ask(m.TellReplay(failure), m.Done)
        yield
        client.ask(m.Detach(final=False), m.Done)


@pytest.mark.usefixtures("forked_child")
def test_the_answers_of_a_node(
    node: Node,
    published: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTD_STORE", node.store)
    Path("job.json").write_text('{"loads": [[100, 20, 300, 80]], "nodes": 4, "slots": 2}')
    dash = [sys.executable, "-m", "ckptd.ctl", "dash", "--json"]
    with subprocess.Popen(dash, cwd=ROOT, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        check(json.loads(serving.stdout.readline()), "dash", published)
        serving.terminate()
    assert main(["doctor", "--json"]) in (0, 1)  # of this machine
    check(json.loads(capsys.readouterr().out), "doctor", published)
    seen = {"dash", "doctor"}

    def ask(commands: str) -> None:
        for code, name, words in lines(commands, node):
            ended = main([*words, "--json"])
            printed = capsys.readouterr()
            assert ended == code, f"{words}: {printed.out}{printed.err}"
            (document,) = map(json.loads, printed.out.splitlines())
            if isinstance(document, dict) and document.keys() == {"error", "exit_status"}:
                assert document["exit_status"] == code
                check(document, "error", published)
            else:
                check(document, name, published)
                seen.add(name)

    with run_2(node):
        ask(BESIDE_RUN_2)
    ask(COMMANDS)
    # It runs the program that trains: tests/e2e/test_audit.py.
    found = m.AuditDifference(5, "operator a: param of a", "a", 4, 1, 1, 0.5)
    report = m.AuditReport(0, 1, 4, 5, 10, 0.1, "", "result", 1, (found,))
    answer = conclude(CopiedStep("job", "run", 1, 4, 5, 0, {}, 0.1, 1, 1), [report], [report], 3.0)
    check(json.loads(msgspec.json.encode(answer)), "audit", published)
    assert seen | {"audit"} == ANSWERS.keys()
