"""Put and get between two processes, against raw TCP and a memory copy, by fabric, chunk size and
number of connections.

The other process is on the same machine, so both share its cores: bytes per CPU second matter more
than what one pair reaches here. Raw TCP is ``sendall`` against ``recv_into`` in the same two
processes, without digests; ``raw_tcp_digest`` is the same loop with an xxh3 digest computed at both
ends, piece by piece: what digests cost anybody on this machine.

``stream`` is plaintext with digests, ``encrypted`` is the default between daemons, ``zmq`` are
ZeroMQ's frames, under CURVE where the names end in it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import multiprocessing.connection
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import xxhash

from bench.common import (
    GB,
    MIB,
    copy_gb_per_s,
    emit,
    in_shared_environment,
    interleave,
    median,
    parser,
)
from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.fabric.zmq_fabric import FabricOptions, ZmqFabric
from ckptd.transport.tcp.stream_fabric import STREAM_CHUNK_BYTES, StreamFabric, StreamOptions
from ckptd.transport.verbs import CHUNK_BYTES, Access, PeerAddress, RegionKey, Scope

__all__ = ["main"]

RAW_PLAIN, RAW_DIGEST = b"g", b"d"
LOOPBACK = "tcp://127.0.0.1:0"
STREAM_CHUNK_KIB = STREAM_CHUNK_BYTES >> 10
DEFAULTS = {"zmq": CHUNK_BYTES >> 10, "stream": STREAM_CHUNK_KIB, "encrypted": STREAM_CHUNK_KIB}
Pipe = multiprocessing.connection.Connection


def _nothing(node: str, body: bytes, answer: Callable[[bytes], None]) -> None:
    """Nobody asks."""


def _fabric(kind: str, node: str, chunk_bytes: int, connections: int, keys: Path | None) -> ZmqFabric:
    options = FabricOptions(chunk_bytes=chunk_bytes, connections_per_peer=connections)
    known = None if keys is None else Keys.load(keys)
    if kind == "zmq":
        return ZmqFabric(node, LOOPBACK, serve=_nothing, keys=known, options=options)
    streams = StreamOptions(plaintext=kind == "stream")
    return StreamFabric(node, LOOPBACK, serve=_nothing, keys=known, options=options, streams=streams)


def _filled(size_bytes: int) -> memoryview:
    """Touched memory: page faults are not what is measured."""
    return memoryview(np.random.default_rng(0).bytes(size_bytes) + b"")


# --- the other process -----------------------------------------------------------------------------------


def _other(pipe: Pipe, size_bytes: int, keys: Path | None) -> None:
    """A fabric with one region and a raw TCP port; says its CPU time whenever it is asked."""
    buffer = memoryview(bytearray(_filled(size_bytes)))
    fabric = _fabric("stream", "there", MIB, 1, keys)  # it serves all kinds
    region = fabric.register(buffer, access=Access.READ | Access.WRITE, scope=Scope(""))
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_raw_server, args=(listener, buffer), daemon=True).start()
    pipe.send((fabric.address, region.key, listener.getsockname()))
    while pipe.recv():
        pipe.send(time.process_time())
    fabric.close()


def _raw_server(listener: socket.socket, buffer: memoryview) -> None:
    connection, _ = listener.accept()
    with connection:
        while order := connection.recv(1):
            digest = xxhash.xxh3_64() if order == RAW_DIGEST else None
            _receive(connection, buffer, digest)
            connection.sendall(b"k" if digest is None else digest.digest())


def _receive(connection: socket.socket, buffer: memoryview, digest: xxhash.xxh3_64 | None) -> None:
    at = 0
    while at < len(buffer):
        # Without MSG_WAITALL a call returns what is there, and the baseline pays for many more of them.
        count = connection.recv_into(buffer[at : at + MIB], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other side is gone")
        if digest is not None:
            digest.update(buffer[at : at + count])
        at += count


class Other:
    """That process, seen from here."""

    def __init__(self, size_bytes: int, keys: Path | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_other, args=(theirs, size_bytes, keys), daemon=True)
        self._process.start()
        self.address: PeerAddress
        self.key: RegionKey
        self.address, self.key, raw = self._pipe.recv()
        self._raw = socket.create_connection(raw)

    def cpu_s(self) -> float:
        self._pipe.send(True)
        return float(self._pipe.recv()) + time.process_time()

    def raw_put(self, source: memoryview, *, digests: bool = False) -> None:
        digest = xxhash.xxh3_64() if digests else None
        self._raw.sendall(RAW_PLAIN if digest is None else RAW_DIGEST)
        for at in range(0, len(source), MIB):
            piece = source[at : at + MIB]
            if digest is not None:
                digest.update(piece)
            self._raw.sendall(piece)
        wanted = b"k" if digest is None else digest.digest()
        if self._raw.recv(len(wanted), socket.MSG_WAITALL) != wanted:
            raise ConnectionError("the other side is gone, or has something else")

    def close(self) -> None:
        self._raw.close()
        self._pipe.send(False)
        self._process.join(20)


# --- measuring -------------------------------------------------------------------------------------------


class Meter:
    """Rates and CPU seconds of named ways to move ``size_bytes``."""

    def __init__(self, other: Other, size_bytes: int) -> None:
        self._other = other
        self._size = size_bytes
        self.cpu: dict[str, list[float]] = {}

    def of(self, name: str, move: Callable[[], None]) -> Callable[[], float]:
        def once() -> float:
            cpu, begun = self._other.cpu_s(), time.perf_counter()
            move()
            took_s = time.perf_counter() - begun
            spent_s = self._other.cpu_s() - cpu
            self.cpu.setdefault(name, []).append(spent_s / (self._size / GB))
            return self._size / GB / took_s

        return once


@contextmanager
def _key_folders() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as name:
        here, there = Path(name, "here"), Path(name, "there")
        pairs = {folder.name: Keys.create(folder) for folder in (here, there)}
        trust(here, "there", pairs["there"].public)
        trust(there, "here", pairs["here"].public)
        yield here, there


def compare(
    args: argparse.Namespace, here: Path | None, there: Path | None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """GB/s and CPU seconds per GB of every variant, the same rounds for all."""
    size = args.mib * MIB
    source, target = _filled(size), memoryview(bytearray(_filled(size)))
    other = Other(size, there)
    meter = Meter(other, size)
    variants = {
        "raw_tcp": meter.of("raw_tcp", lambda: other.raw_put(source)),
        "raw_tcp_digest": meter.of("raw_tcp_digest", lambda: other.raw_put(source, digests=True)),
    }
    with ExitStack() as stack:
        stack.callback(other.close)
        for kind, chunk_kib, connections in _variants(args, keyed=here is not None):
            fabric = _fabric(kind, "here", chunk_kib << 10, connections, here)
            stack.callback(fabric.close)
            peer = fabric.peer(other.address)

            def put(peer=peer) -> None:  # type: ignore[no-untyped-def]  # bound in the loop
                assert peer.put(source, other.key).wait(120).ok

            def get(peer=peer) -> None:  # type: ignore[no-untyped-def]
                assert peer.get(other.key, target).wait(120).ok

            for verb, move in (("put", put), ("get", get)):
                name = f"{verb}_{kind}_{chunk_kib}k_x{connections}"
                variants[name] = meter.of(name, move)
        samples = interleave(variants, rounds=args.rounds, warmup=1)
    return samples, meter.cpu


def _variants(args: argparse.Namespace, *, keyed: bool) -> Iterator[tuple[str, int, int]]:
    for kind, connections in itertools.product(args.fabrics, args.connections):
        if kind == "encrypted" and not keyed:
            continue
        for chunk_kib in args.chunk_kib or (DEFAULTS[kind],):
            yield kind, chunk_kib, connections


def report(
    samples: dict[str, list[float]], cpu: dict[str, list[float]], suffix: str
) -> dict[str, float | int | str]:
    """Medians, and the default variants of put and get against raw TCP of the same rounds.

    The variant is fixed beforehand: the best of several would be a draw from their noise. On a
    machine with other work the rates say little, because a way with more threads gets more of the
    cores: then only the CPU ratios hold.
    """
    out: dict[str, float | int | str] = {}
    for name, values in samples.items():
        end = _suffix(name, suffix)
        out[f"{name}{end}_gb_per_s"] = median(values)
        out[f"{name}{end}_cpu_s_per_gb"] = median(cpu[name][-len(values) :])
    for verb, (kind, chunk_kib) in itertools.product(("put", "get"), DEFAULTS.items()):
        name = f"{verb}_{kind}_{chunk_kib}k_x1"
        if name not in samples:
            continue  # the default was not among the variants asked for
        ratio, end = f"{verb}_{kind}", _suffix(name, suffix)
        for raw in ("raw_tcp", "raw_tcp_digest"):
            pairs = zip(samples[name], samples[raw], strict=True)
            out[f"{ratio}_vs_{raw}{end}"] = median([ours / theirs for ours, theirs in pairs])
        out[f"{ratio}_cpu_vs_raw_tcp{end}"] = (
            out[f"{name}{end}_cpu_s_per_gb"] / out[f"raw_tcp{suffix}_cpu_s_per_gb"]  # type: ignore[operator]
        )
    return out


def _suffix(name: str, suffix: str) -> str:
    """What is encrypted is so in one run only."""
    return "" if "encrypted" in name else suffix


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--mib", type=int, default=256, help="size of a transfer")
    options.add_argument("--fabrics", nargs="+", choices=DEFAULTS, default=list(DEFAULTS))
    options.add_argument("--chunk-kib", type=int, nargs="*", default=[], help="else the defaults")
    options.add_argument("--connections", type=int, nargs="+", default=[1, 2])
    args = options.parse_args()
    load_before = os.getloadavg()[0]
    metrics = report(*compare(args, None, None), "")
    with _key_folders() as (here, there):
        args.chunk_kib, args.connections = [], [1]
        metrics |= report(*compare(args, here, there), "_curve")
    metrics["memory_copy_gb_per_s"] = copy_gb_per_s(64 << 20, threads=1)
    metrics["load_before"], metrics["load_after"] = load_before, os.getloadavg()[0]
    metrics["mib"] = args.mib
    metrics["cores"] = len(os.sched_getaffinity(0))
    emit("transport", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
