"""S3, Google and Azure by way of obstore (Rust): a fifth of the CPU of s3fs for the same upload.

Buffers are handed over without a copy. obstore cuts an object into parts, repeats a part that
failed and aborts an upload that failed; it offers no condition on completing a multipart upload, so
for large objects ``if_absent`` looks again just before the end. Nor can it list half-finished
uploads: where s3fs is installed, that is asked for cleaning up.
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
from typing import TYPE_CHECKING, Any, TypedDict

from ckptd.storage.stores.objects import (
    Damaged,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    StoreError,
    StoreRefused,
    TooLarge,
    Unavailable,
)
from ckptd.storage.stores.store_base import (
    Filler,
    RangeRequest,
    StoreBase,
    StoreOptions,
    cut,
    part_size,
    run_all,
    s3_fault,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as RustStore

__all__ = ["AwsCredentials", "ObstoreStore", "aws_credentials"]


_VALID = timedelta(minutes=5)  # then they are asked for again; botocore refreshes those that end


class AwsCredentials(TypedDict):
    """What obstore's credential provider returns."""

    access_key_id: str
    secret_access_key: str
    token: str | None
    expires_at: datetime | None


def aws_credentials() -> Callable[[], AwsCredentials] | None:
    """botocore's chain (environment, profiles, SSO, containers, instances); None without botocore."""
    if find_spec("botocore") is None:
        return None
    import botocore.session

    session = botocore.session.get_session()

    def current() -> AwsCredentials:
        found = session.get_credentials()
        if found is None:
            raise PermissionError("no AWS credentials: neither options, environment nor profile")
        frozen = found.get_frozen_credentials()
        return AwsCredentials(
            access_key_id=frozen.access_key,
            secret_access_key=frozen.secret_key,
            token=frozen.token,
            expires_at=datetime.now(UTC) + _VALID,
        )

    return current


_PAGE = 1000
_CHUNK_BYTES = 1 << 20
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_BEYOND = re.compile(r"Invalid range|Range Not Satisfiable")
_NO_CREDENTIALS = re.compile(r"credential|169\.254\.169\.254|metadata endpoint", re.IGNORECASE)


class ObstoreStore(StoreBase):
    """Objects below the path of a URL that obstore speaks."""

    def __init__(
        self,
        url: str,
        options: StoreOptions,
        housekeeper: Callable[[], ObjectStore] | None = None,
    ) -> None:
        """Set up the client; the first call connects.

        Args:
            housekeeper: opens a store of the same objects that can list half-finished uploads.
        Raises:
            ImportError: obstore is not installed.
            ValueError: an option that obstore does not take.
        """
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
        # What may be repeated within a call (a part, a range), and what may not (a create that was
        # refused because its first attempt, whose answer got lost, had succeeded).
        self._store = _open(url, options, retries=options.attempts - 1)
        self._single = self._store if self._memory else _open(url, options, retries=0)
        self._pool = ThreadPoolExecutor(options.concurrency, thread_name_prefix="ckptd-obstore")

    def close(self) -> None:
        """End the threads; connections end with the client."""
        self._pool.shutdown()
        with self._housekeeping:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    # --- the seam ---

    def _put(self, key: str, views: Sequence[memoryview], size: int, *, if_absent: bool) -> None:
        import obstore

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
        # In another thread: this one runs obstore's event loop just now.
        if if_absent and self._pool.submit(self._info, key).result() is not None:
            raise ObjectExists(key, "exists already")

    def _read(self, key: str, limit: int) -> bytes:
        import obstore

        with self._mapped(key):
            answer = obstore.get(self._store, key)
            size = answer.meta["size"]
            if size > limit:
                raise TooLarge(key, f"has {size} bytes, of which {limit} are allowed")
            return answer.bytes().to_bytes()

    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        run_all(self._pool, [partial(self._fetch, key, piece) for piece in pieces])

    def _fetch(self, key: str, piece: RangeRequest) -> None:
        import obstore

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
        import obstore

        try:
            with self._mapped(key):
                return _object(obstore.head(self._store, key))
        except ObjectMissing:
            self._check_bucket(key)
            return None

    def _check_bucket(self, key: str) -> None:
        """An answer to HEAD has no room to say what is missing: the object or the bucket."""
        import obstore

        with self._mapped(key):
            next(iter(obstore.list(self._store, prefix=key, chunk_size=1)), None)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        import obstore

        with self._mapped(prefix):
            for page in obstore.list(self._store, prefix=prefix or None, chunk_size=_PAGE):
                for each in page:
                    yield _object(each)

    def _delete(self, keys: Sequence[str]) -> None:
        import obstore

        try:
            with self._mapped(keys[0]):
                obstore.delete(self._store, list(keys))
        except ObjectMissing:
            # Stores without deletes in batches stop at the first that is not there.
            if len(keys) > 1:
                for key in keys:
                    self._delete([key])

    def _abort_uploads(self, prefix: str, older_than_s: float) -> int:
        if self._housekeeper is None:
            return -1
        with self._housekeeping:
            if self._opened is None:  # kept: opening one takes most of a CPU second
                self._opened = self._housekeeper()
            return self._opened.abort_uploads(prefix, older_than_s)

    # --- errors ---

    @contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        from obstore import exceptions

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
        """By the server's answer, which obstore quotes in its text."""
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
        """What is for people: the first part, without the client's insides."""
        text = str(error).partition("\n\nDebug source:")[0]
        return self._options.hide(" ".join(text.split()))


def _open(url: str, options: StoreOptions, *, retries: int) -> RustStore:
    from obstore.store import MemoryStore, from_url

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
        own["credential_provider"] = aws_credentials()
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
