"""Ranks that are in no process group of torch together reach each other another way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ckptd.client.identity import Identity
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.ranks.job_link import JobLink, job_link, use_job_link
from ckptd.client.ranks.store_barrier import job_store


@pytest.fixture
def link() -> Iterator[JobLink]:
    def exchange(payload: bytes) -> list[bytes]:
        return [payload, b"\x07"]

    made = JobLink(2, exchange, dist.HashStore())  # type: ignore[attr-defined]
    use_job_link(made)
    yield made
    use_job_link(None)


def test_collective_calls_and_the_store_go_that_way(link: JobLink) -> None:
    ranks = Collectives.of_job(Identity("job", "run", 0, 2), node="n")
    assert ranks.gather(5, int) == [5, 7]
    assert job_store() is link.store
    use_job_link(None)
    assert job_link() is None
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        ranks.gather(5, int)


def test_it_is_for_runs_of_its_size_alone(link: JobLink) -> None:
    assert Collectives.of_job(Identity("job", "run", 0, 1), node="n").gather(5, int) == [5]
    with pytest.raises(ValueError, match="world_size=3"):
        Collectives.of_job(Identity("job", "run", 0, 3), node="n").gather(5, int)
