"""Parsers of settings: each function takes a text and returns its value, or raises ValueError."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

__all__ = [
    "absolute_path",
    "boolean_value",
    "choice_value",
    "endpoint_value",
    "host_value",
    "integer_value",
    "labels_value",
    "memory_value",
    "name_value",
    "names_value",
    "number_value",
    "object_value",
    "parse_bytes",
    "parse_labels",
    "parse_memory",
    "parse_peers",
    "peer_endpoint",
    "rate_value",
    "static_peers",
    "store_value",
]

IPC_PATH_LIMIT = 107  # sun_path of a unix socket, less the terminating zero
_UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


def parse_bytes(text: str) -> int:
    """Bytes of "1.5 GiB", "300MB", "4096"; K, M, G, T alone are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("a number with one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_memory(text: str) -> int | float:
    """Bytes as an int, or a share of memory (above 0, at most 1) as a float."""
    if text.strip().endswith("%"):
        share = float(text.strip()[:-1]) / 100
        if not 0 < share <= 1:
            raise ValueError("a share above 0% and at most 100%")
        return share
    return parse_bytes(text)


def memory_value(text: str) -> str:
    value = parse_memory(text)
    if isinstance(value, int) and value < 1 << 20:
        raise ValueError("at least 1 MiB")
    return text.strip()


def number_value(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return parse


def integer_value(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return parse


def choice_value(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError("not one of the words")
        return text.lower()

    return parse


def boolean_value(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("not a truth value")
    return text.lower() in _TRUE


def absolute_path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("not an absolute path")
    return os.path.normpath(text)


def endpoint_value(text: str) -> str:
    if text.startswith("tcp://"):
        raise ValueError("trainers connect over ipc; use peer_listen for peers")
    if not text.startswith("ipc://") or len(text) == len("ipc://"):
        raise ValueError("not an ipc endpoint")
    if not text.startswith("ipc:///"):
        raise ValueError(
            "not an absolute path: any process could create an abstract or relative socket first"
        )
    if len(os.fsencode(text.removeprefix("ipc://"))) > IPC_PATH_LIMIT:
        raise ValueError(f"a socket path has at most {IPC_PATH_LIMIT} bytes; shorten runtime_dir")
    return text


def peer_endpoint(text: str) -> str:
    if text and not re.fullmatch(r"tcp://(\[[0-9a-fA-F:.%]+\]|[^:/\s]+):[0-9]{1,5}", text):
        raise ValueError("not a tcp endpoint")
    return text


def host_value(text: str) -> str:
    if text and not re.fullmatch(r"\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+", text):
        raise ValueError("not an address or host name")
    return text


def parse_peers(text: str) -> dict[str, str]:
    """Endpoint by node id, of "a=tcp://10.0.0.1:7077,b=tcp://10.0.0.2:7077".

    Raises:
        ValueError: not such pairs.
    """
    peers: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, endpoint = part.partition("=")
        if not equals or name_value(name) in peers or not peer_endpoint(endpoint):
            raise ValueError(f"{part!r} is not a new name=tcp://address:port")
        peers[name] = endpoint
    return peers


def static_peers(text: str) -> str:
    parse_peers(text)
    return text


def rate_value(text: str) -> str:
    parse_bytes(text)
    return text.strip()


def labels_value(text: str) -> str:
    """Checked here, read by `parse_labels`; kept as text so that every setting is one line."""
    parse_labels(text)
    return text


def parse_labels(text: str) -> dict[str, str]:
    """The labels in "rack=A,zone=eu-1".

    Raises:
        ValueError: not pairs of names.
    """
    labels: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        names = re.fullmatch(r"[A-Za-z0-9._-]{1,64}", key) and re.fullmatch(r"[A-Za-z0-9._:/-]{1,128}", value)
        if not equals or not names or key in labels:
            raise ValueError(f"{part!r} is not a new key=value")
        labels[key] = value
    return labels


def names_value(text: str) -> str:
    if not all(re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) for name in text.split(",") if name):
        raise ValueError("not a list of names")
    return text


def name_value(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", text):
        raise ValueError("not a name, or one that begins with a dot, which ckptd reserves")
    return text


def store_value(text: str) -> str:
    """The URL of a store, or nothing."""
    if text and not re.fullmatch(r"[a-z][a-z0-9+.-]*://\S*", text):
        raise ValueError("not a URL")
    if text.startswith("file://") and not text.startswith("file:///"):
        raise ValueError("a file URL has an absolute path: file:///folder")
    return text.rstrip("/")


def object_value(text: str) -> str:
    """A JSON object, or nothing; kept as text so that every setting is one line."""
    if text and not isinstance(json.loads(text), dict):
        raise ValueError("not a JSON object")
    return text
