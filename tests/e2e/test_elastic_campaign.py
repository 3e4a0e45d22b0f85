"""A few rounds of the elastic campaign; ``CKPTD_KILLS`` makes it a long one, ``CKPTD_SEED`` repeats
a failed one.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from tests.e2e.elastic_campaign import Moment, campaign, table
from tests.long import LONG

KILLS = int(os.environ.get("CKPTD_KILLS", "0"))
# In `make campaign-matrix` always the same; a campaign looks for new ones.
SEED = int(os.environ.get("CKPTD_SEED") or (random.SystemRandom().randrange(1 << 20) if KILLS else 11))


@pytest.mark.slow
@pytest.mark.skipif(
    not (KILLS or LONG),
    reason="left to make campaign-matrix: CKPTD_LONG=1 or CKPTD_KILLS=n runs it",
)
@pytest.mark.timeout(14_400 if KILLS else 300)
def test_no_kill_makes_a_world_begin_with_anything_else(tmp_path: Path) -> None:
    sys.stdout.write(f"\nCKPTD_SEED={SEED} repeats this\n")
    rounds = campaign(KILLS or 2, SEED, tmp_path, sys.stdout.write, per_round=5)
    sys.stdout.write(table(rounds) + "\n")
    assert not [text for found in rounds for text in found.failures], f"CKPTD_SEED={SEED}"
    assert sum(found.compared for found in rounds)
    if KILLS >= 60:
        reached = {kill.moment for found in rounds for kill in found.kills}
        assert reached == set(Moment), f"never killed while {set(Moment) - reached}"
