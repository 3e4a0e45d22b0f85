"""The same examples in every run: ``make test`` must not fail by chance. ``CKPTD_RANDOM_EXAMPLES=1`` looks for new ones."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
if not os.environ.get("CKPTD_RANDOM_EXAMPLES"):
    settings.load_profile("repeatable")
