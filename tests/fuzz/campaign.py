"""Coverage-guided fuzzing of all targets with Atheris, which is libFuzzer for Python.

``python -m tests.fuzz.campaign --inputs 1000000 --seed 1 [--only NAME …] [--processes 2]`` divides the inputs
among the targets, plays each in a process of its own, and prints a row of a table when it has ended. Corpora
stay in ``out/fuzz/<target>``, and the next campaign begins with them. A finding ends its target, is printed
with its traceback, and is left in ``out/fuzz/<target>.findings``; ``--target NAME FILE`` plays it again.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.target import Target

__all__ = ["main"]

OUT = Path("out/fuzz")
_SPARE_BYTES = 2 << 30  # of addresses, beyond what the process has when it begins
_DONE = re.compile(r"^#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+) corp: (\d+)/(\S+)", re.MULTILINE)
# Of the inputs: these cost more CPU time than others.
_SHARES = {"segment": 0.3, "coordinator": 0.5, "model_set": 0.3, "image": 0.5, "gradients": 0.3, "keys": 0.5}
_COLUMNS = ("target", "inputs", "CPU s", "inputs/s", "edges", "features", "corpus", "findings")
_HEAD = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|\n"


@dataclass(frozen=True)
class Row:
    """What a target's process has done."""

    target: str
    inputs: int
    cpu_s: float
    edges: int
    features: int
    corpus: int
    corpus_bytes: str
    finding: str

    def __str__(self) -> str:
        rate = self.inputs / max(self.cpu_s, 0.1)
        corpus, findings = f"{self.corpus} ({self.corpus_bytes})", int(bool(self.finding))
        cells = (
            self.target,
            f"{self.inputs:,}",
            f"{self.cpu_s:.0f}",
            f"{rate:,.0f}",
            self.edges,
            self.features,
        )
        return f"| {' | '.join(map(str, (*cells, corpus, findings)))} |"


def _fuzz(name: str, arguments: Sequence[str]) -> None:
    """Play one target in this process, until libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["ckptd"]):
        # Nothing of ckptd may be imported before: it would have no coverage.
        from tests.fuzz.target import CPU_S_MAX, play

        target = next(each for table in _tables(name) for each in table if each.name == name)
    logging.disable(logging.CRITICAL)
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (folder / f"seed-{number}").write_bytes(seed)
        play(target, seed)  # once without limits: what is made on first use is not the input's
    _limit_addresses()

    def feed(data: bytes) -> None:
        play(target, data, cpu_s_max=CPU_S_MAX)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if random.randrange(4):
            return target.mutate(random, data)[:most]
        return bytes(atheris.Mutate(data, most))

    corpus = [] if any(Path(each).is_file() for each in arguments) else [str(folder)]
    atheris.Setup([sys.argv[0], *corpus, *arguments], feed, custom_mutator=mutate)
    atheris.Fuzz()


def _tables(name: str = "") -> Iterator[tuple[Target, ...]]:
    """The tables of targets up to the one with ``name``; each is imported when it comes, since to instrument
    its modules takes seconds.
    """
    from tests.fuzz.wire_targets import WIRE_TARGETS

    yield WIRE_TARGETS
    if name not in {target.name for target in WIRE_TARGETS}:
        from tests.fuzz.file_targets import FILE_TARGETS

        yield FILE_TARGETS
        if name not in {target.name for target in FILE_TARGETS}:
            from tests.fuzz.trainer_targets import TRAINER_TARGETS

            yield TRAINER_TARGETS


def _limit_addresses() -> None:
    """A request for gigabytes fails, and is found, although nobody would touch these."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _played(name: str, inputs: int, seed: int) -> Row:
    findings = OUT / f"{name}.findings"
    findings.mkdir(parents=True, exist_ok=True)
    limits = [f"-runs={inputs}", f"-seed={seed}", "-max_len=65536", "-timeout=60", "-rss_limit_mb=4096"]
    command = [sys.executable, "-m", "tests.fuzz.campaign", "--target", name, "--"]
    process = subprocess.Popen(
        [*command, *limits, f"-artifact_prefix={findings}/"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    with process.stdout:
        told = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    done = _DONE.search(told)
    cpu_s = usage.ru_utime + usage.ru_stime
    if done is None or process.returncode != 0:
        return Row(name, 0, cpu_s, 0, 0, 0, "", told[-6000:])
    inputs, edges, features, corpus = (int(each) for each in done.groups()[:4])
    return Row(name, inputs, cpu_s, edges, features, corpus, done[5], "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the targets; 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="names of targets")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.target:
        _fuzz(options.target, options.rest)
        return 0
    names = options.only or [target.name for table in _tables() for target in table]
    weights = {name: _SHARES.get(name, 1.0) for name in names}
    shares = {name: max(1, round(options.inputs * weights[name] / sum(weights.values()))) for name in names}
    sys.stdout.write(_HEAD)
    rows = []
    with ThreadPoolExecutor(options.processes) as pool:
        played = [pool.submit(_played, name, shares[name], options.seed) for name in names]
        for future in as_completed(played):
            row = future.result()
            rows.append(row)
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
    for row in rows:
        if row.finding:
            sys.stdout.write(f"\n== {row.target}\n{row.finding}\n")
    found = sum(bool(row.finding) for row in rows)
    inputs, cpu_s = sum(row.inputs for row in rows), sum(row.cpu_s for row in rows)
    sys.stdout.write(f"{inputs:,} inputs in {cpu_s:.0f} s of CPU time, {found} findings\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
