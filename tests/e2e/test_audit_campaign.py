"""A few rounds of the audit campaign; ``make campaign-audit`` plays many."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.audit_campaign import campaign, table
from tests.long import long


@long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clean_steps_pass_and_flipped_bits_are_found(tmp_path: Path) -> None:
    rounds = campaign(4, 1005, tmp_path, sys.stdout.write)
    sys.stdout.write(table(rounds) + "\n")
    assert not [text for found in rounds for text in found.failures]
    assert any(found.flip is None for found in rounds)
    assert any(found.flip is not None for found in rounds)
