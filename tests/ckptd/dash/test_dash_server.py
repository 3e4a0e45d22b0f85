"""The page over HTTP: who may see what, slow clients, `ckptctl dash` on a real daemon, and a real browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from ckptd.dash import dash_server, http_server
from ckptd.dash.dash_server import DashServer
from ckptd.dash.dash_view import DashView, view_of
from ckptd.dash.http_server import Page
from ckptd.transport import messages as m
from tests.browser import open_page, why_no_browser
from tests.ckptd.dash.fabricated import answers, everything
from tests.ckptd.running import ROOT, DaemonProcess, attach, busy_daemon, eventually

TOKEN = "a-token-of-tests-4711"
needs_browser = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser() or "it is there")


@pytest.fixture(scope="module")
def view() -> DashView:
    return view_of(everything(3))


@pytest.fixture
def server(view: DashView) -> Iterator[DashServer]:
    with DashServer("127.0.0.1", 0) as opened:
        opened.publish(view)
        yield opened


def get(url: str, path: str, *, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    found = re.fullmatch(r"http://([^/]+)/(#.*)?", url)
    assert found is not None
    connection = http.client.HTTPConnection(found[1], timeout=20)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    answer.content = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def body(answer: Any) -> bytes:
    assert isinstance(answer.content, bytes)
    return answer.content


def test_the_view_is_json_and_compressed_for_those_who_understand_it(
    server: DashServer, view: DashView
) -> None:
    answer = get(server.url, "/view.json")
    assert (answer.status, answer.getheader("Content-Type")) == (200, "application/json")
    assert body(answer) == msgspec.json.encode(view)
    small = get(server.url, "/view.json", Accept_Encoding="gzip, br")
    assert small.getheader("Content-Encoding") == "gzip"
    assert len(body(small)) < len(body(answer)) // 2


def test_the_page_asks_nothing_of_others_and_its_policy_forbids_it(server: DashServer) -> None:
    answer = get(server.url, "/?from=bookmark")
    html, policy = body(answer).decode(), str(answer.getheader("Content-Security-Policy"))
    assert answer.status == 200
    assert set(re.findall(r"https?://[^\"']+", html)) == {"http://www.w3.org/2000/svg"}, "a namespace"
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"\son\w+=|\sstyle=|innerHTML|eval\(", html)
    assert answer.getheader("X-Content-Type-Options") == "nosniff"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_but_get_is_served(server: DashServer, method: str) -> None:
    assert get(server.url, "/view.json", method=method).status == 405


def test_other_paths_do_not_exist(server: DashServer) -> None:
    for path in ("/x", "/../page.html", "/view.json/", "/favicon.ico"):
        assert get(server.url, path).status == 404


def test_a_name_that_was_bound_to_this_address_later_sees_nothing(server: DashServer) -> None:
    port = server.url.rstrip("/").rpartition(":")[2]
    assert get(server.url, "/view.json", Host=f"localhost:{port}").status == 200
    for name in (f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.evil.example:{port}", ""):
        for path in ("/", "/view.json"):
            answer = get(server.url, path, Host=name)
            assert answer.status == 421
            assert b"moe" not in body(answer)


def test_with_a_token_the_view_is_for_those_who_have_it(view: DashView) -> None:
    with DashServer("127.0.0.1", 0, TOKEN) as server:
        server.publish(view)
        assert server.url.endswith(f"/#viewer={TOKEN}")
        assert get(server.url, "/").status == 200
        assert get(server.url, "/view.json", Authorization=f"Bearer {TOKEN}").status == 200
        for wrong in ("", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xe9"):
            answer = get(server.url, f"/view.json?token={TOKEN}", Authorization=wrong)
            assert answer.status == 401
            assert b"moe" not in body(answer)


def test_silent_clients_block_nobody(server: DashServer) -> None:
    """Beyond a number of connections the oldest is closed."""
    host, _, port = server.url.removeprefix("http://").rstrip("/").rpartition(":")
    silent = [socket.create_connection((host, int(port)), 20) for _ in range(3 * dash_server._CONNECTIONS)]
    for each in silent:
        each.sendall(b"GET /view.json HTTP/1.1\r\n")
    assert get(server.url, "/view.json").status == 200
    silent[0].settimeout(20)
    with contextlib.suppress(ConnectionResetError):  # what it had sent was not read yet
        assert silent[0].recv(1) == b"", "the oldest is closed"
    for each in silent:
        each.close()


def test_a_client_that_asks_for_nothing_is_closed_in_time(
    server: DashServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_DEADLINE_S", 0.2)
    host, _, port = server.url.removeprefix("http://").rstrip("/").rpartition(":")
    with socket.create_connection((host, int(port)), 20) as silent:
        assert silent.recv(1) == b""


# -- ckptctl dash ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy() -> Iterator[DaemonProcess]:
    """A daemon with an attached trainer and two sealed slots."""
    with busy_daemon() as (daemon, _):
        yield daemon


class Dash:
    """A `ckptctl dash` of its own."""

    def __init__(self, daemon: DaemonProcess, *options: str) -> None:
        command = [sys.executable, "-m", "ckptd.ctl", "dash", "--json", *options]
        self.process = subprocess.Popen(command, env=daemon.env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]

    def view(self, **headers: str) -> Any:
        return json.loads(body(get(self.url, "/view.json", **headers)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(20) == 130
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_it_shows_the_daemon_and_what_changes(busy: DaemonProcess) -> None:
    with Dash(busy) as dash, busy.client() as client:
        eventually(lambda: dash.view()["runs"][0]["tiers"][0]["iteration"] == 6, "both are sealed")
        (run,) = dash.view()["runs"]
        assert [tier["grade"] for tier in run["tiers"]] == ["+", ".", "."]
        assert [slot["state"] for slot in run["details"][0]["slots"]].count("sealed") == 2
        client.request(m.Hello("test", 1))
        with busy.client() as other:
            attach(other, run="another")
            eventually(lambda: len(dash.view()["runs"]) == 2, "another run is seen")


def test_beyond_loopback_a_token_is_made(busy: DaemonProcess, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    with Dash(busy, "--token-file", str(file)) as dash:
        assert dash.url.endswith(f"#viewer={TOKEN}")
        assert dash.view(Authorization=f"Bearer {TOKEN}")["node"]
    with Dash(busy, "--address", "0.0.0.0") as dash:
        token = dash.url.partition("#viewer=")[2]
        assert len(token) >= 32
        port = re.search(r":(\d+)/", dash.url)
        assert port is not None
        local = f"http://127.0.0.1:{port[1]}/"
        assert get(local, "/view.json").status == 401
        assert get(local, "/view.json", Authorization=f"Bearer {token}").status == 200


def test_the_printed_address_is_whole(busy: DaemonProcess) -> None:
    """Output of `ckptctl` hides what looks like a credential."""
    command = [sys.executable, "-m", "ckptd.ctl", "dash", "--address", "0.0.0.0"]
    with subprocess.Popen(command, env=busy.env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()
    assert re.fullmatch(r"the page is at http://[^/]+:\d+/#viewer=[A-Za-z0-9_-]{32}\n", line)


def test_wrong_arguments_are_refused(busy: DaemonProcess, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("1234")
    for options in (["--address", "example.org"], ["--token-file", str(short)], ["--port", "70000"]):
        assert busy.ctl("dash", *options, check=False).returncode == 2
    assert busy.ctl("dash", "--endpoint", "ipc:///nowhere/s", check=False).returncode == 3


# -- a browser ------------------------------------------------------------------------------------


def browse(url: str, folder: Path, *options: str) -> str:
    """The document after some seconds of the page's own time; fails if a script or the policy complained."""
    done = open_page(url, folder, "--enable-logging=stderr", *options)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    return done.stdout


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("world_size", [1, 16_384])
def test_a_browser_shows_everything(tmp_path: Path, world_size: int) -> None:
    with DashServer("127.0.0.1", 0) as server:
        server.publish(view_of(everything(world_size)))
        document = browse(server.url, tmp_path, "--dump-dom")
        picture = tmp_path / "page.png"
        browse(server.url, tmp_path, f"--screenshot={picture}")
    text = re.sub(r"<script.*?</script>|<[^>]+>", "", document, flags=re.DOTALL)
    assert f"{world_size:,} of {world_size:,} ranks known here" in text
    for shown in (
        "In memory + ",
        "If a node is lost",
        "Ring of rank",
        "Stall",
        "Recoveries",
        "Experts",
        "peer_lost",
    ):
        assert shown in text
    assert document.count("<canvas") == 4, "a map of the ranks for each tier, and the experts"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@needs_browser
def test_the_page_updates_by_itself_and_says_when_it_cannot(tmp_path: Path) -> None:
    asked = list[int]()

    class Changing(DashServer):
        async def _current(self) -> Page:
            asked.append(len(asked))
            error = "no answer to GetStatus" if len(asked) > 2 else ""
            self.publish(view_of(replace(answers(), error=error)))
            return await super()._current()

    with Changing("127.0.0.1", 0, TOKEN) as server:
        server.publish(view_of(answers()))
        document = browse(server.url, tmp_path, "--dump-dom")
    assert len(asked) > 3
    assert "The daemon does not answer; this is of " in document
    assert "no answer to GetStatus" in document


@pytest.mark.slow
@needs_browser
def test_names_of_jobs_are_no_markup(tmp_path: Path) -> None:
    event = m.EventInfo(1, 1, "info", "<b>", "<img src=x onerror=alert(1)>", "moe", "run-1", 0)
    with DashServer("127.0.0.1", 0) as server:
        server.publish(view_of(replace(answers(), events=(event,))))
        document = browse(server.url, tmp_path, "--dump-dom")
    assert "&lt;img src=x onerror=alert(1)&gt;" in document
    assert "<img" not in document
