"""Found by each interpreter that has this folder in PYTHONPATH: those of a campaign of failpoints."""

import os
import sys
from pathlib import Path

if "FAILPOINTS_DIR" in os.environ:
    root = str(Path(__file__).resolve().parents[3])
    sys.path.insert(0, root)
    from tests.failpoints.runtime import install

    sys.path.remove(root)
    install()
