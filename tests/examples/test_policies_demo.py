"""`make demo-policies`, shortened: exact policies are exact, and the others say what they have lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.playing import play
from tests.long import long

pytest.importorskip("matplotlib", reason="the demo draws a picture (extra: demo)")


@long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_exact_policies_are_exact_and_others_lose_tokens(tmp_path: Path) -> None:
    short = ["--steps", "34", "--kill-after", "24", "--batch-size", "1"]
    output = play("examples.moe_text.policies", *short, "--out", str(tmp_path))
    assert (tmp_path / "policies.png").exists()
    rows = re.findall(
        r"^(sliding|dense|partial|selected).* (\d+) +([\d.]+)% .*?(identical|differ)$",
        output,
        re.MULTILINE,
    )
    assert [(name, end) for name, _, _, end in rows] == [
        ("sliding", "identical"),
        ("dense", "identical"),
        ("partial", "differ"),
        ("selected", "differ"),
    ]
    assert [int(lost) > 0 for _, lost, _, _ in rows] == [False, False, True, True]
