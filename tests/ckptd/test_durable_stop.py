"""A daemon with a store that is stopped: what it was asked to make durable is, if that can be done in time."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.stores.open_store import open_store
from ckptd.transport import messages as m
from tests.ckptd.persistence.slots import fill
from tests.ckptd.running import DaemonProcess, attach, eventually, reserve, running_daemon


def keeper_pid(daemon: DaemonProcess) -> int:
    return int(json.loads(daemon.ctl("status", "--json").stdout)["durable"]["keeper_pid"])


def test_a_store_keeper_that_dies_while_the_daemon_stops_is_started_again(tmp_path: Path) -> None:
    """Nobody looked after it any more, and the end of the training was not stored."""
    url = f"file://{tmp_path}/store"
    with running_daemon(store=url, persist_every="1000") as daemon:
        with daemon.client() as client:
            attach(client)
            segment = reserve(client, slots=6)
            here = m.Member(m.NodeCard(client.ask(m.GetStatus(), m.Status).node_id), (0,))
            client.ask(m.Join(1, -1, (here,)), m.Done)
            for iteration in (2, 3):
                fill(segment, iteration, iteration)
            eventually(lambda: keeper_pid(daemon) > 0, "a store keeper runs")
            keeper = keeper_pid(daemon)
            os.kill(keeper, signal.SIGSTOP)  # it shall not be done before
            client.request(m.Detach())
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGTERM)
        eventually(lambda: "stopping" in daemon.log_text(), "the daemon stops")
        os.kill(keeper, signal.SIGKILL)
        assert daemon.process.wait(40) == 0
        segment.close()
    newest = read_catalog(open_store(url), "job", "run").newest
    assert newest is not None
    assert newest.id.end == 3
