"""What Prometheus would read: a page of metrics, fetched as it does it, or made of a `NodeView`."""

from __future__ import annotations

import shutil
import socket
import subprocess
from http.client import HTTPConnection, HTTPResponse

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptd.transport.messages import Events, GetEvents
from ckptd.transport.wire import ControlClient

__all__ = ["Page", "get", "metrics_address", "promtool", "scrape"]

ACCEPT = "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"


class Page:
    """The samples of a page.

    Attributes:
        text: as it was read.
        types: of each metric; counters without their ``_total``.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        families = list(text_string_to_metric_families(text))
        self.types = {family.name: family.type for family in families}
        self.samples = [sample for family in families for sample in family.samples]

    def __getitem__(self, name: str) -> float:
        """The only sample of a metric."""
        (value,) = self.by_labels(name).values()
        return value

    def by_labels(self, name: str, **wanted: str) -> dict[tuple[str, ...], float]:
        """The samples with these labels, by the values of the others in the order of their names."""
        return {
            tuple(text for label, text in sorted(sample.labels.items()) if label not in wanted): sample.value
            for sample in self.samples
            if sample.name == name and wanted.items() <= sample.labels.items()
        }


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(address: str, target: str = "/metrics", method: str = "GET") -> tuple[HTTPResponse, str]:
    """The answer, and its body; ``address`` is a value of the setting ``metrics``."""
    unix = address.startswith("unix:")
    connection = _UnixConnection(address[5:]) if unix else HTTPConnection(address, timeout=20)
    try:
        connection.request(method, target, headers={"Accept": ACCEPT})
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


def scrape(address: str) -> Page:
    response, text = get(address)
    assert response.status == 200, text
    return Page(text)


def metrics_address(endpoint: str) -> str:
    """Where the daemon of this endpoint serves its metrics."""
    with ControlClient(endpoint, timeout_s=20) as client:
        events = client.ask(GetEvents(), Events).events
    (text,) = [event.message for event in events if event.kind == "metrics"]
    return text.removeprefix("metrics are served at ")


def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run it; skips where it is not installed."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    return subprocess.run(
        [tool, *arguments], input=given, capture_output=True, text=True, timeout=60, check=False
    )
