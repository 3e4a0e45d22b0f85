"""What is wrong is refused by name, with numbers and a way out; what is damaged is never trained on.

The real client against the real daemon. Refusals are seen from within this process; whatever has to
die is a process.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from torch import nn

from ckptd.client import Checkpointer, DaemonOptions, RunOptions, SnapshotOptions
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.slots import SlotState
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.storage.image import ImageView
from ckptd.transport.messages import GetSnapshots, GetStatus, Refused, Snapshots, Status
from ckptd.transport.wire import encode
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.running import eventually, small_tmpfs
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.option_groups import grouped

TOTAL = "15"


@pytest.fixture
def hurt(tmp_path: Path) -> Iterator[tuple[Jobs, DaemonProcess]]:
    """A daemon whose files may be damaged, and jobs for it."""
    with own_daemon() as daemon:
        yield Jobs(tmp_path, daemon.endpoint), daemon


def net(width: int = 8, *, hidden: str = "hidden", dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = {f"{hidden}{more}": nn.Linear(width, width) for more in ("", "_2", "_3")}
    return nn.ModuleDict(layers | {"out": nn.Linear(width, 8)}).to(dtype)


def train(
    model: nn.Module,
    daemon: DaemonProcess,
    steps: int = 8,
    state: Mapping[str, Any] | None = None,
    **options: Any,
) -> Checkpointer:
    """Some steps of training with snapshots; the checkpointer is closed, its snapshots stay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"job": "e2e", "window": 2, "daemon": daemon.endpoint, "timeout_s": 5.0, **options}
    with contextlib.closing(Checkpointer(model, optimizer, state, **grouped(**options))) as ckpt:
        for _ in ckpt.steps(steps):
            torch.stack([p.float().square().sum() for p in model.parameters()]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return ckpt


# -- refused at the attach -----------------------------------------------------------------------


def test_a_quota_too_small_is_refused_with_the_numbers(run: str) -> None:
    with own_daemon("--memory", "1MiB") as daemon, pytest.raises(AttachRefused) as refusal:
        train(nn.Linear(512, 512), daemon, run=run)
    text = str(refusal.value)
    assert refusal.value.code == "quota"
    assert "4 slots of" in text, text  # how much is needed, and how that comes about
    assert "the quota is 1 MiB" in text, text
    assert "of which 0 B is in use" in text, text
    assert "CKPTD_MEMORY" in text, text


def test_a_filesystem_too_small_is_refused_with_the_numbers(run: str) -> None:
    """/dev/shm in a container is 64 MB: said at the attach, not by SIGBUS while training."""
    with (
        small_tmpfs("2M") as folder,
        own_daemon("--memory", "256MiB", segment_dir=folder) as daemon,
        pytest.raises(AttachRefused) as refusal,
    ):
        train(nn.Linear(512, 512), daemon, run=run)
    assert refusal.value.code == "segment_fs"
    assert str(folder) in refusal.value.message
    assert "has 2 MiB" in refusal.value.message
    assert "remount" in refusal.value.hint


def test_a_filesystem_that_fills_up_after_the_attach_does_not_stop_training(run: str) -> None:
    """Somebody else took the memory before the first snapshot: unprotected, loud, and the loop goes on."""
    with (
        small_tmpfs("8M") as folder,
        own_daemon("--memory", "256MiB", segment_dir=folder) as daemon,
    ):
        model = nn.Linear(128, 128)
        optimizer = torch.optim.AdamW(model.parameters())
        ckpt = Checkpointer(
            model,
            optimizer,
            run=RunOptions(job="e2e", name=run),
            daemon=daemon.endpoint,
            snapshots=SnapshotOptions(window=2),
        )
        (folder / "hog").write_bytes(bytes(8 << 20)[: os.statvfs(folder).f_bavail * 4096])
        steps = 0
        for _ in ckpt.steps(5):
            model.weight.square().sum().backward()
            optimizer.step()
            steps += 1
        ckpt.close()
        assert steps == 5
        assert ckpt.stats()["snapshots"] == 0
        (message,) = daemon.events("not_protected", run)
    assert "is free" in message


def test_a_second_trainer_with_the_same_rank_is_refused_while_the_first_lives(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    first, out = jobs.start("plain", "--run", run, "--total", "400", "--step-ms", "20")

    def is_snapshotting() -> bool:
        found = daemon.ask(GetSnapshots("e2e", run), Snapshots).ranks
        return bool(found) and found[0].suffix != (-1, -1)

    eventually(is_snapshotting, "the first trainer's suffix")
    second, refused = jobs.start("plain", "--run", run, "--total", "400")
    second.join(60)
    assert second.exitcode == 1
    assert first.is_alive(), jobs.log(out)
    first.kill()
    first.join()
    log = jobs.log(refused)
    assert "AttachRefused" in log
    assert "rank_taken" in log
    assert f"process {first.pid}" in log
    # Once the first is dead, its rank is free, and what it left is resumed from.
    third = jobs.run("plain", "--run", run, "--total", "400")
    assert jobs.report(third)["resumed_from"] is not None


def test_another_topology_or_world_size_is_refused(daemon: DaemonProcess, run: str) -> None:
    train(net(), daemon, run=run, topology="dp1 pp1")
    with pytest.raises(AttachRefused, match=r"'dp1 pp1'.*'dp1 pp2'.*ckptctl forget") as refusal:
        train(net(), daemon, run=run, topology="dp1 pp2")
    assert refusal.value.code == "topology"
    with pytest.raises(AttachRefused, match=r"world size 1.*world size 2") as refusal:
        train(net(), daemon, run=run, topology="dp1 pp1", rank=0, world_size=2)
    assert refusal.value.code == "topology"
    assert train(net(), daemon, 10, run=run, topology="dp1 pp1").resumed_from == 8


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (
            lambda: net(hidden="inner"),
            "parameter hidden.weight: float32[8, 8] in the snapshot, absent here",
        ),
        (
            lambda: net(12),
            "parameter hidden.weight: float32[8, 8] in the snapshot, float32[12, 12] here",
        ),
        (
            lambda: net(dtype=torch.bfloat16),
            "parameter hidden.weight: float32[8, 8] in the snapshot, bfloat16[8, 8] here",
        ),
    ],
    ids=["names", "shapes", "dtypes"],
)
def test_a_model_that_changed_is_refused_with_the_first_differences(
    daemon: DaemonProcess, run: str, changed: Callable[[], nn.Module], difference: str
) -> None:
    """And the snapshots of the model as it was stay as they are."""
    train(net(), daemon, run=run)
    with pytest.raises(AttachRefused) as refusal:
        train(changed(), daemon, run=run)
    assert refusal.value.code == "model_changed"
    assert difference in refusal.value.message
    assert "more" in refusal.value.message  # only the first few are listed
    assert f"ckptctl forget e2e {run}" in refusal.value.hint
    assert train(net(), daemon, 10, run=run).resumed_from == 8


