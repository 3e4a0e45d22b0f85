"""Prints the requirements of the daemon's image, as pip takes them.

They are what `pyproject.toml` asks for, without torch and with the extras that a daemon uses, and all that these
need, in the versions and with the hashes of `requirements.lock`. It runs in the image's first stage, on the
standard library and pip's own `packaging`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("metrics", "otel", "s3")


def locked(text: str) -> Iterator[tuple[Requirement, list[str], list[str]]]:
    """Each entry of the lock for this platform: requirement, lines, and the names of those that need it."""
    for block in re.split(r"\n(?=\S)", text):
        lines = block.splitlines()
        if not lines or lines[0].startswith(("#", "-")):
            continue
        requirement = Requirement(lines[0].removesuffix("\\").strip())
        if requirement.marker is None or requirement.marker.evaluate():
            pinned = [line for line in lines if not line.lstrip().startswith("#")]
            needed_by = re.findall(r"^ +# +(?:via +)?(\S+)", block, re.MULTILINE)
            yield requirement, pinned, needed_by


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(r for e in EXTRAS for r in project["optional-dependencies"][e])]
    wanted = {canonicalize_name(Requirement(text).name) for text in asked} - {"torch"}
    entries = list(locked((ROOT / "requirements.lock").read_text()))
    while True:
        more = {
            canonicalize_name(entry.name)
            for entry, _, needed_by in entries
            if wanted & {canonicalize_name(re.sub(r"\[.*", "", name)) for name in needed_by}
        }
        if more <= wanted:
            break
        wanted |= more
    for entry, pinned, _ in entries:
        if canonicalize_name(entry.name) in wanted:
            sys.stdout.write("\n".join([*pinned, ""]))


if __name__ == "__main__":
    main()
