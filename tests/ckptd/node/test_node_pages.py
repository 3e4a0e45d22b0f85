"""Metrics and page over HTTP: addresses, tokens, and scrapers that are slow, silent or too many."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.config.runtime_dir import UnusableFolder
from ckptd.config.settings import DaemonConfig
from ckptd.dash import http_server
from ckptd.dash.dash_poll import DaemonPoll
from ckptd.event_log import EventLog
from ckptd.memory.segment_store import SegmentStore
from ckptd.node import metrics, node_pages
from ckptd.node.admin import NodeView
from ckptd.node.node_pages import NodePages
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
        since: after which event, each time.
    """

    def __init__(self, folder: Path, metrics: str, dash: str = "", *, isolate_users: bool = False) -> None:
        store = SegmentStore(folder, 1 << 20, "here", mlock="off", hugepages="off")
        config = DaemonConfig(
            metrics=metrics, dash=dash, runtime_dir=str(folder), isolate_users=isolate_users
        )
        self.context = NodeContext(config, store, EventLog(100), self.post)
        self.asked, self.busy = 0, False
        self.since: list[int] = []
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

    def view(self, since: int) -> NodeView:
        self.asked += 1
        self.since.append(since)
        event = m.EventInfo(since + 1, 0, "info", "kind", "text")
        return replace(full(), events=m.Events((event,), 1, since + 1))


@contextmanager
def listening(node: Node, group: int | None = None) -> Iterator[NodePages]:
    listener = NodePages(node.context, group, node.view)
    try:
        yield listener
    finally:
        listener.close()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "127.0.0.1:0")


def test_a_scrape_is_answered_with_a_page(node: Node) -> None:
    with listening(node) as listener:
        response, text = get(listener.addresses["metrics"])
        assert (response.status, response.getheader("Content-Length")) == (200, str(len(text)))
        assert response.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
        assert scrape(listener.addresses["metrics"])["ckptd_sessions"] == 1


@pytest.mark.parametrize(("method", "target", "status"), [("GET", "/", 404), ("POST", "/metrics", 405)])
def test_nothing_else_is_served(node: Node, method: str, target: str, status: int) -> None:
    with listening(node) as listener:
        assert get(listener.addresses["metrics"], target, method)[0].status == status
    assert node.asked == 0


def test_the_daemon_describes_itself_once_a_second_however_many_ask(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pages, "_FRESH_S", 3600.0)
    with listening(node) as listener:
        assert {scrape(listener.addresses["metrics"]).text for _ in range(5)} == {
            scrape(listener.addresses["metrics"]).text
        }
    assert node.asked == 1


def test_a_page_is_made_anew_when_it_is_old(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pages, "_FRESH_S", 0.0)
    monkeypatch.setattr(node_pages, "_SHARE", float("inf"))
    with listening(node) as listener:
        for _ in range(3):
            scrape(listener.addresses["metrics"])
    assert node.asked == 3


def test_a_description_that_takes_long_is_made_less_often(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pages, "_FRESH_S", 0.0)
    monkeypatch.setattr(node_pages, "_SHARE", 1e-9)
    with listening(node) as listener:
        assert scrape(listener.addresses["metrics"]).text == scrape(listener.addresses["metrics"]).text
    assert node.asked == 1


def test_a_unix_socket_is_this_user_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    with listening(Node(tmp_path, f"unix:{path}")) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert scrape(listener.addresses["metrics"])["ckptd_sessions"] == 1
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
        other = Node(tmp_path, listener.addresses["metrics"])
        with (
            pytest.raises(UnusableFolder, match=f"at {listener.addresses['metrics']}: .*in use"),
            listening(other),
        ):
            pass


# -- scrapers that do not behave ------------------------------------------------------------------


def connect(listener: NodePages) -> socket.socket:
    host, _, port = listener.addresses["metrics"].rpartition(":")
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
    monkeypatch.setattr(http_server, "_DEADLINE_S", 0.1)
    with listening(node) as listener, connect(listener) as silent:
        assert silent.recv(1) == b""  # and no sooner answer: it never asked
        assert scrape(listener.addresses["metrics"])["ckptd_sessions"] == 1


def test_a_client_that_sends_without_an_end_is_closed(node: Node) -> None:
    with listening(node) as listener, connect(listener) as endless:
        with pytest.raises(ConnectionError):
            send_forever(endless)
        assert scrape(listener.addresses["metrics"])["ckptd_sessions"] == 1


