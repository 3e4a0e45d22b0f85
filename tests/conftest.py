"""The same examples in every run: ``make test`` must not fail by chance.
``CKPTD_RANDOM_EXAMPLES=1`` looks for new ones.

And one OpenMP thread, here and in all children, for whoever does not ask for more: several test
processes share the cores, and a team of which a member waits for a core waits as a whole. With two
threads the same tests took four to ten times as long.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, after this

settings.register_profile("repeatable", derandomize=True)
if not os.environ.get("CKPTD_RANDOM_EXAMPLES"):
    settings.load_profile("repeatable")
