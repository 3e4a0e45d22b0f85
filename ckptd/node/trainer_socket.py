"""The socket on which trainers and `ckptctl` reach the daemon: framing, answers, and garbage."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import zmq

from ckptd.config.runtime_dir import UnusableFolder, give_to_group
from ckptd.node_context import NodeContext
from ckptd.transport.access.doorkeeper import LocalDoor, fd_of_frame, local_limits
from ckptd.transport.access.local_trust import OVERFLOW_UID, check_way, own_users, user_name
from ckptd.transport.access.refusals import RefusalLog
from ckptd.transport.messages import Message, RefusalCode, Refused, Reply
from ckptd.transport.verbs import FabricCounters
from ckptd.transport.wire import MAX_BODY_BYTES, WireError, decode, encode, peer_process, peer_user

logger = logging.getLogger(__name__)

_BATCH = 256  # messages served before looking at anything else
_QUEUE = 1024  # messages kept per client that does not read
_BACKLOG = 1024  # connections that wait to be accepted; further clients have to try again
_MAX_MEMBERS = 4096  # connections that are remembered as members'; the least recent one is forgotten first
_GARBAGE_LOG_S = 10.0
_OF_USERS = (RefusalCode.NOT_MEMBER, RefusalCode.FOREIGN)  # reported as events, at a bounded rate

_Serve = Callable[[bytes, Message, Callable[[Reply], None], int, int], None]


class TrainerSocket:
    """Listens at the configured endpoint; on the daemon's loop thread.

    Args:
        group: its members may connect besides this user; None: nobody else.
        serve: called with each message: sender, message, how to answer it, and the sender's process and user.
    """

    def __init__(self, node: NodeContext, group: int | None, serve: _Serve) -> None:
        self._node, self._group, self._serve = node, group, serve
        self._listen = node.config.listen
        self._path, self._inode = Path(self._listen.removeprefix("ipc://")), -1
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] | None = None
        self._door: LocalDoor | None = None
        self._refusals = RefusalLog(FabricCounters(), self._turned_away)
        self._of_users = RefusalLog(FabricCounters(), partial(node.events.add, "warning", "user_refused"))
        self._members: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # process and user, by identity
        self._garbage_logged_s = float("-inf")

    @property
    def refused(self) -> dict[str, int]:
        """Connections and messages that were refused, by reason."""
        return self._refusals.shown()

    def open(self) -> zmq.Socket[bytes]:
        """Listen.

        Raises:
            UnusableFolder: the endpoint cannot be bound, or other users can change the path to it.
        """
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, _QUEUE)
        socket.setsockopt(zmq.RCVHWM, _QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        limits = local_limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._door = LocalDoor(socket, limits, self._refusals, path=str(self._path))
        try:
            self._bind(socket)
            self._door.start(0)
        except (OSError, zmq.ZMQError) as error:
            self._door.stop()
            socket.close(linger=0)
            raise UnusableFolder(f"cannot listen on {self._listen}: {error}") from error
        self.socket = socket
        return socket

    def _bind(self, socket: zmq.Socket[bytes]) -> None:
        check_way(str(self._path.parent), own_users())
        before = os.umask(0o177)  # nobody else connects, not even before the mode is set
        try:
            socket.bind(self._listen)
        finally:
            os.umask(before)
        if self._group is not None:
            give_to_group(self._path, self._group, 0o660)
        self._inode = self._path.lstat().st_ino

    def in_place(self) -> bool:
        """Whether the socket's file is still ours; false if somebody removed or replaced it."""
        try:
            return self._path.lstat().st_ino == self._inode
        except (FileNotFoundError, NotADirectoryError):
            return False

    def listen_again(self) -> None:
        """Make the socket's file again: nobody can connect without it. Those who are connected stay.

        Raises:
            UnusableFolder: the endpoint cannot be bound.
        """
        assert self.socket is not None
        try:
            self._bind(self.socket)
        except (OSError, zmq.ZMQError) as error:
            raise UnusableFolder(f"cannot listen on {self._listen}: {error}") from error

    def close(self) -> None:
        """Stop listening; clients see it at once."""
        if self._door is not None:
            self._door.stop()
        if self.socket is not None:
            self.socket.close(linger=0)
            self.socket = None

    def end(self) -> None:
        """Release everything, after `close`."""
        self._context.term()
        path = self._listen.removeprefix("ipc://")
        if path.startswith("/"):
            Path(path).unlink(missing_ok=True)

    def _turned_away(self, text: str) -> None:
        """Report a refused local connection, from any thread."""
        self._node.post(lambda: self._node.events.add("warning", "turned_away", f"local: {text}"))

    def receive(self) -> None:
        """Serve the messages that have arrived, up to a batch."""
        assert self.socket is not None
        assert self._door is not None
        for _ in range(_BATCH):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            process, user = peer_process(frames[0]), peer_user(frames[0])
            identity, *message_frames = [frame.bytes for frame in frames]
            try:
                envelope, message = decode(message_frames)
            except WireError as error:
                self._garbage(identity, error)
                continue
            fd = fd_of_frame(frames[-1])
            if not self._may_speak(identity, fd, process, user):
                self._answer(identity, envelope.id, self._no_member(process, user))
                continue
            self._door.heard(fd, process)
            self._handle(identity, envelope.id, message, process, user)

    def _may_speak(self, identity: bytes, fd: int, process: int, user: int) -> bool:
        """Whether this user may be a trainer: as the kernel says for this connection."""
        if user in own_users() or (user < 0 and not self._node.config.isolate_users):
            return True
        if self._group is None or self._is_unmapped(user):
            return False
        # The kernel is asked once: a trainer's last messages may be read after its descriptor is closed.
        if self._members.get(identity) != (process, user):
            assert self._door is not None
            if self._group not in self._door.groups_of(fd, process, user):
                return False
            self._members[identity] = process, user
        self._members.move_to_end(identity)
        if len(self._members) > _MAX_MEMBERS:
            self._members.popitem(last=False)
        return True

    def _is_unmapped(self, user: int) -> bool:
        """Whether users are kept apart, but this one cannot be told from others: the kernel gives all users
        without a number in this user namespace the same one.
        """
        return user == OVERFLOW_UID and self._node.config.isolate_users

    def _no_member(self, process: int, user: int) -> Refused:
        if self._is_unmapped(user):
            return Refused(
                RefusalCode.NOT_MEMBER,
                f"the user of process {process} has no number of its own in the user namespace of this "
                f"daemon (the kernel says {user}, as for all such users), and isolate_users needs one",
                "run the process as a user that has a number there (/proc/<pid of the daemon>/uid_map)",
            )
        who = f"user {user_name(user)}" if user >= 0 else "an unknown user"
        group = f"group {self._group} (trainer_group)" if self._group is not None else "any trainer_group"
        text = f"process {process} of {who} is not in {group}"
        hint = (
            "make the user a member of the group that the daemon's setting trainer_group names, and log in "
            "anew: a process keeps the groups that it was started with"
        )
        return Refused(RefusalCode.NOT_MEMBER, text, hint)

    def _handle(self, identity: bytes, message_id: int, message: Message, process: int, user: int) -> None:
        answer = partial(self._answer, identity, message_id)
        try:
            self._serve(identity, message, answer, process, user)
        # The loop must survive a bug in one handler: snapshots of other ranks depend on it.
        except Exception as error:
            logger.exception("serving %s failed", type(message).__name__)
            self._node.events.add("error", "internal", f"{type(message).__name__}: {error!r}")
            answer(Refused(RefusalCode.INTERNAL, f"{error!r}", "see the daemon's log"))

    def _answer(self, identity: bytes, message_id: int, reply: Reply) -> None:
        if isinstance(reply, Refused):
            self._node.events.count(f"refused.{reply.code}")
            if reply.code in _OF_USERS:
                self._of_users.refused(reply.code, "", reply.message)
        if self.socket is None:
            return  # stopping: the client has seen the connection end
        try:
            frames = encode(message_id, reply)
        except WireError as error:
            hint = "ask for less, for example for one rank or without operator names"
            refused = Refused(RefusalCode.INTERNAL, f"the answer is too large: {error}", hint)
            frames = encode(message_id, refused)
        try:
            self.socket.send_multipart([identity, *frames], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            self._node.events.count("answers_dropped")
            logger.info("an answer could not be delivered: %s", error)

    def _garbage(self, identity: bytes, error: WireError) -> None:
        """Count it, log it now and then, and answer if it has an envelope."""
        self._node.events.count(f"garbage.{error.code}")
        now_s = time.monotonic()
        if now_s - self._garbage_logged_s > _GARBAGE_LOG_S:
            self._garbage_logged_s = now_s
            self._node.events.add("warning", "garbage", f"not a message of ours: {error}")
        if error.envelope is not None and -(1 << 63) <= error.envelope.id < 1 << 63:
            other_version = error.code == "protocol"
            code = RefusalCode.PROTOCOL if other_version else RefusalCode.BAD_MESSAGE
            hint = "run the same ckptd version on both sides" if other_version else ""
            self._answer(identity, error.envelope.id, Refused(code, str(error), hint))
