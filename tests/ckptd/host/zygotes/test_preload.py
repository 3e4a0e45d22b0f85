"""What is imported ahead of a script, and what must not be."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.host.zygotes.preload import (
    ImportRecorder,
    SourceFiles,
    environment_set_by,
    generator_marks,
    import_ahead,
    import_recorded,
    names_in,
    noting_reads,
    read_record,
    write_record,
)
from ckptd.host.zygotes.script_main import Script
from tests.ckptd.host.hosting import ROOT


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def recorded(folder: Path, work: str) -> list[str]:
    with (folder / "imports").open("w+b") as file:
        recorder = ImportRecorder(file.fileno())
        sys.meta_path.insert(0, recorder)
        try:
            exec(work, {})  # noqa: S102 - ours
        finally:
            sys.meta_path.remove(recorder)
        recorder.flush()
        return names_in((folder / "imports").read_bytes())


def test_imports_are_recorded_in_their_order(modules: Path) -> None:
    (modules / "first_one.py").write_text("import second_one")
    (modules / "second_one.py").write_text("")
    assert recorded(modules, "import first_one") == ["first_one", "second_one"]


def test_what_is_only_looked_for_or_fails_is_not_recorded(modules: Path) -> None:
    """transformers looks for tensorflow so: a zygote must not import that."""
    (modules / "heavy_one.py").write_text("raise SystemExit('imported')")
    (modules / "failing_one.py").write_text("raise ImportError('no')")
    work = (
        "import importlib.util\nassert importlib.util.find_spec('heavy_one')\n"
        "try:\n    import failing_one\nexcept ImportError:\n    pass"
    )
    assert recorded(modules, work) == []


def test_a_worker_that_was_forked_records_nothing(modules: Path) -> None:
    (modules / "of_child.py").write_text("")
    work = "import os\nif (pid := os.fork()) == 0:\n    import of_child\n    os._exit(0)\nos.waitpid(pid, 0)"
    assert recorded(modules, work) == []


def test_a_script_may_close_every_descriptor(modules: Path) -> None:
    (modules / "closer.py").write_text("")
    recorder = ImportRecorder(fd := os.dup(0))
    os.close(fd)
    recorder.find_spec("closer")
    importlib.import_module("closer")
    recorder.flush()
    recorder.flush()


def test_names_from_outside_are_names() -> None:
    data = (
        b"torch\ntorch\n__main__\nckptd.host.zygotes.zygote\nckptd.client\nos; evil\n../x\na..b\n\xff\ntorn"
    )
    assert names_in(data) == ["torch", "ckptd.client"]


def test_a_record_is_private_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_record(path, ["torch", "json"], "threads")
    assert read_record(path) == (["torch", "json"], "threads")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "[]", "{", '{"modules": 5, "unfit": ""}', '{"modules": []}', "null"])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "record").write_text(text)
    assert read_record(tmp_path / "record") == ([], "")
    assert read_record(tmp_path / "missing") == ([], "")


def test_a_record_behind_a_link_is_none(tmp_path: Path) -> None:
    write_record(tmp_path / "real", ["torch"], "")
    (tmp_path / "record").symlink_to("real")
    assert read_record(tmp_path / "record") == ([], "")


def test_modules_of_the_scripts_folder_are_left_to_the_script(modules: Path) -> None:
    project = modules / "project"
    (project / "inner").mkdir(parents=True)
    (project / "train.py").write_text("")
    (project / "helper_one.py").write_text("")
    (project / "inner" / "__init__.py").write_text("")
    (modules / "library_one.py").write_text("")
    sys.path.insert(0, str(project))
    try:
        failed = import_ahead(
            ["helper_one", "inner", "library_one", "not_there"], Script(str(project / "train.py"), False, ())
        )
    finally:
        sys.path.remove(str(project))
    assert failed == ["not_there"]
    assert "library_one" in sys.modules
    assert not {"helper_one", "inner"} & sys.modules.keys()


def test_an_import_that_fails_or_exits_ends_nothing(modules: Path) -> None:
    (modules / "exiting.py").write_text("raise SystemExit(3)")
    (modules / "erring.py").write_text("1 / 0")
    assert import_ahead(["exiting", "erring"], Script("-", False, ())) == ["exiting", "erring"]


def test_a_source_file_that_changes_is_named(modules: Path) -> None:
    path = modules / "changing.py"
    path.write_text("x = 1")
    importlib.import_module("changing")
    files = SourceFiles()
    files.note()
    assert files.changed() == ""
    path.write_text("x = 12")
    assert files.changed() == str(path)
    path.unlink()
    assert files.changed() == str(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nos.environ['A'] = '1'\nimport torch", ["A"]),
        ("import os\nimport torch\nos.environ['A'] = '1'", []),
        ("from os import environ\nenviron.setdefault('A', '1')\nimport torch", ["A"]),
        ("import os\nos.environ.update(A='1')\nimport torch", ["a variable"]),
        ("import os\nif 1:\n    os.putenv('B', '2')\nimport torch", ["B"]),
        ("import os\ndel os.environ['A']\nimport torch", ["A"]),
        ("import os\ndef f():\n    os.environ['A'] = '1'\nimport torch", []),
        ("import os\nx = os.environ['A'], os.environ.get('B')\nimport torch", []),
        ("not python", []),
    ],
)
def test_variables_that_a_script_sets_before_its_imports(tmp_path: Path, text: str, found: list[str]) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    assert environment_set_by(str(path)) == found


def test_variables_that_a_function_sets_before_it_imports_torch(tmp_path: Path) -> None:
    """Torch is imported ahead in any case; of other modules the trainer tells what it has set before."""
    path = tmp_path / "script.py"
    path.write_text(
        "import os\n"
        "def late():\n    import torch\n    os.environ['A'] = '1'\n"
        "def early():\n    os.environ['B'] = '1'\n    import torch.nn\n"
        "def other():\n    os.environ['C'] = '1'\n    import json\n"
        "if __name__ == '__main__':\n    os.environ['D'] = '1'\n    from torch import nn\n"
    )
    assert environment_set_by(str(path)) == ["D", "B"]


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("import settings\nimport torch", ["OMP_NUM_THREADS"]),
        ("import torch\nimport settings\nimport torch.nn", []),
        ("import numpy\nfrom settings import x\nimport model", ["OMP_NUM_THREADS"]),
        ("from pack import inner\nimport torch", ["INNER"]),
        ("import settings\nimport json", []),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", ["a variable"]),
        ("import torch\nimport dotenv\ndotenv.load_dotenv()\nimport json", []),
    ],
)
def test_variables_that_a_module_of_the_script_sets_before_torch(
    tmp_path: Path, script: str, found: list[str]
) -> None:
    """OMP_NUM_THREADS had no effect there: other threads, other sums."""
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "settings.py").write_text("import os, train\nos.environ['OMP_NUM_THREADS'] = '1'\nx = 1")
    (tmp_path / "model.py").write_text("from torch import nn")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "inner.py").write_text("import os; os.environ.setdefault('INNER', '1')")
    assert environment_set_by(str(tmp_path / "train.py")) == found


CHANGES = """
import os, setting_one
os.environ["DIRECT"] = "1"
os.environ.update(UPDATED="1", DIRECT="2")
setting_one.sets()
os.environ["PATH"] = os.environ["PATH"]
os.environ.pop("UPDATED")
import reading_one, last_one
"""


def test_changes_of_the_environment_are_noted_among_the_imports(modules: Path) -> None:
    """In a process of its own: the class of `os.environ` stays changed. What a library sets at its own import is none
    of the script's doing.
    """
    (modules / "setting_one.py").write_text(
        "import os\nos.environ['OWN'] = '1'\ndef sets(): os.environ.setdefault('CALLED', '1')"
    )
    (modules / "reading_one.py").write_text("import os; os.environ.get('CALLED'), os.environ['OWN']")
    (modules / "last_one.py").write_text("")
    (modules / "script").mkdir()
    (modules / "script" / "train.py").write_text(CHANGES)
    program = (
        "import runpy, sys; from ckptd.host.zygotes.preload import *; "
        "from ckptd.host.zygotes.script_main import Script\n"
        "recorder = ImportRecorder(1); sys.meta_path.insert(0, recorder)\n"
        "note_changes_of_environment(recorder, Script(sys.argv[1], False, ()))\n"
        "runpy.run_path(sys.argv[1]); recorder.flush()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(modules / "script" / "train.py")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{modules}"}, stdout=subprocess.PIPE, check=True, timeout=60,
    )  # fmt: skip
    names = [name for name in names_in(done.stdout) if name.startswith("=") or name.endswith("_one")]
    assert names == ["setting_one", "=DIRECT", "=UPDATED", "=CALLED", "reading_one", "last_one"]


def test_a_module_that_reads_what_the_script_has_set_before(modules: Path) -> None:
    for name in ("early_one", "late_one"):
        (modules / f"{name}.py").write_text("import os; os.environ.get('PLACE')")
    read: set[str] = set()
    names = ["=OTHER", "early_one", "=PLACE"]
    assert import_recorded(names, Script("-", False, ()), read) == []
    assert import_recorded([*names, "late_one"], Script("-", False, ()), read) == ["PLACE"]
    assert "PLACE" in read


def test_a_record_of_variables_alone_is_none(tmp_path: Path) -> None:
    write_record(tmp_path / "record", ["=HOME"], "")
    assert read_record(tmp_path / "record") == ([], "")


def test_a_script_that_is_not_there_sets_nothing(tmp_path: Path) -> None:
    assert environment_set_by(str(tmp_path / "missing.py")) == []


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("random", "import random; random.random()"),
        ("random", "import random; random.seed(1)"),
        ("numpy", "import numpy; numpy.random.rand()"),
        ("torch", "import torch; torch.rand(1)"),
        ("torch", "import torch; torch.manual_seed(5)"),
    ],
)
def test_generators_that_were_moved_are_seen(name: str, draw: str) -> None:
    import numpy.random  # noqa: F401
    import torch  # noqa: F401

    before = generator_marks()
    assert generator_marks() == before
    exec(draw, {})  # noqa: S102 - ours
    after = generator_marks()
    assert {key for key in after if after[key] != before[key]} == {name}


def test_variables_that_are_read_by_name_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm looks for its own among all variables, and subprocess copies them: neither reads one by its name."""
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    names: set[str] = set()
    with noting_reads(names):
        assert os.environ["RANK"] == os.getenv("WORLD_SIZE") == "1"
        assert {**dict(os.environ.items()), **os.environ.copy()}["LOCAL_RANK"] == "1"
        assert "1" in os.environ.values()
        assert os.environ.get("CKPTD_TEST_MISSING") is None
    assert names == {"RANK", "WORLD_SIZE", "CKPTD_TEST_MISSING"}
    assert os.environ["GROUP_RANK"] == "1"
    assert "GROUP_RANK" not in names
