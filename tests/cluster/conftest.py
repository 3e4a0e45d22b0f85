"""One small cluster for the tests of the cluster itself; a line says which kind of network it has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.network import why_no_namespaces


def pytest_report_header() -> str:
    """Which network the tests of clusters use, and why."""
    why = why_no_namespaces()
    return f"cluster network: {f'loopback addresses ({why})' if why else 'network namespaces'}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts and a head, shared by the tests of a module: they leave it as they found it."""
    with Cluster(2) as made:
        print(made)  # noqa: T201 - shown with the output of a test that fails
        yield made
