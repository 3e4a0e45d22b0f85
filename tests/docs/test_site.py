"""The site is built without a warning; its pages load nothing from elsewhere."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import ckptd.client
from ckptd.client import (
    Checkpointer,
    DaemonOptions,
    LayoutOptions,
    PartialOptions,
    RecoveryOptions,
    RunOptions,
    SnapshotOptions,
)
from ckptd.ctl.usage.examples import EXAMPLES
from tests.docs.code_blocks import ROOT

GROUPS = (RunOptions, DaemonOptions, SnapshotOptions, PartialOptions, RecoveryOptions, LayoutOptions)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (extra docs)")
def test_the_site_is_built(tmp_path: Path) -> None:
    """With every name of the public API, every command, and a copy of the files that pages link to."""
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (site / "reference/api.html").read_text(encoding="utf-8")
    assert [name for name in ckptd.client.__all__ if f'id="ckptd.client.{name}"' not in page] == []
    missing = [
        f"{g.__name__}.{f.name}" for g in GROUPS for f in fields(g) if f'{g.__name__}.{f.name}"' not in page
    ]
    assert missing == []
    page = (site / "reference/ckptctl.html").read_text(encoding="utf-8")
    assert [command for command in EXAMPLES if f"usage: {command} [" not in page] == []
    assert (site / "source/deploy/ckptd.toml").read_text() == (ROOT / "deploy/ckptd.toml").read_text()


def test_every_argument_is_documented() -> None:
    """Those of `Checkpointer` in its docstring, each field of an option group by a text below it."""
    text = inspect.getdoc(Checkpointer) or ""
    given = [name for name in inspect.signature(Checkpointer).parameters if name != "unknown"]
    assert len(given) == 8
    assert [name for name in given if f"\n    {name}: " not in text] == []
    for group in GROUPS:
        assert documented(group) == {field.name for field in fields(group)}, group


def documented(group: type[Any]) -> set[str]:
    """The fields that a string follows."""
    (tree,) = ast.parse(inspect.getsource(group)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
