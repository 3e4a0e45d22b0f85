"""S3, Google and Azure through obstore (Rust), which needs a fifth of the CPU of s3fs for the same upload.

No buffer is copied. obstore cuts an object into parts, repeats a part that failed, and aborts an upload
that failed. It offers no condition on the completion of a multipart upload, so for large objects
``if_absent`` checks once more just before the completion. It cannot list unfinished uploads: if s3fs is
installed, a store of that kind aborts them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions
from obstore.store import MemoryStore, from_url

from ckptd.storage.stores.objects import (
    Damaged,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    StoreError,
    StoreRefused,
    Unavailable,
)
from ckptd.storage.stores.store_base import (
    Filler,
    RangeRequest,
    StoreBase,
    StoreOptions,
    check_limit,
    cut,
    part_size,
    run_all,
    s3_fault,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as RustStore
    from obstore.store import S3Credential

_PAGE = 1000
_CHUNK_BYTES = 1 << 20
_VALID = timedelta(minutes=5)  # obstore then asks botocore again, which refreshes expiring credentials
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_BEYOND = re.compile(r"Invalid range|Range Not Satisfiable")
_NO_CREDENTIALS = re.compile(r"credential|169\.254\.169\.254|metadata endpoint", re.IGNORECASE)


class ObstoreStore(StoreBase):
    """Objects below the path of a URL that obstore supports; the first call connects.

    Args:
        housekeeper: opens a store of the same objects that can list unfinished uploads.
    Raises:
        ValueError: obstore does not accept an option.
    """

    def __init__(
        self,
        url: str,
        options: StoreOptions,
        housekeeper: Callable[[], ObjectStore] | None = None,
    ) -> None:
        self._memory = url.startswith("memory:")
        super().__init__(
            "obstore",
            url,
            piece_bytes=options.part_bytes,
            multipart=not self._memory,
            conditional=None,
        )
        self._options = options
        self._housekeeper = housekeeper
        self._housekeeping = threading.Lock()
        self._opened: ObjectStore | None = None
        # obstore may repeat a part or a range, but not a whole put: a repeated create would be refused if
        # the first attempt succeeded and its answer got lost.
        self._store = _open(url, options, retries=options.attempts - 1)
        self._single = self._store if self._memory else _open(url, options, retries=0)
        self._pool = ThreadPoolExecutor(options.concurrency, thread_name_prefix="ckptd-obstore")

    def close(self) -> None:
        self._pool.shutdown()
        with self._housekeeping:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def _put(self, key: str, views: Sequence[memoryview], size: int, *, if_absent: bool) -> None:
        with self._mapped(key):
            if size <= self._options.threshold_bytes or self._memory:
                obstore.put(
                    self._single,
                    key,
                    iter(views) if views else b"",
                    mode="create" if if_absent else "overwrite",
                    use_multipart=False,
                )
                return
            part_bytes = part_size(size, self._options.part_bytes)
            obstore.put(
                self._store,
                key,
                self._parts(key, views, part_bytes, if_absent=if_absent),
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=self._options.concurrency,
            )

    def _parts(
        self, key: str, views: Sequence[memoryview], part_bytes: int, *, if_absent: bool
    ) -> Iterator[memoryview]:
        for group in cut(views, part_bytes):
            yield from group
        # On another thread, because this one is running obstore's event loop.
        if if_absent and self._pool.submit(self._info, key).result() is not None:
            raise ObjectExists(key, "exists already")

    def _read(self, key: str, limit: int) -> bytes:
        with self._mapped(key):
            answer = obstore.get(self._store, key)
            check_limit(key, answer.meta["size"], limit)
            return answer.bytes().to_bytes()

    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        run_all(self._pool, [partial(self._fetch, key, piece) for piece in pieces])

    def _fetch(self, key: str, piece: RangeRequest) -> None:
        end = piece.offset + piece.size
        with self._mapped(key):
            answer = obstore.get(self._store, key, options={"range": (piece.offset, end)})
            begin, stop = answer.range
            if (begin, stop) != (piece.offset, end):
                raise Damaged(key, f"{stop - begin} bytes of {piece.size} at {piece.offset}")
            filler = Filler(piece)
            for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
                filler.take(memoryview(chunk))
        if filler.left:
            raise Unavailable(key, f"the answer ended {filler.left} bytes too early")

    def _info(self, key: str) -> ObjectInfo | None:
        try:
            with self._mapped(key):
                return _object(obstore.head(self._store, key))
        except ObjectMissing:
            self._check_bucket(key)
            return None

    def _check_bucket(self, key: str) -> None:
        """An answer to HEAD does not say whether the object or the bucket is missing; a listing does."""
        with self._mapped(key):
            next(iter(obstore.list(self._store, prefix=key, chunk_size=1)), None)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._mapped(prefix):
            for page in obstore.list(self._store, prefix=prefix or None, chunk_size=_PAGE):
                for each in page:
                    yield _object(each)

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            with self._mapped(keys[0]):
                obstore.delete(self._store, list(keys))
        except ObjectMissing:
            # Stores without batched deletes stop at the first missing object.
            if len(keys) > 1:
                for key in keys:
                    self._delete([key])

    def _abort_uploads(self, prefix: str, older_than_s: float) -> int:
        if self._housekeeper is None:
            return -1
        with self._housekeeping:
            if self._opened is None:  # kept, because opening one takes most of a CPU second
                self._opened = self._housekeeper()
            return self._opened.abort_uploads(prefix, older_than_s)

    @contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except exceptions.AlreadyExistsError as error:
            raise ObjectExists(key, "exists already") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise StoreRefused(key, self._text(error)) from error
        except (exceptions.BaseError, OSError) as error:
            raise self._fault(key, error) from error

    def _fault(self, key: str, error: Exception) -> StoreError:
        """The error for the server's answer, which obstore quotes in its message."""
        detail = self._text(error)
        code, status = _CODE.search(str(error)), _STATUS.search(str(error))
        if code or status:
            return s3_fault(key, code[1] if code else "", int(status[1]) if status else 0, detail)
        if isinstance(error, FileNotFoundError):
            return ObjectMissing(key, "is not there")
        if _BEYOND.search(detail):
            return Damaged(key, detail)
        if _NO_CREDENTIALS.search(detail):
            return StoreRefused(key, detail)
        return Unavailable(key, detail)

    def _text(self, error: Exception) -> str:
        """The first part of the message, without the internals of the client."""
        text = str(error).partition("\n\nDebug source:")[0]
        return self._options.hide(" ".join(text.split()))


