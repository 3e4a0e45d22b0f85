"""Opening a store for `ckptctl`: which store, with short timeouts, and its errors with advice.

No text from this module contains a secret of a URL or of options.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ckptd.config.daemon_config import ConfigError, load_config
from ckptd.config.settings import DaemonConfig
from ckptd.ctl.command import CommandError, ask
from ckptd.errors import DaemonUnavailable
from ckptd.storage.checkpoints.names import run_prefix
from ckptd.storage.checkpoints.reader import MapFunction, SignedStore
from ckptd.storage.checkpoints.signing import Signers, SigningError
from ckptd.storage.stores.objects import ContainerMissing, NoSpace, ObjectStore, StoreError, StoreRefused
from ckptd.storage.stores.open_store import open_store
from ckptd.storage.stores.resilience import Circuit, Resilient, RetryPolicy
from ckptd.storage.stores.store_base import public_url, secrets_in
from ckptd.transport import messages as m
from ckptd.transport.wire import RequestTimeout

STORE_TIMEOUT_S = 600.0
"""Default of ``--timeout`` of commands that use a store.

One request of a large object may take a minute, and no attempt begins after the timeout.
"""
_THREADS = 8
_ATTEMPTS = 4
# A person at a terminal needs the cause of the failure, not the message that retries have ended.
_NEVER_OPENS = 1 << 30
_MAX_TEXT = 600
_UNUSABLE_STORE = re.compile(r"(store|store_options) = .*\(from ([^()]*)\) cannot be used: ", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A store that the arguments or the configuration name."""

    url: str = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    backend: str
    keys_dir: str = ""  # folder with the keys of the trusted signers
    signed_only: bool = False  # accept no other manifests

    @property
    def shown(self) -> str:
        """The URL without secrets."""
        return public_url(self.url)

    def hide(self, text: str) -> str:
        """The text on one line, without secrets."""
        text = text.replace(self.url, self.shown)
        for secret in secrets_in(self.options):
            text = text.replace(secret, "***")
        text = " ".join(text.split())
        return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store with the timeouts of a command; ``map`` runs several requests at a time."""

    place: StorePlace
    store: ObjectStore
    map: MapFunction


def configured_place(args: argparse.Namespace, *, changes: bool) -> tuple[StorePlace, DaemonConfig]:
    """The configured store; `--store`, `--store-options` and `--store-backend` take precedence, each
    over its setting. If there is none: that of the running daemon, but only to read.

    Args:
        changes: the command changes the store. What it may delete depends on settings that a daemon's
            answer does not contain, such as the retention.
    Raises:
        CommandError: there is none.
        ConfigError: a setting cannot be used.
    """
    given = {
        "store": args.store and _url_of(args.store),
        "store_options": args.store_options,
        "store_backend": args.store_backend,
    }
    try:
        config = load_config({key: text for key, text in given.items() if text}).config
    except ConfigError as error:
        raise ConfigError(_without_value(str(error))) from error
    if not config.store:
        if changes:
            raise CommandError(
                "no store is configured here, and this command changes a store: pass --store URL, or set "
                "CKPTD_STORE, besides the daemon's other settings (its CKPTD_CONFIG or CKPTD_PERSIST_KEEP_…)"
            )
        config = replace(config, store=_store_of_daemon(args))
    options = json.loads(config.store_options or "{}")
    place = StorePlace(config.store, options, config.store_backend, config.keys_dir, config.store_signed_only)
    return place, config


def _store_of_daemon(args: argparse.Namespace) -> str:
    """The URL of its store, which has no credentials; those are the configured ones, or the environment's."""
    try:
        durable = ask(args, m.GetStatus(), m.Status).durable
    except (DaemonUnavailable, RequestTimeout):
        durable = None
    if durable is None:
        raise CommandError(
            "no store is configured here, and no daemon with a store answers: pass --store URL, or set "
            "CKPTD_STORE"
        )
    return durable.url


