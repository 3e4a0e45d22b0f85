"""A rank finds its own connections to other ranks among all of its connections, and can end them."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckptd.client.in_process.rank_links import RankLinks, _Link
from ckptd.client.ranks.collectives import Collectives
from tests.ckptd.host.hosting import until
from tests.client.gloo_ranks import run_in_ranks

WORLD = 3
HANGS = 1


def _in_rank(rank: int, folder: Path) -> None:
    """One rank hangs; those that wait for it are told so, each by a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        read, write = os.pipe()
        before = len(os.listdir("/proc/self/fd"))
        links = RankLinks.find(Collectives.of_group(dist.group.WORLD))
        assert len(os.listdir("/proc/self/fd")) == before
        assert len(links) >= WORLD - 1
        dist.barrier()
        if rank == HANGS:
            until(lambda: len(list(folder.glob("freed-*"))) == WORLD - 1, "the others")
            return
        waits = threading.Timer(0.5, links.cut)
        waits.start()
        with pytest.raises(RuntimeError, match=r"(?i)connection|reset|closed"):
            dist.all_reduce(torch.ones(1))
        waits.join()
        (folder / f"freed-{rank}").touch()
        links.cut()  # what is cut may be cut again
        here.sendall(b"still here")
        assert there.recv(10) == b"still here"
        os.write(write, b"x")
        assert os.read(read, 1) == b"x"


@pytest.mark.slow
def test_who_waits_for_a_rank_that_hangs_is_freed(tmp_path: Path) -> None:
    run_in_ranks(_in_rank, WORLD, tmp_path, tmp_path)


def test_a_process_without_others_has_no_links() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        links = RankLinks.find(Collectives.alone())
        assert len(links) == 0
        links.cut()
        here.sendall(b"x")
        assert there.recv(1) == b"x"
        for end in (here, there):
            end.close()


def test_a_descriptor_that_was_closed_meanwhile_is_left_alone() -> None:
    """gloo may have closed it, and another connection may have its number."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        other = _Link(here.fileno(), ("127.0.0.1", 1), ("127.0.0.1", 2))
        links = RankLinks([other, _Link(9999, ("", 0), ("", 0))])
        links.cut()
        here.sendall(b"x")
        assert there.recv(1) == b"x"
        for end in (here, there):
            end.close()