def _open(url: str, options: StoreOptions, *, retries: int) -> RustStore:
    if url.startswith("memory:"):
        return MemoryStore()
    own = dict(options.obstore)
    client = {
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "timeout": timedelta(seconds=options.request_timeout_s),
        "allow_http": (options.endpoint_url or "").startswith("http:"),
        **own.pop("client_options", {}),
    }
    s3 = url.startswith(("s3:", "s3a:"))
    if s3 and options.key is None and not options.anon and "credential_provider" not in own:
        own["credential_provider"] = _aws_credentials()
    provider = own.pop("credential_provider", None)
    arguments: dict[str, Any] = {
        "config": {**(_s3_config(options) if s3 else {}), **own},
        "client_options": client,
        "retry_config": {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=options.request_timeout_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=200),
                "max_backoff": timedelta(seconds=5),
            },
        },
    }
    if provider is not None:
        arguments["credential_provider"] = provider
    return from_url(url, **arguments)


def _aws_credentials() -> Callable[[], S3Credential] | None:
    """botocore's chain, since obstore reads neither profiles nor SSO; None without botocore."""
    if find_spec("botocore") is None:
        return None
    import botocore.session

    session = botocore.session.get_session()

    def current() -> S3Credential:
        found = session.get_credentials()
        if found is None:
            raise PermissionError("no AWS credentials: neither options, environment nor profile")
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _VALID,
        }

    return current


def _s3_config(options: StoreOptions) -> dict[str, Any]:
    given = {
        "access_key_id": options.key,
        "secret_access_key": options.secret,
        "session_token": options.token,
        "endpoint": options.endpoint_url,
        "region": options.region,
        "skip_signature": options.anon or None,
        "unsigned_payload": not options.signs_payload,
    }
    return {name: value for name, value in given.items() if value is not None}


def _object(meta: ObjectMeta) -> ObjectInfo:
    modified_ns = int(meta["last_modified"].timestamp() * 1e9)
    return ObjectInfo(meta["path"], meta["size"], modified_ns, (meta["e_tag"] or "").strip('"'))
