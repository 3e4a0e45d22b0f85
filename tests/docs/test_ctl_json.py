"""The answers of `ckptctl --json` on a real node are what the published JSON Schema says, key by key."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ckptd.ctl.main import command_parser, main
from ckptd.ctl.usage.examples import EXAMPLES
from tests.docs.code_blocks import ROOT
from tests.docs.conftest import Node
from tests.docs.ctl_answers import ANSWERS, PAGE, SCHEMA, schema, strict, written

# After the exit code, the command; `stop` is the last one.
COMMANDS = """
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
4 unquarantine moe run-1
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
    part = {"$defs": strict(published)["$defs"], **published["properties"][name]}
    jsonschema.validate(document, part, cls=jsonschema.Draft202012Validator)


def test_the_files_are_those_of_the_types() -> None:
    """If this fails: read the change as a user would (keys stay, with their types), then
    ``python -m tests.docs.ctl_answers``."""
    assert (SCHEMA.read_text(encoding="utf-8"), PAGE.read_text(encoding="utf-8")) == written(schema())


def test_every_command_has_a_schema(published: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(published)
    assert {name.removeprefix("ckptctl ") for name in EXAMPLES} == ANSWERS.keys()
    assert published["properties"].keys() == {*ANSWERS, "error"}
    assert command_parser().prog == "ckptctl"


def lines(node: Node) -> Iterator[tuple[int, str, list[str]]]:
    """Exit code, name and words of each command."""
    there = {
        "KEY": "a" * 40,
        "NEWEST": str(node.checkpoints[-1]),
        "OLDEST": str(node.checkpoints[0]),
        "SIGNER": "5f" * 32,
        "STORE": node.store,
    }
    for line in COMMANDS.strip().splitlines():
        code, *words = line.split()
        name = max((each for each in ANSWERS if f"{' '.join(words)} ".startswith(f"{each} ")), key=len)
        yield int(code), name, [there.get(word, word) for word in words]


def test_the_answers_of_a_node(
    node: Node,
    published: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_text('{"loads": [[100, 20, 300, 80]], "nodes": 4, "slots": 2}')
    dash = [sys.executable, "-m", "ckptd.ctl", "dash", "--json"]
    with subprocess.Popen(dash, cwd=ROOT, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        check(json.loads(serving.stdout.readline()), "dash", published)
        serving.terminate()
    assert main(["doctor", "--json"]) in (0, 1)  # of this machine
    check(json.loads(capsys.readouterr().out), "doctor", published)
    seen = {"dash", "doctor"}
    for code, name, words in lines(node):
        ended = main([*words, "--json"])
        printed = capsys.readouterr()
        assert ended == code, f"{words}: {printed.out}{printed.err}"
        (document,) = map(json.loads, printed.out.splitlines())
        if isinstance(document, dict) and document.keys() == {"error", "exit_status"}:
            assert document["exit_status"] == code
            name_of_schema = "error"
        else:
            name_of_schema = name
        check(document, name_of_schema, published)
        seen.add(name)
    assert seen == ANSWERS.keys()