def test_a_client_that_never_reads_is_closed_with_what_it_was_sent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is larger than what the kernel takes for it."""
    monkeypatch.setattr(http_server, "_DEADLINE_S", 0.3)
    monkeypatch.setattr(metrics, "generate_latest", lambda _: b"x" * (32 << 20))
    with listening(node) as listener, connect(listener) as stuck:
        stuck.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        eventually(lambda: listener.server.open == 1, "it is being answered")
        eventually(lambda: listener.server.open == 0, "it was closed")
        got = 0
        while part := stuck.recv(1 << 20):
            got += len(part)
        assert got < 32 << 20


def test_beyond_a_number_of_connections_the_oldest_is_closed(node: Node) -> None:
    with listening(node) as listener, ExitStack() as stack:
        silent = [stack.enter_context(connect(listener)) for _ in range(8)]
        eventually(lambda: listener.server.open == 8, "all are accepted")
        assert scrape(listener.addresses["metrics"])["ckptd_sessions"] == 1
        assert silent[0].recv(1) == b""
        assert answer_on(silent[1]) == b"HTTP/1.1 200 OK\r"


def test_a_daemon_that_is_busy_answers_late_and_is_asked_once_by_all_scrapers_that_left(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_DEADLINE_S", 0.2)
    node.busy = True
    with listening(node) as listener:
        for _ in range(3):
            with connect(listener) as early:
                assert answer_on(early) == b""
        node.busy = False
        for work in node.held:
            work()
        assert node.asked == 1
        assert scrape(listener.addresses["metrics"])["ckptd_sessions"] == 1


def test_an_error_in_a_description_ends_one_scrape_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> NodeView:
        raise RuntimeError("a bug")

    good = node.view
    monkeypatch.setattr(node, "view", lambda since: good(since) if node.errors else fail(since))
    with listening(node) as listener:
        with connect(listener) as unlucky:
            assert answer_on(unlucky) == b""
        assert scrape(listener.addresses["metrics"])["ckptd_sessions"] == 1
    assert [str(error) for error in node.errors] == ["a bug"]


def test_a_close_does_not_wait_for_scrapers(node: Node) -> None:
    with listening(node) as listener, connect(listener):
        eventually(lambda: listener.server.open == 1, "it is accepted")
        thread = listener.server._thread
    assert not thread.is_alive()


# -- the page -------------------------------------------------------------------------------------


def fetched(address: str, **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection(address, timeout=20)
    try:
        connection.request("GET", "/view.json", headers=headers)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if answer.status == 200 else text.decode()
    finally:
        connection.close()


def test_one_description_serves_metrics_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pages, "_FRESH_S", 3600.0)
    node = Node(tmp_path, "127.0.0.1:0", "127.0.0.1:0")
    with listening(node) as listener:
        assert scrape(listener.addresses["metrics"])["ckptd_sessions"] == 1
        status, view = fetched(listener.addresses["dash"])
        assert get(listener.addresses["dash"], "/")[0].status == 200
        assert get(listener.addresses["dash"], "/metrics")[0].status == 404
        assert get(listener.addresses["metrics"], "/view.json")[0].status == 404
    assert status == 200
    assert [run["run"] for run in view["runs"]] == ["run"]
    assert node.asked == 1


def test_events_are_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pages, "_FRESH_S", 0.0)
    monkeypatch.setattr(node_pages, "_SHARE", float("inf"))
    node = Node(tmp_path, "", "127.0.0.1:0")
    with listening(node) as listener:
        seen = [fetched(listener.addresses["dash"])[1]["events"] for _ in range(3)]
    assert node.since == [0, 1, 2]
    assert [event["seq"] for event in seen[-1]] == [1, 2, 3]


def test_without_a_page_no_events_are_asked_for(node: Node) -> None:
    with listening(node) as listener:
        scrape(listener.addresses["metrics"])
    assert node.since == [1 << 62]


def test_beyond_loopback_the_token_in_a_private_file_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "dash.token"
    with listening(Node(tmp_path, "", "0.0.0.0:0")) as listener:
        port = listener.addresses["dash"].rpartition(":")[2]
        token = file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert token not in listener.said["dash"]
        assert str(file) in listener.said["dash"]
        assert fetched(f"127.0.0.1:{port}")[0] == 401
        assert fetched(f"127.0.0.1:{port}", Authorization=f"Bearer {token}")[0] == 200
    with listening(Node(tmp_path, "", "0.0.0.0:0")):
        assert file.read_text() == token, "a restart keeps it"
    file.write_text("1234")
    with pytest.raises(UnusableFolder, match="holds no token"), listening(Node(tmp_path, "", "0.0.0.0:0")):
        pass


def test_on_loopback_only_names_of_the_address_are_served(tmp_path: Path) -> None:
    with listening(Node(tmp_path, "", "127.0.0.1:0")) as listener:
        assert fetched(listener.addresses["dash"], Host="evil.example")[0] == 421
    assert not (tmp_path / "dash.token").exists()


def test_users_that_are_kept_apart_need_the_token_on_loopback_too(tmp_path: Path) -> None:
    with listening(Node(tmp_path, "", "127.0.0.1:0", isolate_users=True), os.getgid()) as listener:
        token = (tmp_path / "dash.token").read_text()
        assert fetched(listener.addresses["dash"])[0] == 401
        assert fetched(listener.addresses["dash"], Authorization=f"Bearer {token}")[0] == 200
    paths = [tmp_path / "metrics.sock", tmp_path / "dash.sock"]
    metrics, dash = (f"unix:{path}" for path in paths)
    with listening(Node(tmp_path, metrics, dash, isolate_users=True), os.getgid()):
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]


def test_a_unix_socket_needs_no_token(tmp_path: Path) -> None:
    with listening(Node(tmp_path, "", f"unix:{tmp_path}/dash.sock")) as listener:
        answer, text = get(listener.addresses["dash"], "/view.json")
        assert (answer.status, len(json.loads(text)["runs"])) == (200, 1)
    assert not (tmp_path / "dash.sock").exists()


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


def test_a_daemon_serves_its_page(tmp_path: Path) -> None:
    """The same that `ckptctl dash` would show, which asks over the daemon's socket."""
    with running_daemon(dash=f"unix:{tmp_path}/dash.sock") as daemon, daemon.client() as client:
        attach(client)
        text = get(f"unix:{tmp_path}/dash.sock", "/view.json")[1]
        mine = json.loads(text)
        theirs = json.loads(msgspec.json.encode(DaemonPoll(client).view()))
        told = client.ask(m.GetEvents(since=0, limit=1000), m.Events).events
    assert f"the page is served at unix:{tmp_path}/dash.sock" in [event.message for event in told]
    assert [run["live"] for run in mine["runs"]] == [True]
    for view in (mine, theirs):
        for moving in ("at_s", "uptime_s"):
            del view[moving]
    assert mine == theirs
