"""``python -m ckptd.host [-m] script arguments``: the host of one rank (``docs/hosts.md``)."""

from __future__ import annotations

import logging
import os
import sys

from ckptd.config.runtime_dir import UnusableFolder
from ckptd.host.host_options import UsageError, options_from, place_in_step
from ckptd.host.process_control import die_as, open_standard_files
from ckptd.host.trainer_host import TrainerHost
from ckptd.host.warm_start import warm_up

logger = logging.getLogger("ckptd.host")


def main() -> int:
    """Returns the exit code, unless this process ends by a signal as its trainer did."""
    open_standard_files()
    logging.raiseExceptions = False  # a log whose reader has gone is no reason to end a trainer
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="ckptd.host: %(message)s")
    try:
        os.environ.update(place_in_step(os.environ))  # for the trainers, too
        options = options_from(sys.argv[1:], os.environ)
        if options.warm:
            return warm_up(options)
    except (UsageError, UnusableFolder) as error:
        logger.error("%s", error)
        return 2
    command = options.script.command
    if not options.one_machine and not options.store[0]:
        logger.warning(
            "rank %d: the ranks are on several machines, and MASTER_ADDR and MASTER_PORT do not name the "
            "store in which their hosts could meet: the script runs without a host",
            options.rank,
        )
        os.execv(command[0], command)
    try:
        host = TrainerHost(options)
    except (UnusableFolder, OSError) as error:
        logger.warning("rank %d: the script runs without a host: %s", options.rank, error)
        os.execv(command[0], command)
    return die_as(host.run())


if __name__ == "__main__":
    sys.exit(main())
