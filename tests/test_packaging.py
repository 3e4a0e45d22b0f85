"""The wheel: five packages under one import root, nothing else, and NVIDIA's `cuda` left alone."""

from __future__ import annotations

import ast
import configparser
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.ckptd.demo.test_kills import SHORT, check_demo

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("client", "transport", "cuda", "storage")
# Sub-packages and modules of NVIDIA's `cuda` namespace: ours must never be able to shadow one.
NVIDIA_MODULES = {"bindings", "core", "pathfinder", "compute", "coop", "tile", "cccl"}
NOT_SOURCE = (".git", ".venv", "out", "build", "dist", "__pycache__", ".*_cache", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, so that building leaves nothing behind in it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("ckptd-*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_links_are_links() -> None:
    for name in LINKED:
        link = ROOT / "ckptd" / name
        assert link.is_symlink(), f"ckptd/{name} must be a link (git config core.symlinks true)"
        assert link.readlink() == Path("..") / name


def test_the_cuda_folder_cannot_shadow_nvidias_namespace() -> None:
    folder = ROOT / "cuda"
    assert not (folder / "__init__.py").exists()
    names = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert not names & NVIDIA_MODULES


def test_only_one_name_reaches_site_packages(unpacked: Path) -> None:
    names = {path.name for path in unpacked.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"ckptd"}


def test_every_module_is_in_the_wheel(unpacked: Path) -> None:
    for folder, target in [("ckptd", ""), *((name, name) for name in LINKED)]:
        for path in (ROOT / folder).glob("**/*.py"):
            inside = unpacked / "ckptd" / target / path.relative_to(ROOT / folder)
            assert inside.is_file(), f"{path.relative_to(ROOT)} is not in the wheel"
    assert (unpacked / "ckptd" / "py.typed").is_file()
    assert (unpacked / "ckptd" / "dash" / "page.html").is_file()


def test_the_wheel_carries_the_licence(unpacked: Path) -> None:
    assert list(unpacked.glob("ckptd-*.dist-info/licenses/LICENSE"))


def test_five_packages_import_from_the_wheel(unpacked: Path) -> None:
    packages = ["ckptd", *(f"ckptd.{name}" for name in LINKED)]
    program = f"""
import importlib, sys
sys.path.insert(0, {str(unpacked)!r})
for name in {packages!r}:
    module = importlib.import_module(name)
    assert any(p.startswith({str(unpacked)!r}) for p in module.__path__), (name, module.__path__)
from ckptd.client import Checkpointer
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program],
        cwd=unpacked,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_the_demo_of_the_wheel_needs_no_clone(unpacked: Path, tmp_path: Path) -> None:
    """It starts, from the wheel, what it is made of: the rehearsal, a daemon, trainers under a host."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptd.demo", *SHORT, "--precision", "fp32", "--out", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_demo(done.stdout, "fp32")
    assert (tmp_path / "demo.png").is_file()


def test_commands_of_the_wheel_exist(unpacked: Path) -> None:
    (path,) = unpacked.glob("ckptd-*.dist-info/entry_points.txt")
    scripts = configparser.ConfigParser()
    scripts.read(path)
    assert set(scripts["console_scripts"]) == {"ckptd", "ckptctl"}
    for target in scripts["console_scripts"].values():
        module, function = target.split(":")
        program = (
            f"import sys; sys.path.insert(0, {str(unpacked)!r})\n"
            f"from {module} import {function}\n"
            f"sys.argv = ['x', '--help']\n"
            f"{function}()"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", program],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout


def test_the_version_is_said_once() -> None:
    """The changelog's newest entry that is released is the version that is built."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    headings = [line for line in lines if line.startswith("## ") and line != "## Unreleased"]
    assert headings, "CHANGELOG.md has no version heading"
    assert headings[0].split()[1].strip("[]") == version


def _imported_names(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_dependencies_are_what_is_imported() -> None:
    """Nothing imported is undeclared, and nothing is declared that nobody imports; what speaks S3,
    to transformers, to Prometheus or to OpenTelemetry is an extra.
    """
    imported: set[str] = set()
    for folder in ("ckptd", *LINKED):
        for path in (ROOT / folder).glob("**/*.py"):
            imported |= _imported_names(path)
    # Triton comes with torch where that is for CUDA, and is of no use elsewhere.
    imported -= set(sys.stdlib_module_names) | {"ckptd", "triton"}
    distributions = packages_distributions()
    # There are builds of Megatron-Core for these Pythons alone, and DeepSpeed comes with `make campaign-habits`.
    imported -= {"megatron", "deepspeed"} - distributions.keys()
    unknown = {name for name in imported if name not in distributions}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [
        *project["dependencies"],
        *extras["s3"],
        *extras["hf"],
        *extras["elastic"],
        *extras["picture"],
        *extras["metrics"],
        *extras["otel"],
        *extras["otel-grpc"],
        *(extras["megatron"] if "megatron" in imported else ()),
        *(extras["deepspeed"] if "deepspeed" in imported else ()),
    ]
    declared = {canonicalize_name(requirement.split(">")[0]) for requirement in required}
    used = set()
    for name in imported & distributions.keys():
        found = {canonicalize_name(each) for each in distributions[name]}
        used |= (found & declared) or found  # several distributions may share a namespace
    assert not unknown, f"imported, but not installed: {unknown}"
    assert used == declared