def named_place(args: argparse.Namespace) -> StorePlace:
    """The store at URL (or a folder), independent of the configured store. The trusted signers are
    the configured ones; if the configuration cannot be used, a line on stderr says that signatures
    are not checked.

    Raises:
        CommandError: the options are not a JSON object.
    """
    try:
        options = json.loads(args.store_options or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise CommandError('--store-options is not a JSON object, such as \'{"region": "eu-1"}\'')
    url, backend = _url_of(args.url), args.store_backend or "auto"
    try:
        config = load_config({}).config
    except ConfigError as error:
        text = _without_value(str(error))
        print(f"ckptctl: signatures are not checked: {text}", file=sys.stderr)
        return StorePlace(url, options, backend)
    return StorePlace(url, options, backend, config.keys_dir, config.store_signed_only)


@contextmanager
def opened(place: StorePlace, timeout_s: float) -> Iterator[OpenedStore]:
    """Open the store until the end of the block; its errors leave the block as `CommandError`.

    Args:
        timeout_s: how long one request is retried.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="store") as pool:
        try:
            store = _open(place)
            try:
                policy = RetryPolicy(_ATTEMPTS, max(timeout_s, 0.1))
                circuit = Circuit(threshold=_NEVER_OPENS)
                patient = Resilient(store, policy, circuit, url=place.shown, cancelled=stop.is_set)
                yield OpenedStore(place, patient, pool.map)
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
                store.close()
        except StoreError as error:
            what = error.detail if error.key == place.shown else str(error)
            raise CommandError(f"{place.shown}: {place.hide(what)}{_hint(error)}") from error


def store_clock_ns(store: ObjectStore, job: str, run: str) -> int:
    """The time of the store's clock. Only a newly written object shows it."""
    key = f"{run_prefix(job, run)}ckptctl-clock-{secrets.token_hex(8)}"
    written = store.put(key, [memoryview(b"now")])
    store.delete([key])
    return written.modified_ns


def _open(place: StorePlace) -> ObjectStore:
    try:
        parts = urlsplit(place.url)
        if parts.scheme in ("file", "local") and not Path(unquote(parts.path)).is_dir():
            # Opening a store creates its folder. For a reader, a missing folder is a mistyped one.
            raise CommandError(f"the folder {unquote(parts.path)} does not exist: check the URL")
        store = open_store(place.url, place.options, place.backend)
    except ValueError as error:
        text = place.hide(str(error))
        raise CommandError(f"the store {place.shown} cannot be opened: {text}") from error
    try:
        return _with_signatures_checked(place, store)
    except SigningError as error:
        store.close()
        raise CommandError(f"the keys of the trusted signers cannot be read: {error}") from error


def _with_signatures_checked(place: StorePlace, store: ObjectStore) -> ObjectStore:
    """With ``store_signed_only`` only trusted signers' manifests count; else known signatures are checked."""
    folder = Path(place.keys_dir)
    if place.signed_only:
        return SignedStore(store, Signers.load(folder))
    signers = Signers.found(folder) if place.keys_dir else None
    return store if signers is None else SignedStore(store, signers, required=False)


def _hint(error: StoreError) -> str:
    """The advice for an error of a store."""
    if isinstance(error, StoreRefused):
        return (
            " -> check the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or key and "
            "secret in the store options) and what they allow"
        )
    if isinstance(error, ContainerMissing):
        return " -> check the bucket or folder in the URL: reading does not create it"
    if isinstance(error, NoSpace):
        return " -> free space in the store, or raise its quota"
    if error.retriable:
        return (
            " -> check that the store runs and can be reached from here, and endpoint_url and "
            "region in the store options; --timeout waits longer"
        )
    return ""


def _url_of(text: str) -> str:
    """The URL of a store that may be given as the path of a folder."""
    return text if "://" in text else "file://" + quote(str(Path(text).absolute()))


def _without_value(text: str) -> str:
    """The error of a setting, without its value if that may contain a secret."""
    found = _UNUSABLE_STORE.match(text)
    if found is None:
        return text
    return f"{found[1]} (from {found[2]}) cannot be used: {text[found.end() :]}"
