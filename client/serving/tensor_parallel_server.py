"""``TensorParallelServer``: one process of a server that goes on when others die, and takes them back.

Each process is a device, under a host with ``--reroute`` (`ckptd.host.rerouted_epochs`), which says who is
there. A loss cuts all connections, a return is heard at the begin of a step; in both cases all that are
there meet anew, settle (`ServingDevice.settle`), and serve on. ``python -m
ckptd.client.serving.tensor_parallel_server`` is a server by itself: see docs/serving.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from ckptd.client.identity import Identity
from ckptd.client.log_lines import get_logger
from ckptd.client.options import DaemonOptions
from ckptd.client.rerouting.epoch_group import OF_CALLS, EpochGroup, EpochSeat
from ckptd.client.serving.device_group import DeviceGroup, GlooDevices
from ckptd.client.serving.generation import GenerationRequest
from ckptd.client.serving.kv_backup import KvBackup
from ckptd.client.serving.kv_memory import KvMemory
from ckptd.client.serving.request_front import RequestFront, socket_of
from ckptd.client.serving.serving_device import EngineOptions, Heard, ServingDevice, SettledEpoch
from ckptd.client.serving.weight_files import DeviceWeights, ModelFiles
from ckptd.config.settings import parse_bytes
from ckptd.core.serving.kv_backup_index import BackupGeometry
from ckptd.restart_line import EndLoop

logger = get_logger(__name__)

_IDLE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a server serves, and with what; the same for all of its processes, but for ``compute``.

    Attributes:
        model: a folder with ``config.json`` and safetensors files.
        sockets: a folder for the devices' sockets (`ServingClient`).
        backup_bytes: the quota of each node's backup; 0: there is none.
        job, run: names of the server at the daemon, and of its backup.
        compute: a torch device.
        events: a file to which each device appends what happens, as lines of JSON; None: nowhere.
    """

    model: Path
    sockets: Path
    engine: EngineOptions = field(default_factory=EngineOptions)
    backup_bytes: int = 0
    job: str = "server"
    run: str = "default"
    daemon: DaemonOptions = field(default_factory=DaemonOptions)
    compute: str = "cpu"
    events: Path | None = None


