"""Opening a store by its URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote, urlsplit

from ckptd.storage.stores.objects import NotInstalled, ObjectStore, StoreError, Unavailable
from ckptd.storage.stores.store_base import StoreOptions, public_url

__all__ = ["BACKENDS", "open_store"]

BACKENDS = ("auto", "fsspec", "obstore")

_S3_SCHEMES = ("s3", "s3a")
_OBSTORE_SCHEMES = (*_S3_SCHEMES, "gs", "az", "azure", "abfs", "abfss", "adl")


def open_store(url: str, options: Mapping[str, Any] | None = None, backend: str = "auto") -> ObjectStore:
    """The store at ``url``; nothing is asked of it yet.

    Args:
        url: ``file:///folder`` or a plain absolute path, ``s3://bucket/path``, ``memory://name``,
            or any other URL that obstore or fsspec knows.
        options: see `StoreOptions`.
        backend: ``auto`` takes obstore where it is installed and speaks the scheme, else fsspec.
            Folders are always read and written by `LocalStore`; ``memory://`` is fsspec's, which a
            whole process shares, unless obstore is asked for by name.
    Raises:
        ValueError: an option, a backend or a URL that there is not, in one line without what is secret.
        NotInstalled: the package that speaks the scheme is missing.
        StoreError: a folder that is not there and cannot be made, a server that does not answer.
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
        return _obstore(url, checked)
    return _s3fs(url, checked) if scheme in _S3_SCHEMES else _fsspec(url, checked)


def _local(url: str, options: StoreOptions) -> ObjectStore:
    from ckptd.storage.stores.local_store import LocalStore

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{url!r} names a host: write file:///folder, with three slashes")
    return LocalStore(unquote(parts.path) if parts.scheme else url, options)


def _obstore(url: str, options: StoreOptions) -> ObjectStore:
    def opened() -> ObjectStore:
        from ckptd.storage.stores.obstore_store import ObstoreStore

        s3 = urlsplit(url).scheme in _S3_SCHEMES and find_spec("s3fs") is not None
        return ObstoreStore(url, options, (lambda: _s3fs(url, options)) if s3 else None)

    return _made(url, options, "ckptd[s3]", opened)


def _s3fs(url: str, options: StoreOptions) -> ObjectStore:
    def opened() -> ObjectStore:
        from ckptd.storage.stores.fsspec_store import FsspecS3Store

        return FsspecS3Store(url, options)

    return _made(url, options, "ckptd[s3]", opened)


def _fsspec(url: str, options: StoreOptions) -> ObjectStore:
    def opened() -> ObjectStore:
        from ckptd.storage.stores.fsspec_store import FsspecStore

        return FsspecStore(url, options)

    return _made(url, options, "", opened)


def _made(url: str, options: StoreOptions, extra: str, opened: Callable[[], ObjectStore]) -> ObjectStore:
    """What ``opened`` makes; whatever a client raises of its own kinds comes out as one of the
    seam's, or as ValueError.
    """
    try:
        return opened()
    except StoreError:
        raise
    except ImportError as error:
        hint = f"pip install '{extra}'" if extra else "see its documentation"
        raise NotInstalled(public_url(url), f"{error} ({hint})") from error
    except OSError as error:  # a file system that connects at once
        raise Unavailable(public_url(url), _told(url, options, error)) from error
    # Clients of somebody else's are given a URL and options that users typed. What they make of
    # them is of any kind: obstore's exceptions derive from Exception alone, file systems of fsspec
    # raise what they like.
    except Exception as error:
        text = _told(url, options, error)
        kind = "an option has a value of another kind: " if isinstance(error, TypeError) else ""
        raise ValueError(f"{kind}{text}") from error


def _told(url: str, options: StoreOptions, error: Exception) -> str:
    """What is wrong, on one line, without a client's insides and without what is secret."""
    text = str(error).partition("\n\nDebug source:")[0].replace(url, public_url(url))
    return options.hide(" ".join(text.split()))
