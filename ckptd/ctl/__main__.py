"""`python -m ckptd.ctl` is `ckptctl`."""

import sys

from ckptd.ctl.main import main

if __name__ == "__main__":
    sys.exit(main())
