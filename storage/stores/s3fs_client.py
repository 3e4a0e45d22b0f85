"""The client that s3fs made: requests on fsspec's event loop, for callers in threads of their own."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from ckptd.storage.stores.objects import StoreError, StoreRefused, Unavailable
from ckptd.storage.stores.resilience import Backoff
from ckptd.storage.stores.s3_faults import s3_fault
from ckptd.storage.stores.store_options import StoreOptions

__all__ = ["PART_BACKOFF", "S3Client", "bounded"]

PART_BACKOFF = Backoff(base_s=0.2, cap_s=5.0, rng=random.Random())

_T = TypeVar("_T")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")


class S3Client:
    """Requests to one bucket, each in time and with the errors of the seam."""

    def __init__(self, bucket: str, options: StoreOptions) -> None:
        """Set up the session; the first request connects.

        Raises:
            ImportError: s3fs is not installed.
        """
        import s3fs

        self.bucket = bucket
        self._options = options
        self._fs = s3fs.S3FileSystem(**_arguments(options))

    def run(self, key: str, work: Coroutine[Any, Any, _T]) -> _T:
        """Do it on the event loop; nothing of it goes on when this ends, whatever ends it."""
        over = threading.Event()

        async def watched() -> _T:
            try:
                return await work
            finally:
                over.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._fs.loop)
        try:
            return future.result()
        except StoreError:
            raise
        except Exception as error:
            raise self._translated(key, error) from error
        finally:
            if future.cancel():  # this thread was interrupted
                over.wait()

    async def call(self, method: str, **arguments: Any) -> Any:
        """One request, with the client's own errors."""
        await self._fs.set_session()
        client = await self._fs.get_s3(self.bucket)
        return await getattr(client, method)(Bucket=self.bucket, **arguments)

    async def once(self, key: str, method: str, **arguments: Any) -> Any:
        """One request, in time, with the errors of the seam."""
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                return await self.call(method, **arguments)
        except Exception as error:
            raise self._translated(key, error) from error

    async def again(self, key: str, request: Callable[[], Awaitable[_T]]) -> _T:
        """One request that may be repeated: a part that fails is not yet an object that fails."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        attempt = 0
        while True:
            try:
                async with asyncio.timeout(self._options.request_timeout_s):
                    return await request()
            except Exception as error:  # noqa: BLE001 - each is one of the seam's now, and raised or tried again
                fault = self._fault(key, error)
            late = loop.time() - begun_s >= self._options.request_timeout_s
            if not fault.retriable or late or attempt + 1 >= self._options.attempts:
                raise fault
            await asyncio.sleep(PART_BACKOFF.delay_s(attempt))
            attempt += 1

    async def close(self) -> None:
        """Close the connections."""
        if self._fs._s3 is not None:
            await self._fs._s3.close()

    def _fault(self, key: str, error: Exception) -> StoreError:
        """What a client's error is in the words of the seam, with the error itself as its cause."""
        if isinstance(error, StoreError):
            return error
        fault = self._translated(key, error)
        fault.__cause__ = error
        return fault

    def _translated(self, key: str, error: Exception) -> StoreError:
        if isinstance(error, TimeoutError):
            return Unavailable(key, f"no answer within {self._options.request_timeout_s:g} s")
        detail = self._options.hide(f"{type(error).__name__}: {error}")
        if type(error).__name__ in _NO_CREDENTIALS:
            return StoreRefused(key, detail)
        answer = getattr(error, "response", None)
        if not isinstance(answer, Mapping):
            return Unavailable(key, detail)
        code = str(answer.get("Error", {}).get("Code", ""))
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return s3_fault(key, code, status, detail)


async def bounded(
    width: int, job: Callable[[_T], Coroutine[Any, Any, None]], items: Iterable[_T]
) -> None:
    """Do the job for each item, ``width`` at a time; the first that fails ends the others, and none
    outlives this.
    """
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await job(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(worker())
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__


def _arguments(options: StoreOptions) -> dict[str, Any]:
    """What s3fs is called with. Its own retries are off: ours know the deadline."""
    own = dict(options.fsspec)
    config = {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.request_timeout_s,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": 16 * options.concurrency,
        "s3": {"payload_signing_enabled": options.signs_payload},
        # Checksums that only some servers know, at the price of a CRC-32 in Python's zlib.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **own.pop("config_kwargs", {}),
    }
    client = dict(own.pop("client_kwargs", {}))
    if options.region:
        client.setdefault("region_name", options.region)
    return {
        "key": options.key,
        "secret": options.secret,
        "token": options.token,
        "endpoint_url": options.endpoint_url,
        "anon": options.anon,
        "client_kwargs": client,
        "config_kwargs": config,
        "use_listings_cache": False,
        "skip_instance_cache": True,
        **own,
    }
