"""`python -m ckptd` is `ckptd`."""

import sys

from ckptd.cli import main

if __name__ == "__main__":
    sys.exit(main())
