"""What every rank has to say, told to every rank: bytes over the job's process group, after all have come.

First the ranks come together at the job's store, with a deadline: a rank that never comes is named, where a collective would hang until
the process group's own timeout and name nobody. Then the bytes travel as tensors of the group's own device, so that groups of NCCL
alone serve, too. They are not sent through the store: it would have to hand out *world size* squared payloads, from one machine.
Nothing is pickled.

Coming together takes one word per block of ranks, and one register that is written once: by the last to come (all are here), or
by whoever has waited too long. So either all ranks go on into the collective, or all that come fail alike.
"""

from __future__ import annotations

import datetime
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ckptd.client.identity import Identity
from ckptd.client.together import job_store
from ckptd.errors import DaemonUnavailable

__all__ = [
    "DEADLINE_S",
    "arrive",
    "device_of",
    "exchange",
    "gather_bytes",
    "meet_at",
    "own_connection",
]

# As long as torch waits in a collective by default: a rank may be bringing gigabytes from storage meanwhile.
DEADLINE_S = 1800.0
_BLOCK = 48
_NAMED = 8
_POLL_S, _POLL_MAX_S = 0.002, 0.25
# Ranks that look at the store, per second and all together; it answers some 20,000 small requests.
_LOOKS_PER_S = 8_000
_STORE_ANSWER_S = 60.0
# What is gathered at once, over all ranks.
_ROUND_BYTES = 64 << 20


@dataclass(slots=True)
class _Rounds:
    """How often this process has met the others in a process group: each meeting has keys of its own."""

    group: weakref.ref[Any] | None = None
    store: Any = None
    met: int = 0

    def next_of(self, group: Any) -> int:
        """The number of the next meeting; a new group begins anew, on all of its ranks."""
        if self.group is None or self.group() is not group:
            self.group, self.store, self.met = weakref.ref(group), own_connection(job_store()), 0
        self.met += 1
        return self.met


def own_connection(store: Any) -> Any:
    """A client of its own, that gives up sooner: another thread may be waiting on the shared one."""
    own = store.clone() if hasattr(store, "clone") else store
    if own is not store:
        own.set_timeout(datetime.timedelta(seconds=_STORE_ANSWER_S))
    return own


_rounds = _Rounds()


def exchange(identity: Identity, payload: bytes, *, deadline_s: float = DEADLINE_S) -> list[bytes]:
    """What every rank has to say, in the order of ranks; a collective call if there are several.

    Raises:
        ValueError: several ranks, and ``torch.distributed`` is not initialised with as many.
        DaemonUnavailable: not all ranks came within ``deadline_s``; those that are missing are named.
    """
    if identity.world_size == 1:
        return [payload]
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"world_size={identity.world_size}, but torch.distributed is not initialised: call init_process_group() before Checkpointer, "
            "or pass world_size=1 and a distinct rank= or job= for independent trainers"
        )
    if dist.get_world_size() != identity.world_size:
        raise ValueError(
            f"world_size={identity.world_size}, but the process group has {dist.get_world_size()} ranks"
        )
    number = _rounds.next_of(dist.distributed_c10d._get_default_group())
    meet_at(
        _rounds.store,
        f"ckptd/{identity.job}/{identity.run}/exchange",
        number,
        # Its place in the process group, whoever the user says this rank is.
        rank=dist.get_rank(),
        world_size=identity.world_size,
        deadline_s=deadline_s,
    )
    return gather_bytes(payload, identity.world_size)


# -- coming together -------------------------------------------------------------------------------


def meet_at(
    store: Any, prefix: str, number: int, *, rank: int, world_size: int, deadline_s: float
) -> None:
    """Come to meeting ``number``, and wait until all have come.

    Raises:
        DaemonUnavailable: they did not in time, here or elsewhere.
    """
    arrive(store, prefix, number, rank=rank, world_size=world_size)
    verdict = _verdict(store, f"{prefix}/{number}", world_size, deadline_s)
    if verdict != "all":
        raise DaemonUnavailable(
            verdict,
            operation="meet the other ranks",
            hint="their logs say why; start the job again when it is mended",
        )


