"""Imports are found in a script's text, and made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.host.zygotes.script_imports import Imported, import_named, imports_of_script
from ckptd.host.zygotes.script_main import Script

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return written


def found_in(path: Path) -> list[Imported]:
    return imports_of_script(Script(str(path), False, ()))


def test_statements_of_the_module_are_found_and_none_under_a_condition(write: Write) -> None:
    script = write(
        "train.py",
        "from __future__ import annotations\n"
        "import json, xml.dom as dom\n"
        "from decimal import Decimal as D, getcontext\n"
        "from string import *\n"
        "try:\n    import tomllib\nexcept ImportError:\n    import never\n"
        "if json:\n    import also_never\n"
        "def main():\n    import late\n"
        "import json\n",
    )
    assert found_in(script) == [
        ("json", ()),
        ("xml.dom", ()),
        ("decimal", ("Decimal", "getcontext")),
        ("string", ()),
        ("tomllib", ()),
    ]


def test_what_its_own_modules_import_is_found_without_running_them(write: Write) -> None:
    script = write("train.py", "from parts import model\nimport helper\nimport json\n")
    write("helper.py", "import decimal\nraise SystemExit('run')\n")
    write("parts/__init__.py", "import fractions\n")
    write("parts/model.py", "from . import layers\nfrom .layers import Layer\nimport colorsys\n")
    write("parts/layers.py", "import statistics, helper, train\n")
    assert {each.module for each in found_in(script)} == {
        *("json", "decimal", "fractions", "colorsys", "statistics")
    }
    assert not {"helper", "parts", "parts.model"} & sys.modules.keys()


def test_of_a_module_that_is_run_imports_are_relative_to_its_package(write: Write) -> None:
    write("job/__init__.py", "")
    write("job/train.py", "from .model import Net\nfrom ..above import nothing\n")
    write("job/model.py", "import colorsys\n")
    assert imports_of_script(Script("job.train", True, ())) == [("colorsys", ())]


@pytest.mark.parametrize("text", ["import (", "", None])
def test_a_script_that_cannot_be_read_has_none(write: Write, tmp_path: Path, text: str | None) -> None:
    script = tmp_path / "absent.py" if text is None else write("train.py", text)
    assert found_in(script) == []


def test_parts_that_a_package_loads_when_asked_are_loaded(write: Write, tmp_path: Path) -> None:
    """In place of a script's own, the modules here stand for installed ones."""
    write(
        "lazy_of_test/__init__.py",
        "def __getattr__(name):\n    if name != 'Trainer':\n        raise AttributeError(name)\n"
        "    from lazy_of_test.parts import Trainer\n    return Trainer\n",
    )
    write("lazy_of_test/parts.py", "Trainer = 1")
    write("lazy_of_test/plain.py", "")
    write("broken_of_test.py", "raise SystemExit(3)")
    failed = import_named(
        [
            Imported("lazy_of_test", ("Trainer",)),
            Imported("lazy_of_test", ("plain",)),
            Imported("lazy_of_test", ("nothing",)),
            Imported("broken_of_test", ()),
        ]
    )
    assert failed == ["lazy_of_test", "broken_of_test"]
    assert {"lazy_of_test.parts", "lazy_of_test.plain"} <= sys.modules.keys()
    for name in ("lazy_of_test", "lazy_of_test.parts", "lazy_of_test.plain"):
        del sys.modules[name]
