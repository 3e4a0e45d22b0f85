"""The lock: every dependency of every extra, in one version with hashes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("bench", "demo", "deploy", "docs", "release", "test")  # those that `make setup` installs


def _locked() -> dict[str, list[tuple[Requirement, list[str]]]]:
    """Per name: the entries of the lock (one for each range of Python versions) with their hashes."""
    entries: dict[str, list[tuple[Requirement, list[str]]]] = {}
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if not line or line.lstrip().startswith("#"):
            continue
        head, *rest = re.split(r"\s+--hash=", line)
        requirement = Requirement(head.strip())
        hashes = [hash_.split()[0] for hash_ in rest]
        entries.setdefault(canonicalize_name(requirement.name), []).append((requirement, hashes))
    return entries


def _wanted() -> Iterator[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        yield Requirement(text)
    for extra in EXTRAS:
        for text in project["optional-dependencies"][extra]:
            yield Requirement(text)


def test_every_entry_of_the_lock_has_a_version_and_a_sha256() -> None:
    entries = [entry for same in _locked().values() for entry in same]
    assert len(entries) > 50
    for requirement, hashes in entries:
        assert [s.operator for s in requirement.specifier] == ["=="], requirement
        assert hashes, f"{requirement} has no hash: run `make lock`"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", h) for h in hashes), requirement


def test_the_lock_holds_every_dependency_but_torch() -> None:
    locked = _locked()
    for wanted in _wanted():
        name = canonicalize_name(wanted.name)
        if name == "torch":  # by version only, in constraints.txt: each accelerator has a build of its own
            assert f"torch=={version('torch').split('+')[0]}" in (ROOT / "constraints.txt").read_text()
            continue
        assert name in locked, f"{wanted} is not in requirements.lock: run `make lock`"
        for requirement, _ in locked[name]:
            (pin,) = requirement.specifier
            assert wanted.specifier.contains(pin.version), f"{requirement} against {wanted}"
