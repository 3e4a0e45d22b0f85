"""Opening a store by its URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote, urlsplit

from ckptd.storage.stores.objects import NotInstalled, ObjectStore, StoreError, Unavailable
from ckptd.storage.stores.store_base import StoreOptions, public_url

BACKENDS = ("auto", "fsspec", "obstore")

_S3_SCHEMES = ("s3", "s3a")
_OBSTORE_SCHEMES = (*_S3_SCHEMES, "gs", "az", "azure", "abfs", "abfss", "adl")


def open_store(url: str, options: Mapping[str, Any] | None = None, backend: str = "auto") -> ObjectStore:
    """Open the store at ``url``; sends no request yet.

    Args:
        url: ``file:///folder`` or a plain absolute path, ``s3://bucket/path``, ``memory://name``,
            or any other URL that obstore or fsspec knows.
        options: see `StoreOptions`.
        backend: ``auto`` takes obstore if it is installed and supports the scheme, else fsspec. Folders
            always use `LocalStore`. ``memory://`` is that of fsspec, which a process shares, unless the
            backend is ``obstore``.
    Raises:
        ValueError: an unknown option or backend, or an invalid URL; one line without secrets.
        NotInstalled: the package for the scheme is missing.
        StoreError: the folder cannot be created, or the server does not answer.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    checked = StoreOptions.of(options or {})
    scheme = urlsplit(url).scheme
    if scheme in ("", "file", "local"):
        return _local(url, checked)
    if scheme in _OBSTORE_SCHEMES and not urlsplit(url).netloc:
        raise ValueError(f"the URL names no bucket or container: write {scheme}://name/path")
    if scheme in _S3_SCHEMES:
        checked = checked.for_s3(os.environ)
    spoken = scheme in _OBSTORE_SCHEMES or (scheme == "memory" and backend == "obstore")
    if backend == "obstore" and not spoken:
        raise ValueError(f"obstore does not speak {scheme}://")
    if backend == "obstore" or (backend == "auto" and spoken and find_spec("obstore")):
        return _created(url, checked, "ckptd[s3]", lambda: _obstore(url, checked))
    return _created(url, checked, "ckptd[s3]" if scheme in _S3_SCHEMES else "", lambda: _fsspec(url, checked))


def _local(url: str, options: StoreOptions) -> ObjectStore:
    from ckptd.storage.stores.local_store import LocalStore

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{url!r} names a host: write file:///folder, with three slashes")
    return LocalStore(unquote(parts.path) if parts.scheme else url, options)


def _obstore(url: str, options: StoreOptions) -> ObjectStore:
    from ckptd.storage.stores.obstore_store import ObstoreStore

    def housekeeper() -> ObjectStore:
        return _created(url, options, "ckptd[s3]", lambda: _fsspec(url, options))

    s3 = urlsplit(url).scheme in _S3_SCHEMES and find_spec("s3fs") is not None
    return ObstoreStore(url, options, housekeeper if s3 else None)


def _fsspec(url: str, options: StoreOptions) -> ObjectStore:
    from ckptd.storage.stores.fsspec_store import FsspecS3Store, FsspecStore

    s3 = urlsplit(url).scheme in _S3_SCHEMES
    return FsspecS3Store(url, options) if s3 else FsspecStore(url, options)


def _created(url: str, options: StoreOptions, extra: str, create: Callable[[], ObjectStore]) -> ObjectStore:
    """The result of ``create``; the errors of a client become a `StoreError` or a ValueError."""
    try:
        return create()
    except StoreError:
        raise
    except ImportError as error:
        hint = f"pip install '{extra}'" if extra else "see its documentation"
        raise NotInstalled(public_url(url), f"{error} ({hint})") from error
    except OSError as error:  # a file system that connects at once
        raise Unavailable(public_url(url), _one_line(url, options, error)) from error
    # Clients raise errors of any kind for URLs and options that users typed: the exceptions of obstore derive
    # from Exception alone, and the file systems of fsspec have no common base either.
    except Exception as error:
        text = _one_line(url, options, error)
        kind = "an option has a value of another kind: " if isinstance(error, TypeError) else ""
        raise ValueError(f"{kind}{text}") from error


def _one_line(url: str, options: StoreOptions, error: Exception) -> str:
    """The error's message on one line, without the internals of the client and without secrets."""
    text = str(error).partition("\n\nDebug source:")[0].replace(url, public_url(url))
    return options.hide(" ".join(text.split()))
