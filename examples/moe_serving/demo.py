"""Four processes serve a tiny mixture of experts to clients that keep asking. One is killed, then another.

    make demo-serving        or        python -m examples.moe_serving.demo

The two that are left go on: KV that was lost comes from the backup in the daemon's memory, weights from the
model's file. Later both hosts are started again, and take their parts back. The demo fails unless every
client has every token of its request once, and all answers are those of one undisturbed device.

Each unit of work of a device lasts ``--unit-us`` at least, as if each process had a device of its own: four
share this machine's cores.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ckptd.client.serving.generation import GenerationRequest
from ckptd.client.serving.serving_device import EngineOptions
from ckptd.demo.lab import DemoDaemon, ProcessDied, daemon_folders
from ckptd.demo.report import table
from ckptd.units import format_bytes
from examples.demo_progress import failed
from examples.moe_serving.model import Sizes, save_model
from examples.moe_serving.server_processes import (
    Clients,
    ServerProcesses,
    tokens_per_s,
    undisturbed_answers,
)
from examples.rerouted_hosts import RunEnded, end_on_sigterm

__all__ = ["differences", "main", "requests_of"]

DEVICES, AT_ONCE = 4, 6
PROMPT = (20, 120)  # bytes
OPTIONS = EngineOptions()


def requests_of(count: int, tokens: int, draw: random.Random) -> list[GenerationRequest]:
    """Prompts of this text, every second with draws."""
    text = __doc__.encode()
    found = []
    for number in range(count):
        length = draw.randint(*PROMPT)
        begin = draw.randrange(len(text) - length)
        found.append(
            GenerationRequest(
                id=f"request{number}",
                prompt=tuple(text[begin : begin + length]),
                most=tokens,
                temperature=float(number % 2),
                seed=number,
            )
        )
    return found


def differences(wanted: dict[str, list[int]], found: dict[str, list[int]]) -> list[str]:
    """Answers that are not those of an undisturbed device."""
    return [
        f"{name}: {len(found.get(name, []))} tokens, of which "
        f"{sum(a == b for a, b in zip(tokens, found.get(name, []), strict=False))} are right; wanted "
        f"{len(tokens)}"
        for name, tokens in wanted.items()
        if found.get(name) != tokens
    ]


class Show:
    """The story, with what was measured of it."""

    def __init__(self, server: ServerProcesses, clients: Clients) -> None:
        self._server, self._clients = server, clients
        self._begun, self._phases = time.time(), list[tuple[str, float, float]]()
        self._gaps: dict[str, tuple[float, str]] = {}

    def say(self, text: str) -> None:
        print(f"[{time.time() - self._begun:6.1f} s] {text}", flush=True)

    def serve(self, devices: str, tokens: int) -> None:
        """Let the clients have so many tokens more."""
        begin, wanted = time.time(), self._clients.tokens + tokens
        self._server.until(lambda: self._clients.tokens >= wanted or self._clients.over, "tokens")
        self._phases.append((devices, begin, time.time()))

    def lose(self, rank: int, absent: Sequence[int]) -> None:
        at = self._server.kill(rank)
        self.say(f"SIGKILL to device {rank} and its host")
        self._server.until_absent(absent)
        seen = self._clients.tokens
        self._server.until(lambda: self._clients.tokens > seen + AT_ONCE, "tokens after a loss")
        settled = [each for each in self._server.told("settled") if each["absent"] == sorted(absent)]
        read = format_bytes(sum(each["backup_bytes"] for each in settled))
        self._gaps[f"{DEVICES - len(absent)}"] = self._clients.gap_s(at), read
        self.say(f"{settled[-1]['reason']}")

    def print_table(self) -> None:
        rows: list[list[object]] = []
        for devices, begin, end in self._phases:
            gap, read = self._gaps.get(devices, (0.0, ""))
            rate = tokens_per_s(self._clients.times, begin, end)
            rows.append([devices, f"{rate:.0f}", f"{gap:.2f}" if read else "-", read or "-"])
        print()
        print(
            table(["devices", "tokens per s", "s without a token after the loss", "KV from the backup"], rows)
        )


def play(args: argparse.Namespace, draw: random.Random, scratch: Path) -> list[str]:
    """All of it; what is wrong."""
    model = save_model(scratch / "model", Sizes(), seed=args.seed)
    requests = requests_of(args.requests, args.tokens, draw)
    first, second = draw.sample(range(1, DEVICES), 2)  # the host of rank 0 decides who is there
    with daemon_folders() as (runtime, segments):
        daemon = DemoDaemon(runtime, segments, memory="256MiB")
        daemon.start()
        words = ["--backup", "64MiB", "--daemon", daemon.endpoint, "--unit-us", f"{args.unit_us}"]
        server = ServerProcesses(scratch / "server", model, DEVICES, words)
        try:
            with server.running():
                clients = Clients(server.sockets, requests, at_once=AT_ONCE)
                server.until(lambda: clients.tokens > 0, "a first token")
                show = Show(server, clients)
                show.say(f"{DEVICES} devices serve {AT_ONCE} requests at once")
                part = args.requests * args.tokens // 6
                show.serve("4", part)
                show.lose(first, [first])
                show.serve("3", part)
                show.lose(second, [first, second])
                show.serve("2", part)
                for rank in (first, second):
                    server.start(rank)
                show.say("both hosts are started again")
                server.until_absent([])
                show.say(server.told("settled")[-1]["reason"])
                show.serve("4 again", part)
                clients.join()
                server.end()
                show.say("all requests have ended")
        finally:
            daemon.stop()
        show.print_table()
    problems = [f"{error!r}" for error in clients.errors]
    return problems + differences(undisturbed_answers(model, requests, OPTIONS), clients.found)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill devices of a server; clients keep their requests.")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--unit-us", type=float, default=800.0, help="least time of a unit of work")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(1)
    print(f"{DEVICES} processes on {os.cpu_count()} cores, seed {args.seed}.\n")
    try:
        with tempfile.TemporaryDirectory(prefix="ckptd-demo-serving-") as scratch:
            problems = play(args, random.Random(args.seed), Path(scratch))
    except (RunEnded, ProcessDied) as error:
        print(f"\nFAILED: {error}")
        return 1
    if problems:
        return failed(problems, f"{len(problems)} problems")
    print(f"\nIDENTICAL: all {args.requests} answers are those of one undisturbed device, each token once.")
    return 0


if __name__ == "__main__":
    end_on_sigterm()
    raise SystemExit(main())
