"""What a loss of devices costs a tensor-parallel server: seconds without tokens, throughput, and the backup's price.

- *Seconds without tokens*: real processes under hosts, on this machine's processors. A device is killed with its
  host while requests with long prompts get tokens, and the time from there to the next token of any request, and
  of the last one, is measured. Three ways: with the backup; without it, so that all prompts are computed again;
  and a restart: all processes end, start anew and get what clients had so far as prompts.
- *Throughput* with one, two and three of eight devices lost, against four, which is what a server that needs a
  power of two restarts on. Eight processes would share these processors, so devices are threads whose units of
  work last ``--unit-ms`` each. No placement can exceed n / 4 here.
- *The backup's price*: processor time for a token with and without it, on one device, turn by turn; and of two
  devices on two nodes (threads) with and without copies, of which no network is a part.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.common import Metric, emit, in_shared_environment, median, parser, table
from ckptd.client.serving.device_group import DeviceGroup, ThreadDevices
from ckptd.client.serving.generation import GenerationRequest
from ckptd.client.serving.kv_backup import KvBackup, backup_bytes, format_backup
from ckptd.client.serving.serving_device import EngineOptions, ServingDevice
from ckptd.client.serving.weight_files import DeviceWeights, ModelFiles
from ckptd.core.serving.kv_backup_index import BackupGeometry
from ckptd.demo.lab import DemoDaemon, daemon_folders
from examples.moe_serving.model import VOCABULARY, Sizes, save_model
from examples.moe_serving.server_processes import Clients, ServerProcesses

__all__ = ["main"]

WAYS = ("failsafe", "recompute", "restart")
MINUTE_S = 60.0
TURNS = 3  # other load only ever slows devices down, whose units last a given time


def main() -> None:
    in_shared_environment()
    torch.set_num_threads(1)
    args = _arguments()
    metrics: dict[str, Metric] = {"prompt_tokens": args.prompt, "requests": args.requests}
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-serving-") as scratch:
        folder = Path(scratch)
        priced = save_model(folder / "price", Sizes())
        metrics |= _price(priced, args) | _price_of_copies(priced, args)
        dense = Sizes(layers=args.layers, hidden=32, kv_heads=8, head_dim=8, experts=0, columns=56)
        metrics |= _throughput(save_model(folder / "dense", dense), args)
        larger = Sizes(layers=args.layers, hidden=128, kv_heads=8, head_dim=32, experts=8, columns=128)
        metrics |= _gaps(save_model(folder / "model", larger), folder, args)
    for lost in (1, 2, 3):
        ours = metrics[f"throughput_{8 - lost}_vs_4"] * (MINUTE_S - metrics["failsafe_gap_s"])  # type: ignore[operator]
        metrics[f"first_minute_lost_{lost}_vs_restart"] = ours / (MINUTE_S - metrics["restart_gap_s"])  # type: ignore[operator]
    emit("serving", metrics, as_json=args.json)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.set_defaults(rounds=2)  # of losses; each takes a minute and a half
    options.add_argument("--prompt", type=int, default=2000, help="tokens of each prompt")
    options.add_argument("--requests", type=int, default=8, help="at once")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--steps", type=int, default=4, help="of each turn of a throughput")
    options.add_argument("--unit-ms", type=float, default=3.0, help="of a unit of work, for throughput")
    args = options.parse_args()
    if min(args.prompt, args.requests, args.layers, args.steps, args.rounds) < 1:
        options.error("counts are at least 1")
    return args


def _prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((31 * number + 7 * at + at * at) % VOCABULARY for at in range(length))


# --- the backup's price --------------------------------------------------------------------------------


def _price(model: Path, args: argparse.Namespace) -> dict[str, Metric]:
    """Two devices of one process, with and without a backup, compute the same tokens in turns."""
    turns, steps = 12 * args.rounds, 2 * EngineOptions().block_tokens
    request = GenerationRequest(id="a", prompt=_prompt(1, 64), most=steps * (turns + 2) + 8)
    group = ThreadDevices([0]).seat(0)
    devices = {False: _alone(model, None), True: _alone(model, request.most_tokens)}
    for device in devices.values():
        device.settle(group, 0)
        device.step(group, [request])
    spent: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(-2, turns):
        for backed_up in (turn % 2 == 0, turn % 2 == 1):
            device, begun = devices[backed_up], time.process_time()
            for _ in range(steps):
                device.step(group)
            if device.backup is not None:
                device.backup.drain()
            if turn >= 0:
                spent[backed_up].append((time.process_time() - begun) / steps)
    backup = devices[True].backup
    assert backup is not None
    backup.close()
    ratios = [with_it / without for with_it, without in zip(spent[True], spent[False], strict=True)]
    blocks = backup.copied_blocks / _heads(model)
    return {
        "backup_cost": median(ratios) - 1,
        "backup_cost_of_means": sum(spent[True]) / sum(spent[False]) - 1,
        "token_us": 1e6 * median(spent[False]),
        "backup_bytes_per_token": backup.copied_bytes / (blocks * EngineOptions().block_tokens),
    }


def _price_of_copies(model: Path, args: argparse.Namespace) -> dict[str, Metric]:
    """Two servers of two devices on two nodes, with and without copies, compute the same tokens in turns."""
    turns, steps = 12 * args.rounds, 2 * EngineOptions().block_tokens
    request = GenerationRequest(id="a", prompt=_prompt(1, 64), most=steps * (turns + 2) + 8)
    spent: dict[int, list[float]] = {0: [], 1: []}
    groups = {copies: ThreadDevices([0, 1]) for copies in spent}
    servers = {
        copies: [_alone(model, request.most_tokens, device, copies) for device in range(2)]
        for copies in spent
    }

    def together(copies: int, work: Callable[[ServingDevice, DeviceGroup], None]) -> None:
        seats = [(each, groups[copies].seat(each.device)) for each in servers[copies]]
        threads = [threading.Thread(target=work, args=seat) for seat in seats]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def begin(device: ServingDevice, group: DeviceGroup) -> None:
        device.settle(group, 0)
        device.step(group, [request])

    def serve(device: ServingDevice, group: DeviceGroup) -> None:
        for _ in range(steps):
            device.step(group)
        assert device.backup is not None
        device.backup.drain()

    for copies in servers:
        together(copies, begin)
    for turn in range(-2, turns):
        for copies in (turn % 2, (turn + 1) % 2):
            begun = time.process_time()
            together(copies, serve)
            if turn >= 0:
                spent[copies].append((time.process_time() - begun) / steps)
    for device in [device for devices in servers.values() for device in devices]:
        assert device.backup is not None
        device.backup.close()
    ratios = [with_it / without for with_it, without in zip(spent[1], spent[0], strict=True)]
    return {"copies_cost": median(ratios) - 1, "copies_cost_of_means": sum(spent[1]) / sum(spent[0]) - 1}


def _heads(model: Path) -> int:
    sizes = ModelFiles(model).model
    return sizes.layers * sizes.kv_heads


def _alone(model: Path, most_tokens: int | None, device: int = 0, copies: int = 0) -> ServingDevice:
    """A device that is alone on its node."""
    files, options, backup = ModelFiles(model), EngineOptions(backup_copies=copies), None
    if most_tokens is not None:
        sizes = files.model
        token = sizes.layers * sizes.kv_heads * sizes.kv_token_bytes
        quota = -(-most_tokens // options.block_tokens) * options.block_tokens * token
        geometry = BackupGeometry(
            files.identity, sizes.layers, sizes.kv_heads, sizes.kv_token_bytes, options.block_tokens, quota
        )
        memory = memoryview(bytearray(backup_bytes(geometry)))
        format_backup(memory, geometry)
        backup = KvBackup(memory, files.dtype, sizes.head_dim, f"node {device}")
    return ServingDevice(device, DeviceWeights(files), options, backup)


# --- throughput ----------------------------------------------------------------------------------------


def _throughput(model: Path, args: argparse.Namespace) -> dict[str, Metric]:
    """Tokens per second of n devices, whose units last equally long; of each, the least disturbed of turns."""
    variants = [(n, True) for n in (8, 7, 6, 5, 4)] + [(n, False) for n in (7, 6, 5)]
    rates = dict.fromkeys(variants, 0.0)
    for _ in range(TURNS):
        for n, hybrid in variants:
            rates[n, hybrid] = max(rates[n, hybrid], _rate(model, n, args, hybrid=hybrid))
    base = rates[4, True]
    rows = [
        [f"{n}", f"{rates[n, True]:.2f}", f"{rates[n, True] / base:.2f}", f"{n / 4:.2f}", _cyclic(rates, n)]
        for n in (8, 7, 6, 5, 4)
    ]
    print(table(["devices", "tokens per s", "against 4", "at most", "cyclic heads"], rows))
    found: dict[str, Metric] = {f"throughput_{n}_vs_4": rates[n, True] / base for n in (5, 6, 7, 8)}
    return found | {f"throughput_cyclic_{n}_vs_4": rates[n, False] / base for n in (5, 6, 7)}


def _cyclic(rates: dict[tuple[int, bool], float], n: int) -> str:
    return f"{rates[n, False] / rates[4, True]:.2f}" if (n, False) in rates else "-"


def _rate(model: Path, n: int, args: argparse.Namespace, *, hybrid: bool) -> float:
    place, took = ThreadDevices(range(n)), list[float]()
    requests = [
        GenerationRequest(id=f"{i}", prompt=_prompt(i, 2), most=args.steps + 8) for i in range(args.requests)
    ]

    def work(me: int) -> None:
        options = EngineOptions(hybrid=hybrid, unit_s=args.unit_ms / 1e3)
        files = ModelFiles(model, column_block=2)
        device, group = ServingDevice(me, DeviceWeights(files), options), place.seat(me)
        device.settle(group, 0)
        device.step(group, requests if me == 0 else ())
        device.step(group)
        begun = time.perf_counter()
        for _ in range(args.steps):
            device.step(group)
        took.append(time.perf_counter() - begun)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(took) < n:
        raise RuntimeError("a device failed: see above")
    tokens: int = args.steps * args.requests
    return tokens / max(took)


# --- seconds without tokens ----------------------------------------------------------------------------


def _gaps(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Metric]:
    """From the death of a device to the next tokens."""
    first: dict[str, list[float]] = {way: [] for way in WAYS}
    last: dict[str, list[float]] = {way: [] for way in WAYS}
    with daemon_folders() as (runtime, segments):
        daemon = DemoDaemon(runtime, segments, memory="1GiB")
        daemon.start()
        words = ["--backup", "256MiB", "--daemon", daemon.endpoint]
        server = ServerProcesses(folder / "server", model, 4, words)
        try:
            with server.running():
                for number in range(args.rounds):
                    for way in WAYS:
                        some, every = _loss(server, way, number, args)
                        first[way].append(some)
                        last[way].append(every)
                        print(f"{way}: {some:.2f} s to the next token, {every:.2f} s to one of each request")
        finally:
            daemon.stop()
    gaps = {way: median(first[way]) for way in WAYS}
    slowest = {way: median(last[way]) for way in WAYS}
    return {
        **{f"{way}_gap_s": gaps[way] for way in WAYS},
        **{f"{way}_gap_of_all_s": slowest[way] for way in WAYS},
        "failsafe_vs_recompute": gaps["failsafe"] / gaps["recompute"],
        "failsafe_vs_restart": gaps["failsafe"] / gaps["restart"],
        "failsafe_vs_recompute_of_all": slowest["failsafe"] / slowest["recompute"],
    }


def _loss(server: ServerProcesses, way: str, number: int, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds to the first token of any request, and to that of the last one; all devices are there after it."""
    requests = _requests(args, f"{way}{number}", backed_up=way == "failsafe")
    clients = Clients(server.sockets, requests, at_once=len(requests))
    server.until(lambda: min(map(len, clients.found.values())) >= 6 or clients.over, "tokens of all requests")
    if way == "restart":
        at = time.time()
        for rank in list(server.hosts):
            server.kill(rank)
        asked = [
            GenerationRequest(
                id=f"{each.id}again", prompt=each.prompt + tuple(clients.found[each.id]), most=8
            )
            for each in requests
        ]
        server.start_all()
        after = Clients(server.sockets, asked, at_once=len(asked))
    else:
        victim = 1 + number % 3
        at, after = server.kill(victim), clients
        server.until_absent([victim])
    return _times(server, after, at, way, victim=None if way == "restart" else victim)


def _times(
    server: ServerProcesses, clients: Clients, at: float, way: str, *, victim: int | None
) -> tuple[float, float]:
    # Tokens that were on their way when the device died come within milliseconds: those of a settled epoch count.
    settled = (
        max(each["begun_s"] for each in server.told("settled") if each["begun_s"] > at) if victim else at
    )
    names = set(clients.found)

    def firsts() -> dict[str, float]:
        found: dict[str, float] = {}
        for when, name in list(clients.times):
            if when > settled:
                found.setdefault(name, when)
        return found

    server.until(lambda: firsts().keys() == names, f"a token of each request ({way})")
    found = firsts().values()
    if victim is not None:
        server.start(victim)
        server.until_absent([])
    clients.join()
    return min(found) - at, max(found) - at


def _requests(args: argparse.Namespace, name: str, *, backed_up: bool) -> Sequence[GenerationRequest]:
    return [
        GenerationRequest(
            id=f"{name}-{i}",
            prompt=_prompt(i, args.prompt),
            most=48,
            backed_up=backed_up,
        )
        for i in range(args.requests)
    ]


if __name__ == "__main__":
    main()
