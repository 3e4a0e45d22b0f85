"""What an S3 server's error codes mean in the words of the seam. Pure."""

from __future__ import annotations

from ckptd.storage.stores.objects import (
    ContainerMissing,
    Damaged,
    NoSpace,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreRefused,
    Throttled,
    Unavailable,
)

__all__ = ["UploadGone", "s3_fault"]


class UploadGone(Unavailable):
    """The multipart upload is not there: ended, aborted, or complete although nobody was told."""


_BY_CODE: dict[str, type[StoreError]] = {
    "NoSuchBucket": ContainerMissing,
    "NoSuchKey": ObjectMissing,
    "NoSuchUpload": UploadGone,
    "PreconditionFailed": ObjectExists,
    "InvalidRange": Damaged,
    "ConditionalRequestConflict": Unavailable,  # two creates at once: ask again
    "OperationAborted": Unavailable,
    "RequestTimeout": Unavailable,
    "BadDigest": Unavailable,  # changed on the way
    "XAmzContentSHA256Mismatch": Unavailable,
    "IncompleteBody": Unavailable,
    "InternalError": Unavailable,
    "SlowDown": Throttled,
    "ServiceUnavailable": Throttled,
    "Throttling": Throttled,
    "ThrottlingException": Throttled,
    "RequestLimitExceeded": Throttled,
    "TooManyRequests": Throttled,
    "QuotaExceeded": NoSpace,
    "InsufficientStorage": NoSpace,
    "XMinioStorageFull": NoSpace,
    "ExpiredToken": StoreRefused,
    "InvalidToken": StoreRefused,
    "TokenRefreshRequired": StoreRefused,
    "InvalidAccessKeyId": StoreRefused,
    "SignatureDoesNotMatch": StoreRefused,
    "AccessDenied": StoreRefused,
}

_BY_STATUS: dict[int, type[StoreError]] = {
    401: StoreRefused,
    403: StoreRefused,
    404: ObjectMissing,
    412: ObjectExists,
    416: Damaged,
    429: Throttled,
    503: Throttled,
    507: NoSpace,
}


def s3_fault(key: str, code: str, status: int, detail: str) -> StoreError:
    """The error for an answer; ``code`` decides where it is known, the HTTP status elsewhere."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, Unavailable)
    return kind(key, detail)