def arrive(store: Any, prefix: str, number: int, *, rank: int, world_size: int) -> None:
    """Tell that this rank has come to meeting ``number``, once; the last one says that all have."""
    here = f"{prefix}/{number}"
    block, bit = divmod(rank, _BLOCK)
    # A sum of different powers of two: it tells who has come.
    if store.add(f"{here}/block/{block}", 1 << bit) == _full(block, world_size):
        blocks = -(-world_size // _BLOCK)
        if store.add(f"{here}/blocks", 1) == blocks:
            store.compare_set(f"{here}/verdict", "", "all")
            _forget(store, f"{prefix}/{number - 1}", blocks)


def _verdict(store: Any, here: str, world_size: int, deadline_s: float) -> str:
    deadline = time.monotonic() + deadline_s
    least_s = world_size / _LOOKS_PER_S
    wait_s = max(_POLL_S, least_s)
    while not store.check([f"{here}/verdict"]):
        if time.monotonic() > deadline:
            late = _late(store, here, world_size, deadline_s)
            return str(store.compare_set(f"{here}/verdict", "", late).decode())
        time.sleep(wait_s)
        wait_s = max(min(2 * wait_s, _POLL_MAX_S), least_s)
    return str(store.get(f"{here}/verdict").decode())


def _late(store: Any, here: str, world_size: int, deadline_s: float) -> str:
    """Who is missing, in words; the first few."""
    missing = [
        block * _BLOCK + bit
        for block in range(-(-world_size // _BLOCK))
        for bit in _bits(_full(block, world_size) - store.add(f"{here}/block/{block}", 0))
    ]
    names = ", ".join(map(str, missing[:_NAMED])) + (", …" if len(missing) > _NAMED else "")
    ranks = f"rank {names}" if len(missing) == 1 else f"ranks {names}"
    return f"{ranks} of {world_size} did not come within {deadline_s:.0f} s"


def _full(block: int, world_size: int) -> int:
    return (1 << min(_BLOCK, world_size - block * _BLOCK)) - 1


def _bits(word: int) -> list[int]:
    return [bit for bit in range(_BLOCK) if word >> bit & 1]


def _forget(store: Any, before: str, blocks: int) -> None:
    """All have come here, hence left the meeting before."""
    for block in range(blocks):
        store.delete_key(f"{before}/block/{block}")
    store.delete_key(f"{before}/blocks")
    store.delete_key(f"{before}/verdict")


# -- telling ---------------------------------------------------------------------------------------


def gather_bytes(payload: bytes, world_size: int, group: Any = None) -> list[bytes]:
    """The payloads of all ranks, in their order; a collective call of the process group (default: that of all)."""
    device = device_of(group)
    mine = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    sizes = [int(size) for size in _gathered(mine, world_size, group).flatten().tolist()]
    most = max(sizes)
    # In rounds, so that one long payload does not cost world size times its length of memory.
    width = max(1, min(most, _ROUND_BYTES // world_size))
    parts: list[list[bytes]] = [[] for _ in sizes]
    for start in range(0, most, width):
        length = min(width, most - start)
        piece = payload[start : start + length].ljust(length, b"\0")
        row = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(device)
        rows = _gathered(row, world_size, group).cpu().numpy()
        for rank, size in enumerate(sizes):
            if size > start:
                parts[rank].append(rows[rank, : size - start].tobytes())
    return [b"".join(found) for found in parts]


def _gathered(mine: Tensor, world_size: int, group: Any) -> Tensor:
    everything = torch.empty((world_size, mine.numel()), dtype=mine.dtype, device=mine.device)
    dist.all_gather(list(everything.unbind()), mine, group=group)
    return everything


def device_of(group: Any) -> torch.device:
    """A device whose tensors the process group can send."""
    backends = str(dist.get_backend_config(group))
    names = [pair.split(":")[0] for pair in backends.split(",")]
    if "cpu" in names:
        return torch.device("cpu")
    return torch.device(names[0], torch.accelerator.current_device_index())
