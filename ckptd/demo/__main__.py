"""``python -m ckptd.demo``: see `ckptd.demo.kills`."""

import sys

from ckptd.demo.lab import in_shared_environment


def main() -> int | str:
    """Run the demo; returns its exit status, or why it failed."""
    in_shared_environment()
    from ckptd.demo.kills import run  # imports torch, which would be for nothing before

    return run()


sys.exit(main())
