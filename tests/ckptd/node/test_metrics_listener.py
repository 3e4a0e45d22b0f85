"""The page over HTTP: addresses, refusals, and scrapers that are slow, silent or too many."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ckptd.config.runtime_dir import UnusableFolder
from ckptd.config.settings import DaemonConfig
from ckptd.event_log import EventLog
from ckptd.memory.segment_store import SegmentStore
from ckptd.node import metrics_listener
from ckptd.node.admin import NodeView
from ckptd.node.metrics_listener import MetricsListener
from ckptd.node_context import NodeContext
from ckptd.transport import messages as m
from ckptd.transport.wire import RefusedError
from tests.ckptd.node.test_metrics import full
from tests.ckptd.running import ROOT, attach, eventually, running_daemon
from tests.ckptd.scraped import get, metrics_address, scrape


class Node:
    """Stands for the daemon's loop: what is posted runs at once, unless it is told to hold it back.

    Attributes:
        asked: how often it was asked for a view.
    """

    def __init__(self, folder: Path, metrics: str) -> None:
        store = SegmentStore(folder, 1 << 20, "here", mlock="off", hugepages="off")
        self.context = NodeContext(DaemonConfig(metrics=metrics), store, EventLog(100), self.post)
        self.asked, self.busy = 0, False
        self.held: list[Callable[[], None]] = []
        self.errors: list[RuntimeError] = []

    def post(self, work: Callable[[], None]) -> None:
        if self.busy:
            self.held.append(work)
            return
        try:
            work()
        except RuntimeError as error:  # as `NodeContext.guarded`
            self.errors.append(error)

    def view(self) -> NodeView:
        self.asked += 1
        return full()


@contextmanager
def listening(node: Node, group: int | None = None) -> Iterator[MetricsListener]:
    listener = MetricsListener(node.context, group, node.view)
    try:
        yield listener
    finally:
        listener.close()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "127.0.0.1:0")


def test_a_scrape_is_answered_with_a_page(node: Node) -> None:
    with listening(node) as listener:
        response, text = get(listener.address)
        assert (response.status, response.getheader("Content-Length")) == (200, str(len(text)))
        assert response.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
        assert scrape(listener.address)["ckptd_sessions"] == 1


@pytest.mark.parametrize(("method", "target", "status"), [("GET", "/", 404), ("POST", "/metrics", 405)])
def test_nothing_else_is_served(node: Node, method: str, target: str, status: int) -> None:
    with listening(node) as listener:
        assert get(listener.address, target, method)[0].status == status
    assert node.asked == 0


def test_the_daemon_describes_itself_once_a_second_however_many_ask(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_listener, "_FRESH_S", 3600.0)
    with listening(node) as listener:
        assert {scrape(listener.address).text for _ in range(5)} == {scrape(listener.address).text}
    assert node.asked == 1


def test_a_page_is_made_anew_when_it_is_old(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_listener, "_FRESH_S", 0.0)
    monkeypatch.setattr(metrics_listener, "_SHARE", float("inf"))
    with listening(node) as listener:
        for _ in range(3):
            scrape(listener.address)
    assert node.asked == 3


def test_a_description_that_takes_long_is_made_less_often(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_listener, "_FRESH_S", 0.0)
    monkeypatch.setattr(metrics_listener, "_SHARE", 1e-9)
    with listening(node) as listener:
        assert scrape(listener.address).text == scrape(listener.address).text
    assert node.asked == 1


def test_a_unix_socket_is_this_user_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    with listening(Node(tmp_path, f"unix:{path}")) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert scrape(listener.address)["ckptd_sessions"] == 1
    assert not path.exists()


def test_a_unix_socket_is_open_to_the_group_of_the_trainers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    with listening(Node(tmp_path, f"unix:{path}"), os.getgid()):
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o660, os.getgid())


def test_the_socket_of_a_killed_daemon_is_replaced_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    node = Node(tmp_path, f"unix:{path}")
    with listening(node):
        with pytest.raises(UnusableFolder, match=r"cannot be served at unix:.*in use"), listening(node):
            pass
        assert scrape(f"unix:{path}")["ckptd_sessions"] == 1


def test_a_file_at_the_path_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    path.write_text("mine")
    with pytest.raises(UnusableFolder, match="in use"), listening(Node(tmp_path, f"unix:{path}")):
        pass
    assert path.read_text() == "mine"


def test_a_port_that_is_taken_is_an_error_with_its_address(tmp_path: Path, node: Node) -> None:
    with listening(node) as listener:
        other = Node(tmp_path, listener.address)
        with pytest.raises(UnusableFolder, match=f"at {listener.address}: .*in use"), listening(other):
            pass


# -- scrapers that do not behave ------------------------------------------------------------------


def connect(listener: MetricsListener) -> socket.socket:
    host, _, port = listener.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer_on(connection: socket.socket) -> bytes:
    """The first bytes of the answer to a scrape; none if the connection was closed."""
    try:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        return connection.recv(16)
    except ConnectionError:
        return b""


def send_forever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 4096)


def test_silent_clients_are_closed_at_the_deadline(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_listener, "_DEADLINE_S", 0.1)
    with listening(node) as listener, connect(listener) as silent:
        assert silent.recv(1) == b""  # and no sooner answer: it never asked
        assert scrape(listener.address)["ckptd_sessions"] == 1


def test_a_client_that_sends_without_an_end_is_closed(node: Node) -> None:
    with listening(node) as listener, connect(listener) as endless:
        with pytest.raises(ConnectionError):
            send_forever(endless)
        assert scrape(listener.address)["ckptd_sessions"] == 1


def test_a_client_that_never_reads_is_closed_with_what_it_was_sent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is larger than what the kernel takes for it."""
    monkeypatch.setattr(metrics_listener, "_DEADLINE_S", 0.3)
    monkeypatch.setattr(metrics_listener, "generate_latest", lambda _: b"x" * (32 << 20))
    with listening(node) as listener, connect(listener) as stuck:
        stuck.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        eventually(lambda: listener._open == 1, "it is being answered")
        eventually(lambda: listener._open == 0, "it was closed")
        got = 0
        while part := stuck.recv(1 << 20):
            got += len(part)
        assert got < 32 << 20


