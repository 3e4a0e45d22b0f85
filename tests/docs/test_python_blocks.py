"""Every Python block of the documentation runs, on one tiny training and a real daemon."""

from __future__ import annotations

import ast
import contextlib
import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch.distributed as dist

from ckptd.client import Checkpointer
from tests.docs.code_blocks import CodeBlock, code_blocks
from tests.docs.preparations import NOT_RUN, PREPARATIONS
from tests.docs.training import STEPS, names_of_a_training
from tests.e2e.harness import DaemonProcess
from tests.ports import free_port

BLOCKS = code_blocks("python")


@contextlib.contextmanager
def launched(block: CodeBlock, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """As by torchrun with one rank, in a process group if the block does not make it itself."""
    # Each block is a run of its own: they have other models.
    patch.setenv("TORCHELASTIC_RUN_ID", re.sub(r"[^\w.-]", "-", str(block)))
    port = free_port()
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in names.items():
        patch.setenv(name, str(value))
    if "init_process_group(" not in block.text:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def beginning(texts: dict[str, str], block: CodeBlock) -> str | None:
    """The value of the one key that is a line of the block."""
    found = [texts[key] for key in texts if key in block.text]
    assert len(found) <= 1, f"{block}: several keys fit: {found}"
    return found[0] if found else None


@pytest.mark.parametrize("block", [b for b in BLOCKS if beginning(NOT_RUN, b) is None], ids=str)
def test_a_block_runs(
    block: CodeBlock, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    names = names_of_a_training()
    code = compile("\n" * block.line + block.text, block.page, "exec")
    with warnings.catch_warnings(), launched(block, monkeypatch), contextlib.closing(_Closing(names)):
        if "lightning" in block.text:
            warnings.simplefilter("ignore")  # its own, about this machine
        execute(beginning(PREPARATIONS, block) or "", names)
        if "ckpt" not in names and re.search(r"\bckpt\.", block.text) and "ckpt = " not in block.text:
            execute("ckpt = Checkpointer(model, optimizer)", names)
        execute(code, names)
        if "in ckpt.steps(total)" in block.text:
            assert names["ckpt"].step == STEPS


def execute(code: str | CodeType, names: dict[str, Any]) -> None:
    exec(code, names)  # noqa: S102 - what runs is this repository's


class _Closing:
    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def close(self) -> None:
        for value in [*self._names.values()]:
            if isinstance(value, Checkpointer):
                value.close()


@pytest.mark.parametrize("block", [b for b in BLOCKS if beginning(NOT_RUN, b) is not None], ids=str)
def test_a_block_that_is_not_run_is_a_program(block: CodeBlock) -> None:
    """What it imports is there."""
    program = ast.parse(block.text)
    for library, distribution in (("megatron", "megatron-core"), ("deepspeed", "deepspeed")):
        if library in block.text and find_spec(library) is None:
            pytest.skip(f"{distribution} is not installed: pip install 'ckptd[{library}]'")
    with warnings.catch_warnings():
        if "megatron" in block.text:
            warnings.simplefilter("ignore")  # its own, about what it does not find
        for node in program.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                execute(compile(ast.Module([node], []), block.page, "exec"), {})


def test_no_preparation_and_no_exception_is_left_over() -> None:
    texts = "\n".join(block.text for block in BLOCKS)
    assert [key for key in (*PREPARATIONS, *NOT_RUN) if key not in texts] == []
