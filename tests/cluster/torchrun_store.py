"""The rendezvous store of a job of torchrun, which no agent carries: ``python -m tests.cluster.torchrun_store ADDRESS PORT``."""

import signal
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]

if __name__ == "__main__":
    store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False, multi_tenant=True)
    print("listening", flush=True)  # noqa: T201
    signal.pause()