def test_too_many_connections_are_closed_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_listener, "_CONNECTIONS", 2)
    with listening(node) as listener, ExitStack() as stack:
        first = [stack.enter_context(connect(listener)) for _ in range(2)]
        eventually(lambda: listener._open == 2, "both are accepted")
        with connect(listener) as third:
            assert answer_on(third) == b""
        first.pop().close()
        eventually(lambda: listener._open == 1, "one is gone")
        assert scrape(listener.address)["ckptd_sessions"] == 1


def test_a_daemon_that_is_busy_answers_late_and_keeps_nothing_of_scrapers_that_left(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_listener, "_DEADLINE_S", 0.2)
    node.busy = True
    with listening(node) as listener:
        with connect(listener) as early:
            assert answer_on(early) == b""
        node.busy = False
        for work in node.held:
            work()
        assert node.asked == 0
        assert scrape(listener.address)["ckptd_sessions"] == 1


def test_an_error_in_a_description_ends_one_scrape_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NodeView:
        raise RuntimeError("a bug")

    good = node.view
    monkeypatch.setattr(node, "view", lambda: good() if node.errors else fail())
    with listening(node) as listener:
        with connect(listener) as unlucky:
            assert answer_on(unlucky) == b""
        assert scrape(listener.address)["ckptd_sessions"] == 1
    assert [str(error) for error in node.errors] == ["a bug"]


def test_a_close_does_not_wait_for_scrapers(node: Node) -> None:
    with listening(node) as listener, connect(listener):
        eventually(lambda: listener._open == 1, "it is accepted")
        thread = listener._thread
    assert not thread.is_alive()


# -- a real daemon --------------------------------------------------------------------------------


def test_trainers_are_served_while_scrapers_hang() -> None:
    with running_daemon(metrics="127.0.0.1:0") as daemon, ExitStack() as stack:
        address = metrics_address(daemon.endpoint)
        host, _, port = address.rpartition(":")
        for _ in range(20):
            hanging = stack.enter_context(socket.create_connection((host, int(port))))
            hanging.sendall(b"GET /metrics HTTP/1.1\r\n")
        with daemon.client() as client:
            attach(client)
            assert client.ask(m.Ping(), m.Pong).attached
        stack.close()
        assert scrape(address)["ckptd_sessions"] == 1


def test_a_refusal_is_counted_by_its_reason() -> None:
    with running_daemon(metrics="127.0.0.1:0") as daemon, daemon.client() as client:
        with pytest.raises(RefusedError):
            client.request(m.Forget("job", "nobody"))
        page = scrape(metrics_address(daemon.endpoint))
        counters = client.ask(m.GetStatus(), m.Status).counters
        found = {reason: n for (reason,), n in page.by_labels("ckptd_refusals_total").items() if n}
        assert found == {"not_found": 1} == {"not_found": counters["refused.not_found"]}


def test_without_the_library_the_start_says_what_to_install(tmp_path: Path) -> None:
    hidden = (
        "import sys; sys.modules['prometheus_client'] = None; from ckptd.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", hidden, "run", "--metrics", "127.0.0.1:0"]
    folders = ("--runtime-dir", str(tmp_path / "run"), "--segment-dir", f"/dev/shm/{tmp_path.name}")
    done = subprocess.run(
        [*command, *folders], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    Path(f"/dev/shm/{tmp_path.name}/.ckptd.lock").unlink()
    Path(f"/dev/shm/{tmp_path.name}").rmdir()
    assert done.returncode == 2, done.stderr
    assert "run `pip install 'ckptd[metrics]'`, or leave metrics empty" in done.stderr
    assert "Traceback" not in done.stderr
