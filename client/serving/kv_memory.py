"""The memory of a server's backup: a segment of the daemon's, of the kind ``kv``, shared by a node's devices.

Every device attaches to the daemon as a rank of the server's run, so the daemon keeps the run's memory while
any of them lives. One of them owns the segment. It stays where it is when its owner dies, when all do, and
when the daemon is restarted, which adopts it as it does a trainer's. It has one slot, which stays free for
the daemon: what is in it is the server's own affair (`ckptd.client.serving.kv_backup`).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

import ckptd
from ckptd.client.daemon_link.mapped_segment import MappedSegment, RankTaken, SlotFile
from ckptd.client.daemon_link.rank_memory import LAYOUT_VERSION
from ckptd.client.daemon_link.session import Session
from ckptd.client.identity import Identity
from ckptd.client.log_lines import get_logger
from ckptd.client.options import DaemonOptions
from ckptd.client.serving.device_group import DeviceGroup, gather_bytes
from ckptd.client.serving.kv_backup import backup_bytes, format_backup, geometry_of
from ckptd.core.serving.kv_backup_index import BackupGeometry
from ckptd.core.slots.segment_format import SegmentDescriptor, encode_descriptor
from ckptd.errors import AttachRefused, DaemonUnavailable, SegmentError
from ckptd.launch import ensure_daemon, unexpected
from ckptd.transport.messages import Attach, SegmentInfo
from ckptd.units import format_bytes
from ckptd.unpacking import unpack

logger = get_logger(__name__)

_NO_FILE = (-1, -1)
_TOPOLOGY = "server"
_MAKE_S = 600.0


class _Mapped(msgspec.Struct):
    """What a device has mapped; ``there``: its file is still where it was."""

    node: str
    path: str
    there: bool


_mapped = msgspec.msgpack.Decoder(_Mapped)


def _file_at(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:  # there is none yet, or it was removed with its daemon's folder
        return _NO_FILE
    return found.st_dev, found.st_ino


class KvMemory:
    """A device's session with the daemon, and the segment if it owns it.

    Args:
        identity: of the server's run, and this device's rank in it.
        geometry: of the backup that is wanted.
        owner: this device will make the memory, so that its bytes are promised to it.
    Raises:
        AttachRefused: the daemon refuses, such as for want of memory.
        DaemonUnavailable: no daemon answers.
    """

    def __init__(
        self, identity: Identity, daemon: DaemonOptions, geometry: BackupGeometry, *, owner: bool
    ) -> None:
        self._identity, self._geometry = identity, geometry
        self._own: MappedSegment | None = None
        self._path, self._file = "", _NO_FILE
        size = backup_bytes(geometry) if owner else 0
        attach = Attach(
            identity.job,
            identity.run,
            identity.rank,
            identity.world_size,
            _TOPOLOGY,
            LAYOUT_VERSION,
            size,
            f"a backup of KV with a quota of {format_bytes(geometry.quota_bytes)}" if owner else "",
        )
        auto = daemon.endpoint == "auto"
        self.session = Session(
            ensure_daemon if auto else lambda: str(daemon.endpoint),
            attach,
            self,
            version=ckptd.__version__,
            timeout_s=daemon.timeout_s,
            check=unexpected if auto else lambda _: "",
        )

    # -- the session's listener --------------------------------------------------------------------

    def held(self) -> tuple[int, ...]:
        """The generation whose owner lock this process holds."""
        return () if self._own is None else (self._own.generation,)

    def while_lost(self) -> None:
        """Nothing waits for the daemon: it neither seals nor reads this memory."""

    def asked_to_park(self, number: int) -> bool:
        """A server has nothing to park."""
        return False

    # -- memory ------------------------------------------------------------------------------------

    def open_own(self) -> Path:
        """Own a segment with an empty backup: that of an earlier server of this run, or a new one.

        Raises:
            ValueError: the run has a backup of another model.
            AttachRefused: there is no memory for it, or another process has it.
            DaemonUnavailable: the daemon is away, or the segment cannot be used.
        """
        for info in self.session.kv:
            self._reuse(info)
        if self._own is None:
            descriptor = SegmentDescriptor(
                job=self._identity.job,
                run=self._identity.run,
                rank=self._identity.rank,
                world_size=self._identity.world_size,
                topology=_TOPOLOGY,
                layout_version=LAYOUT_VERSION,
                generation=0,
                node_id="",
                created_at_ns=0,
                window=1,
                num_operators=1,
                kind="kv",
            )
            size = backup_bytes(self._geometry)
            info = self.session.reserve_auxiliary(size, 1, encode_descriptor(descriptor)).result(_MAKE_S)
            self._own = self._map(info)
        format_backup(self._own.slot(0), self._geometry)
        return Path(self._own.path)

    def _reuse(self, info: SegmentInfo) -> None:
        segment = self._map(info)
        try:
            found = geometry_of(segment.slot(0))
        except ValueError as error:  # its server died before it was formatted
            logger.warning("%s: %s", Path(info.path).name, error)
        else:
            if found.model != self._geometry.model:
                segment.close()
                raise ValueError(
                    f"run {self._identity.run!r} of job {self._identity.job!r} has a backup of the model "
                    f"{found.model!r}, and this server has {self._geometry.model!r}: name another run, or "
                    f"free it with `ckptctl forget {self._identity.job} {self._identity.run}`"
                )
            if found == self._geometry and self._own is None:
                self._own = segment
                return
        segment.close()
        self.session.drop(info.generation)

    def _map(self, info: SegmentInfo) -> MappedSegment:
        try:
            return MappedSegment(info.path, info.generation)
        except RankTaken as error:
            raise AttachRefused("rank_taken", f"{error}") from error
        except (OSError, SegmentError) as error:
            text = f"the memory of its backup cannot be used: {error}"
            raise DaemonUnavailable(text, operation="reserve") from error

    def share(self, group: DeviceGroup) -> memoryview | None:
        """Have all devices of a node map one memory: what any of them has already, else one of a new device.

        Returns:
            What to use from now on; None: what this device has.
        Raises:
            ValueError, AttachRefused, DaemonUnavailable: as `open_own`.
        """
        same = bool(self._path) and self._file == _file_at(self._path)
        own = _Mapped(self.session.node_id, self._path, there=same)
        rows = gather_bytes(group, msgspec.msgpack.encode(own))
        told = {device: unpack(_mapped, row) for device, row in zip(group.devices, rows, strict=True)}
        there = {each.node: each.path for each in reversed(told.values()) if each.there}
        if all(each.path and (each.there or each.node not in there) for each in told.values()):
            return None  # also if all of a node have lost its file: it is mapped, and the daemon may be away
        mates = {device: each for device, each in told.items() if each.node == own.node}
        new = [device for device, each in mates.items() if not each.path]
        path = there.get(own.node, "")
        if not path and self._identity.rank == next(iter(new), None):  # its daemon was there when it began
            path = str(self.open_own())
        paths = dict(zip(group.devices, gather_bytes(group, path.encode()), strict=True))
        path = next(filter(None, (paths[device].decode() for device in mates)), "")
        if not path or (own.there and path == self._path):
            return None
        found = self.shared(Path(path))
        self._path, self._file = path, _file_at(path)
        return found

    def shared(self, path: Path) -> memoryview:
        """The backup in a segment, whoever owns it.

        Raises:
            SegmentError: it is no segment of this kind.
            OSError: it cannot be opened.
        """
        file = SlotFile(path, "kv", shared=True)
        file.keep_from_children()
        return file.slot(0)

    def close(self) -> None:
        """Detach; the daemon keeps the memory for a while."""
        self.session.close()
        if self._own is not None:
            self._own.close()
