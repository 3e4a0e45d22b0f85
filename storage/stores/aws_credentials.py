"""Credentials for obstore from where AWS' own tools look for them: obstore reads neither profiles nor SSO."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TypedDict

__all__ = ["AwsCredentials", "aws_credentials"]

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
