"""What a store is opened with: one set of names for all backends, and each backend's own in a
nested mapping.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

__all__ = ["MIN_PART_BYTES", "StoreOptions", "secrets_in"]

MIN_PART_BYTES = 5 << 20  # S3 refuses smaller parts (but the last)
_MIB = 1 << 20
_SECRET_NAME = re.compile(r"key|secret|token|passw|credential|sas", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to reach a store and how to treat it. What is secret shows in no repr and no error text."""

    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    """Credentials; without them those of the environment (``AWS_…``) are used."""
    endpoint_url: str | None = None
    """Of an S3 server that is not Amazon's."""
    region: str | None = None
    anon: bool = False
    """Sign nothing: a public bucket."""
    sign_payload: bool | None = None
    """Whether S3 requests sign the bytes, too, so that the server refuses what was changed on the way.

    It costs a SHA-256 (about 0.7 CPU seconds per GiB, taken from training). TLS protects the bytes
    as well, and nothing happens to them on loopback, so None means: only over plain http to another
    host. Digests of our own are checked whenever something is read.
    """
    part_bytes: int = 16 * _MIB
    """Size of a part of a multipart upload, and of a request when reading."""
    threshold_bytes: int = 16 * _MIB
    """Larger objects are put in parts."""
    concurrency: int = 4
    """Requests in flight within one call. A call needs up to ``part_bytes * concurrency`` of memory."""
    attempts: int = 3
    """How often one part or one range is tried before the call fails."""
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 60.0
    """Bound of one request: a part, a range, a page of a listing. Nothing is retried within a call after so
    long, so a call to a server that stopped answering ends within about three times this."""
    fsspec: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further arguments of the fsspec file system."""
    obstore: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further configuration of the obstore store; within it, ``client_options`` are its HTTP client's, and
    ``credential_provider`` is called for credentials."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.part_bytes < MIN_PART_BYTES or self.threshold_bytes < 0:
            raise ValueError(f"part_bytes must be at least {MIN_PART_BYTES}, and no size negative")
        if self.concurrency < 1 or self.attempts < 1:
            raise ValueError("concurrency and attempts must be at least 1")
        if self.connect_timeout_s <= 0 or self.request_timeout_s <= 0:
            raise ValueError("timeouts must be more than 0 seconds")
        if (self.key is None) != (self.secret is None):
            raise ValueError("key and secret are given together or not at all")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> StoreOptions:
        """The options of a mapping.

        Raises:
            ValueError: a name that is not one of ours, or a value that cannot work.
        """
        unknown = options.keys() - {each.name for each in fields(cls)}
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ValueError(
                f"unknown storage options: {names} (a backend's own belong under 'fsspec' or 'obstore')"
            )
        try:
            return msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ValueError):  # of `__post_init__`
                raise error.__cause__ from None
            raise ValueError(f"an option has a value of another kind: {error}") from error

    def for_s3(self, environment: Mapping[str, str]) -> StoreOptions:
        """With what the environment says of the server: the clients read more of it, each its own part."""
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
        return replace(self, endpoint_url=self.endpoint_url or endpoint, region=self.region or region)

    @property
    def signs_payload(self) -> bool:
        """What ``sign_payload`` comes to for this endpoint."""
        if self.sign_payload is not None:
            return self.sign_payload
        url = urlsplit(self.endpoint_url or "https:")
        return url.scheme == "http" and not _is_loopback(url.hostname or "")

    def hide(self, text: str) -> str:
        """The text without what is secret."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        for secret in secrets_in(own):
            text = text.replace(secret, "***")
        return text


def secrets_in(options: Mapping[str, Any], secret: bool = False) -> Iterator[str]:
    """The values that no text may show, by the names of the options; ``secret``: all of them."""
    for name, value in options.items():
        named = secret or _SECRET_NAME.search(name) is not None
        if isinstance(value, Mapping):
            yield from secrets_in(value, named)
        elif isinstance(value, str) and value and named:
            yield value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
