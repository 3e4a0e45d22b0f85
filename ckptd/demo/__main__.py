"""``python -m ckptd.demo``: see `ckptd.demo.kills`."""

import sys

from ckptd.demo.kills import run

sys.exit(run())