class Holder:
    """Something of the user's with state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"sampler": Holder({"order": [1, {"next": object()}]})},
            r"state\['sampler'\]\['order'\]\[1\]\['next'\] is a builtins.object",
        ),
        ({"sampler": Holder({"draw": lambda: 4})}, r"state\['sampler'\]\['draw'\] is a builtins.function"),
        ({"sampler": object()}, r"state\['sampler'\] is a object without state_dict"),
        (
            {"sampler": Holder({"sparse": torch.eye(3).to_sparse()})},
            r"state\['sampler'\]\['sparse'\] is a torch.Tensor",
        ),
    ],
    ids=["object", "function", "stateless", "sparse"],
)
def test_state_that_cannot_be_stored_is_refused_by_its_path(
    daemon: DaemonProcess, run: str, state: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        train(net(), daemon, run=run, state=state)


def test_a_daemon_of_another_protocol_version_is_refused_by_name(tmp_path: Path, run: str) -> None:
    """It speaks version 99: the message says which side speaks what, and nothing hangs."""
    endpoint = f"ipc://{tmp_path}/s"
    stop = threading.Event()

    def speak() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(endpoint)
            while not stop.is_set():
                if router.poll(50):
                    identity, envelope, _ = router.recv_multipart()
                    told = msgspec.msgpack.decode(envelope)
                    answer = Refused("protocol", "this daemon speaks version 99")
                    router.send_multipart([identity, *encode(told["id"], answer, protocol=99)])

    fake = threading.Thread(target=speak)
    fake.start()
    model = net()
    try:
        with pytest.raises(DaemonUnavailable, match=r"protocol version 99.*version 3"):
            Checkpointer(
                model,
                torch.optim.AdamW(model.parameters()),
                run=RunOptions(job="e2e", name=run),
                daemon=DaemonOptions(
                    endpoint=endpoint, timeout_s=3600
                ),  # it is told at once: waiting would not make it another version
            )
    finally:
        stop.set()
        fake.join()


# -- damage --------------------------------------------------------------------------------------


def killed(jobs: Jobs, run: str, *options: str) -> None:
    """A run of ``plain`` that dies in step 11, with snapshots of window 4 behind it."""
    jobs.run("plain", "--total", TOTAL, "--run", run, "--kill-at", "11", *options, expect_killed=True)


def sealed(daemon: DaemonProcess, run: str) -> tuple[Segment, list[tuple[int, SlotHeader]]]:
    """The segment that a dead trainer left, and its sealed slots, newest first, once the daemon has
    settled them.
    """
    (path,) = daemon.segment_dir.glob(f"e2e~{run}~r0~g*.seg")
    segment = open_segment(path)

    def settled() -> bool:
        return not any(h.state in (SlotState.FILLING, SlotState.FILLED) for _, h in segment.headers())

    eventually(settled, "slots settled after the trainer's death")
    slots = [(i, h) for i, h in segment.headers() if h.state is SlotState.SEALED]
    return segment, sorted(slots, key=lambda slot: -slot[1].iteration)


def flip(segment: Segment, index: int, header: SlotHeader) -> str:
    """Flip one bit in the middle of a tensor of the image; returns the tensor's name."""
    image = segment.image(index, header)
    victim = max(ImageView(image), key=lambda entry: entry.nbytes)
    image[victim.offset + victim.nbytes // 2] ^= 1 << 4
    return victim.name


def resume(jobs: Jobs, run: str, *options: str) -> tuple[Path, int | None]:
    """The run's next life, to its end; and from where it resumed."""
    out = jobs.run("plain", "--total", TOTAL, "--run", run, *options)
    found: int | None = jobs.report(out)["resumed_from"]
    return out, found


def test_a_flipped_bit_is_named_and_the_next_older_suffix_is_used(
    hurt: tuple[Jobs, DaemonProcess], run: str
) -> None:
    """One bit of one tensor of the newest slot: quarantined, one more iteration to replay, and the exact end."""
    jobs, daemon = hurt
    killed(jobs, run)
    segment, slots = sealed(daemon, run)
    index, newest = slots[0]
    name = flip(segment, index, newest)
    out, resumed_from = resume(jobs, run, "--seed", "7")
    assert resumed_from == newest.iteration - 1
    (message,) = daemon.events("digest_mismatch", run)
    assert name in message
    assert f"iteration {newest.iteration}" in message
    assert "quarantined" in message
    assert differences(jobs.run("plain", "--total", TOTAL, daemon="none"), out) == []


def test_with_every_slot_flipped_the_run_starts_over_loudly(
    hurt: tuple[Jobs, DaemonProcess], run: str
) -> None:
    """Nothing can be believed: not one byte of it is trained on, and the operator is told."""
    jobs, daemon = hurt
    killed(jobs, run)
    segment, slots = sealed(daemon, run)
    for index, header in slots:
        flip(segment, index, header)
    out, resumed_from = resume(jobs, run)
    assert resumed_from is None
    assert daemon.events("digest_mismatch", run)
    (message,) = daemon.events("starting_over", run)
    assert "damaged" in message
    assert differences(jobs.run("plain", "--total", TOTAL, daemon="none"), out) == []


def test_a_damaged_slot_header_costs_its_slot_only(hurt: tuple[Jobs, DaemonProcess], run: str) -> None:
    jobs, daemon = hurt
    killed(jobs, run)
    segment, slots = sealed(daemon, run)
    index, newest = slots[0]
    segment.buffer[segment.geometry.header_offset(index) + 40] ^= 1
    out, resumed_from = resume(jobs, run, "--seed", "7")
    assert resumed_from == newest.iteration - 1
    assert differences(jobs.run("plain", "--total", TOTAL, daemon="none"), out) == []


def test_a_truncated_image_is_quarantined(hurt: tuple[Jobs, DaemonProcess], run: str) -> None:
    """The slot header is whole and says that the image ends in the middle of a tensor."""
    jobs, daemon = hurt
    killed(jobs, run)
    segment, slots = sealed(daemon, run)
    index, newest = slots[0]
    shorter = replace(newest, image_len=newest.image_len // 2)
    put_header(segment.buffer, segment.geometry, index, shorter)
    out, resumed_from = resume(jobs, run, "--seed", "7")
    assert resumed_from == newest.iteration - 1
    assert daemon.events("digest_mismatch", run)
    assert differences(jobs.run("plain", "--total", TOTAL, daemon="none"), out) == []


def test_a_truncated_segment_is_put_aside_and_the_run_starts_over(
    hurt: tuple[Jobs, DaemonProcess], run: str
) -> None:
    """Half of the file is gone when the daemon comes back: named, kept for a post mortem, and not served."""
    jobs, daemon = hurt
    killed(jobs, run)
    segment, _ = sealed(daemon, run)
    daemon.kill()
    segment.close()
    os.truncate(segment.path, segment.path.stat().st_size // 2)
    daemon.start()
    (message,) = daemon.events("bad_segment")
    assert segment.path.name in message
    assert segment.path.with_name(segment.path.name + ".bad").exists()
    out, resumed_from = resume(jobs, run)
    assert resumed_from is None
    assert differences(jobs.run("plain", "--total", TOTAL, daemon="none"), out) == []


def test_a_stale_segment_of_another_run_is_not_used(hurt: tuple[Jobs, DaemonProcess], run: str) -> None:
    """Neither under its own name, of which the operator is told, nor as a file renamed to ours,
    which is put aside.
    """
    jobs, daemon = hurt
    killed(jobs, run)
    reference = jobs.run("plain", "--total", TOTAL, daemon="none")
    out, resumed_from = resume(jobs, run + "-next")
    assert resumed_from is None
    (note,) = daemon.events("stale_run", run + "-next")
    assert repr(run) in note
    assert differences(reference, out) == []
    segment, _ = sealed(daemon, run)
    daemon.kill()
    shutil.copy(segment.path, segment.path.with_name(segment.path.name.replace(run, run + "-fake")))
    daemon.start()
    (message,) = daemon.events("bad_segment")
    assert run + "-fake" in message
    out, resumed_from = resume(jobs, run + "-fake")
    assert resumed_from is None
    assert differences(reference, out) == []


def test_garbage_on_the_socket_disturbs_nobody(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """Frames of every wrong kind, and bytes that are no ZeroMQ, while a trainer is attached."""
    process, out = jobs.start("plain", "--run", run, "--total", "200", "--step-ms", "5")
    rng = random.Random(5)

    def count() -> int:
        counters = daemon.ask(GetStatus(), Status).counters
        return sum(n for name, n in counters.items() if name.startswith("garbage."))

    before = count()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(daemon.endpoint)
        for _ in range(100):
            frames = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 5))]
            dealer.send_multipart(frames)
            dealer.send_multipart([msgspec.msgpack.encode({"protocol": 1, "id": 1}), frames[0]])
            dealer.send_multipart([msgspec.msgpack.encode({"protocol": 9, "id": 1}), b""])
        for _ in range(20):
            with contextlib.suppress(BrokenPipeError), socket.socket(socket.AF_UNIX) as raw:
                raw.connect(daemon.endpoint.removeprefix("ipc://"))
                raw.sendall(rng.randbytes(300))
        eventually(lambda: count() >= before + 300, "the garbage being counted")
    jobs.end(process, out)
    assert jobs.report(out)["daemon_outages"] == 0
    assert differences(jobs.run("plain", "--total", "200", daemon="none"), out) == []


# -- data ----------------------------------------------------------------------------------------


def test_nan_in_weights_is_data_and_is_counted(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """A run whose weights went NaN is snapshotted, killed and resumed like any other, to the same NaN bits."""
    options = ("--nan-at", "7", "--set", "nan_check_every=1")
    killed(jobs, run, *options)
    assert daemon.events("nan_in_weights", run)
    out, resumed_from = resume(jobs, run, "--seed", "7", *options)
    assert resumed_from is not None
    assert jobs.report(out)["nan_snapshots"] > 0
    reference = jobs.run("plain", "--total", TOTAL, "--nan-at", "7", daemon="none")
    assert differences(reference, out) == []
    final = torch.load(out, weights_only=False)
    assert any(v.isnan().any() for k, v in final.items() if k.startswith("param/"))
