"""A real S3 server for tests: SeaweedFS' `weed mini`, on free loopback ports, in a folder of its own.

It rejects wrong secrets and honours preconditions on PUT and on completing a multipart upload. Where its
binary is not installed the tests that need it are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_ports

__all__ = ["ACCESS_KEY", "BUCKET", "SECRET", "S3Server", "weed"]

ACCESS_KEY = "tester"
SECRET = "wordle-of-the-tests-4711"
BUCKET = "ckpt"
START_S = 60.0
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "admin.port",
    "admin.port.grpc",
)


def weed() -> str | None:
    """The server's binary: beside this Python, or on the path."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@dataclass
class S3Server:
    """A running server; its folder is wiped when it stops."""

    endpoint: str
    port: int
    _process: subprocess.Popen[bytes]
    _folder: Path
    _ports: Mapping[str, int]

    @classmethod
    def start(cls) -> S3Server:
        """Start one, and wait until it answers."""
        try:
            return cls._start()
        except RuntimeError:  # somebody was quicker to take one of its ports
            return cls._start()

    @classmethod
    def _start(cls) -> S3Server:
        binary = weed()
        assert binary is not None
        folder = Path(tempfile.mkdtemp(prefix="ckptd-s3-"))
        ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        # A test run that is killed takes its server with it.
        bound = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        command = [
            *bound,
            binary,
            "mini",
            f"-dir={folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-bucket={BUCKET}",
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            "-master.telemetry=false",
            f"-filer.localSocket={folder / 'filer.sock'}",
            f"-s3.localSocket={folder / 's3.sock'}",
            *(f"-{name}={port}" for name, port in ports.items()),
        ]
        (folder / "data").mkdir()
        with ExitStack() as undo:
            undo.callback(_wipe, folder, ports)
            log = undo.enter_context((folder / "log").open("wb"))
            process = subprocess.Popen(
                command,
                env={"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            port = ports["s3.port"]
            server = cls(f"http://127.0.0.1:{port}", port, process, folder, ports)
            undo.callback(server._end)
            server._wait()
            undo.pop_all()
            log.close()
        return server

    @property
    def options(self) -> Mapping[str, object]:
        """What a store is opened with."""
        return {
            "key": ACCESS_KEY,
            "secret": SECRET,
            "endpoint_url": self.endpoint,
            "region": "us-east-1",
        }

    def stop(self) -> None:
        """End the process, and wipe what it kept."""
        self._end()
        _wipe(self._folder, self._ports)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def _wait(self) -> None:
        """Until S3 answers (with a refusal: the question is not signed) and the bucket is there."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            if "are running and ready" in self._log() and self._answers():
                return
            time.sleep(0.1)
        raise RuntimeError(f"the S3 server did not come up:\n{self._log()[-4000:]}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/{BUCKET}", timeout=2):
                return True
        except urllib.error.HTTPError as error:
            return error.code == 403
        except OSError:
            return False

    def _log(self) -> str:
        return (self._folder / "log").read_text("utf-8", "replace")


def _wipe(folder: Path, ports: Mapping[str, int]) -> None:
    """Remove the data, and the sockets that the server puts into a folder of its own choice and leaves there."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, port in ports.items():
        Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{port}.sock").unlink(missing_ok=True)