class TensorParallelServer:
    """One process.

    Attributes:
        device: the engine.
    Raises:
        ValueError: there is no host, the model cannot be served, or the run has a backup of another model.
        AttachRefused: the daemon has no memory for the backup.
        DaemonUnavailable: no daemon answers.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._seat = EpochSeat()
        files = ModelFiles(options.model)
        files.load_ahead()  # this device may be back, and others wait while it reads
        self.device = ServingDevice(self._seat.rank, DeviceWeights(files, options.compute), options.engine)
        self._memory: KvMemory | None = None
        self._geometry: BackupGeometry | None = None
        if options.backup_bytes:
            self._memory = self._attach(files)
        self._events: TextIO | None = None
        if options.events is not None:
            self._events = options.events.open("a", buffering=1)
        self._front = RequestFront(socket_of(options.sockets, self._seat.rank), self._check)

    def _check(self, request: GenerationRequest) -> None:
        """Also before this device has its backup (`ServingDevice.check`)."""
        self.device.check(request)
        if self._geometry is not None and request.backed_up:
            self._geometry.check_length(request.id, request.most_tokens)

    def _attach(self, files: ModelFiles) -> KvMemory:
        options, rank = self._options, self._seat.rank
        model = files.model
        geometry = self._geometry = BackupGeometry(
            files.identity,
            model.layers,
            model.kv_heads,
            model.kv_token_bytes,
            options.engine.block_tokens,
            options.backup_bytes,
        )
        identity = Identity(options.job, options.run, rank, self._seat.world_size)
        owner = int(os.environ.get("LOCAL_RANK", rank)) == 0
        return KvMemory(identity, options.daemon, geometry, owner=owner)

    def serve(self) -> None:
        """Serve until a client says stop, whoever dies meanwhile.

        Raises:
            RuntimeError: of the connections, if no loss of another device explains it: the process should
                end.
        """
        seat = self._seat
        seat.take()
        seat.enter(None, self._settle)
        try:
            while True:
                try:
                    heard = self._step()
                except OF_CALLS as error:
                    seat.enter(seat.epoch_after(error), self._settle)
                    continue
                if heard.stop:
                    seat.line.say("finished")
                    if isinstance(news := seat.line.next_epoch(), EndLoop):
                        return
                    seat.enter(news, self._settle)
                elif heard.newest > seat.line.epoch:  # all know of it, and are here
                    seat.enter(seat.line.next_epoch(), self._settle)
        finally:
            self._front.close()
            if self._memory is not None:
                self._memory.close()

    def _step(self) -> Heard:
        device, group = self.device, self._group
        assert device.state is not None
        inbox = self._front.inbox({*device.state.requests, *device.answers})
        heard = device.step(group, inbox, word=self._seat.line.heard(), stop=self._front.stopping)
        self._front.publish(device.state.requests, device.answers)
        if heard.tokens:
            uncopied = device.copies.waiting if device.copies is not None else 0
            self._tell("tokens", count=len(heard.tokens), open=len(device.state.open), uncopied=uncopied)
        elif not device.state.requests and not inbox:
            time.sleep(_IDLE_S)
        return heard

    def _settle(self, group: EpochGroup) -> None:
        begun = time.time()
        self._group: DeviceGroup = GlooDevices(group)
        if self._memory is not None:
            shared = self._memory.share(self._group)
            if shared is not None:
                files = self.device.weights.files
                node = self._memory.session.node_id
                self.device.attach(KvBackup(shared, files.dtype, files.model.head_dim, node))
        settled = self.device.settle(self._group, self._seat.line.epoch)
        self._tell_settled(settled, begun)

    def _tell_settled(self, settled: SettledEpoch, begun: float) -> None:
        self._tell(
            "settled",
            epoch=self._seat.line.epoch,
            absent=sorted(self._seat.absent),
            begun_s=begun,
            seconds=settled.seconds,
            backup_bytes=settled.backup_bytes,
            node_bytes=settled.node_bytes,
            peer_bytes=settled.peer_bytes,
            recomputed=settled.recomputed,
            reason=settled.plan.reason if settled.plan is not None else "the first devices",
        )

    def _tell(self, event: str, **more: Any) -> None:
        if self._events is not None:
            line = {"event": event, "time_s": time.time(), "pid": os.getpid(), "rank": self._seat.rank}
            self._events.write(json.dumps(line | more) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """A server by itself."""
    parser = argparse.ArgumentParser(description="A process of a tensor-parallel server (docs/serving.md).")
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model")
    parser.add_argument("--sockets", type=Path, required=True, help="folder for the devices' sockets")
    parser.add_argument("--backup", default="0", help="quota of the backup of KV, such as 4GiB")
    parser.add_argument("--backup-copies", type=int, default=0, help="on so many other nodes, too")
    parser.add_argument("--job", default="server")
    parser.add_argument("--run", default="default")
    parser.add_argument("--daemon", default="auto", help="ipc:///path of the daemon's socket")
    parser.add_argument("--compute", default="cpu", help="a device of torch")
    parser.add_argument("--block-tokens", type=int, default=EngineOptions().block_tokens)
    parser.add_argument("--piece-tokens", type=int, default=EngineOptions().piece_tokens)
    parser.add_argument("--sum-by-device", action="store_true", help="less traffic; logits depend on n")
    parser.add_argument("--no-recovery", action="store_true", help="compute lost KV again")
    parser.add_argument("--unit-us", type=float, default=0.0, help="least time of a unit, for demos")
    parser.add_argument("--events", type=Path, help="file for lines of JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the same sums everywhere
    engine = EngineOptions(
        block_tokens=args.block_tokens,
        piece_tokens=args.piece_tokens,
        ordered=not args.sum_by_device,
        use_backup=not args.no_recovery,
        backup_copies=args.backup_copies,
        unit_s=args.unit_us / 1e6,
    )
    options = ServerOptions(
        model=args.model,
        sockets=args.sockets,
        engine=engine,
        backup_bytes=parse_bytes(args.backup),
        job=args.job,
        run=args.run,
        daemon=DaemonOptions(endpoint=args.daemon),
        compute=args.compute,
        events=args.events,
    )
    TensorParallelServer(options).serve()


if __name__ == "__main__":
    main()
