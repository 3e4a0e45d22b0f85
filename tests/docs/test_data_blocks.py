"""Blocks of settings and of data are read by what reads them, and no block is of an unknown language."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ckptd.config.daemon_config import load_config
from ckptd.ctl.main import main
from tests.docs.code_blocks import LANGUAGES, CodeBlock, blocks_of, code_blocks, pages


def test_every_block_is_of_a_language_that_is_tested() -> None:
    blocks = [block for page in pages() for block in blocks_of(page)]
    assert len(blocks) > 50, "the blocks were not found"
    assert [str(block) for block in blocks if block.language not in LANGUAGES] == []
    fences = sum(page.read_text(encoding="utf-8").count("```") for page in pages())
    assert fences == 2 * len(blocks), "a fence is not closed, or not at the column at which it was opened"


@pytest.mark.parametrize("block", code_blocks("toml"), ids=str)
def test_settings_are_settings(block: CodeBlock, tmp_path: Path) -> None:
    path = tmp_path / "ckptd.toml"
    path.write_text(block.text)
    path.chmod(0o600)
    assert load_config(file=str(path), environ={}).warnings == ()


@pytest.mark.parametrize("block", code_blocks("yaml"), ids=str)
def test_yaml_is_yaml(block: CodeBlock) -> None:
    assert all(document for document in yaml.safe_load_all(block.text))


@pytest.mark.parametrize("block", code_blocks("json"), ids=str)
def test_json_is_json(block: CodeBlock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a situation for `ckptctl elastic plan` is one."""
    given = json.loads(block.text)
    if "loads" in given:
        path = tmp_path / "situation.json"
        path.write_text(block.text)
        assert main(["elastic", "plan", str(path)]) == 0, capsys.readouterr().err
