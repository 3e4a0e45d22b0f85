"""`make demo`, shortened: with a host and without, exact, and with the phases of each recovery."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptd.core.recovery.recovery_phases import RecoveryPhase
from ckptd.demo.model import PRECISIONS, native_precision
from tests.examples.playing import play
from tests.long import long

pytest.importorskip("matplotlib", reason="the demo draws a picture (extra: demo)")

SHORT = ["--steps", "36", "--kills", "1", "--window", "2", "--batch-size", "1", "--seed", "3"]


def _play(folder: Path, *options: str) -> str:
    output = play("ckptd.demo", *SHORT, "--out", str(folder), *options)
    assert (folder / "demo.png").exists()
    return output


def _seeds(output: str) -> list[int]:
    """Of the lives of both runs, in order."""
    return [int(seed) for seed in re.findall(r"initialised from seed (\d+)", output)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=long)])
def test_the_demo_is_exact_and_names_the_phases(tmp_path: Path, plain: bool) -> None:
    precision = "fp32" if plain else "bf16"
    output = _play(tmp_path, *(["--plain"] if plain else []), "--precision", precision)
    assert "IDENTICAL: all" in output
    assert f"top-2 of 8 experts, {PRECISIONS[precision]}" in output
    assert output.count("--> SIGKILL to the trainer after") == 2
    assert output.count("--> SIGKILL to the daemon after") == 1
    undisturbed, first, *later = _seeds(output)
    assert undisturbed == first
    assert len(later) == 2
    assert len({first, *later}) == 3
    rows = re.findall(r"^(\w+) +[\d -]+$", output.partition("phase, ms")[2], re.MULTILINE)
    assert rows[-2:] == ["rest", "back"]
    assert set(rows[:-2]) <= {*map(str, RecoveryPhase)}
    assert {RecoveryPhase.ATTACH, RecoveryPhase.LOADED, RecoveryPhase.FIRST_NEW_STEP} <= set(rows)
    # A forked trainer has everything imported.
    assert (RecoveryPhase.IMPORTS in rows) == plain


@pytest.mark.parametrize(
    ("cpuinfo", "precision"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512f avx512_bf16\n", "bf16"),
        ("flags\t\t: fpu sse2 avx2 fma f16c\n", "fp32"),
        ("Features\t: fp asimd sve i8mm bf16\n", "bf16"),
        ("Features\t: fp asimd\n", "fp32"),
    ],
)
def test_the_demo_computes_in_what_the_cpu_multiplies(tmp_path: Path, cpuinfo: str, precision: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}bugs\t\t: sysret_ss_attrs\n")
    assert native_precision(tmp_path / "cpuinfo") == precision
    assert native_precision(tmp_path / "missing") == "fp32"
