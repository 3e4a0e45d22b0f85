"""A daemon dies between making a segment and telling the trainer of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.client.daemon_link.session import Session
from ckptd.core.slots.segment_format import encode_descriptor
from ckptd.errors import DaemonUnavailable
from ckptd.transport.messages import Attach
from tests.ckptd.running import DaemonProcess, descriptor, eventually, running_daemon
from tests.client.silent_listener import SilentListener
from tests.long import long

SLOT = 1 << 20


def files(daemon: DaemonProcess) -> list[str]:
    return sorted(path.name for path in daemon.segment_dir.glob("job~run~r0~g*"))


def restart(daemon: DaemonProcess, session: Session, module: str) -> None:
    assert daemon.process is not None
    if daemon.process.poll() is None:
        daemon.kill()
    eventually(lambda: not session.connected, "the daemon is missed")
    daemon.command[2] = module
    daemon.start()
    eventually(lambda: session.connected, "it is attached to again")


@long
@pytest.mark.parametrize("kind", ["snapshots", "log"])
def test_what_nobody_was_told_of_is_given_back(kind: str) -> None:
    """It stayed for as long as the trainer lived: a whole ring of memory that nobody knew."""
    with running_daemon() as daemon:
        session = Session(
            lambda: daemon.endpoint,
            Attach("job", "run", 0, 1, "dp1", 1, 4 * SLOT, "for a test", ()),
            SilentListener(),
            version="test",
            timeout_s=20,
        )
        try:
            told = encode_descriptor(descriptor(kind=kind))  # type: ignore[arg-type]

            def reserve() -> Path:
                if kind == "snapshots":
                    return Path(session.reserve(SLOT, 2, told).path)
                return Path(session.reserve_auxiliary(SLOT, 2, told).result(20).path)

            kept = reserve()
            assert files(daemon) == [kept.name]
            restart(daemon, session, "tests.ckptd.dying_daemon")
            with pytest.raises((DaemonUnavailable, TimeoutError)):
                reserve()
            assert daemon.process is not None
            daemon.process.wait(20)
            assert len(files(daemon)) == 2
            restart(daemon, session, "ckptd")
            eventually(lambda: files(daemon) == [kept.name], "it is given back")
            if session._reserving is not None:  # the question that was never answered
                with pytest.raises(DaemonUnavailable):
                    reserve()
            again = reserve()
            assert files(daemon) == sorted([kept.name, again.name])
        finally:
            session.close()
