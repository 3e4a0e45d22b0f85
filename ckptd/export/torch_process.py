"""A child process with torch, which communicates over pipes and ends with the block.

Messages are lines of JSON; the bytes of tensors follow them, with a length that both sides know. The
child's stderr is shown only if it fails.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeVar, cast

import msgspec

from ckptd.core.export_plan import ExportError

__all__ = ["Child", "running"]

_T = TypeVar("_T")
_END_S = 30.0
_MAX_LINE = 1 << 30


class Child:
    """A running ``python -m <module>``."""

    def __init__(self, module: str, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._module, self._process, self._errors = module, process, errors
        self._input = process.stdin
        self._output = cast("io.BufferedReader", process.stdout)

    def say(self, message: Any) -> None:
        """One line."""
        self.send(memoryview(msgspec.json.encode(message) + b"\n"))

    def send(self, data: memoryview) -> None:
        """Send bytes that the child waits for."""
        try:
            while data:
                data = data[self._input.write(data) :]
            self._input.flush()
        except OSError as error:
            raise self._ended() from error

    def hear(self, kind: type[_T]) -> _T:
        """The next line.

        Raises:
            ExportError: the child has ended, or sent another message.
        """
        line = self._output.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            raise self._ended()
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            raise ExportError(f"{self._module} sent a malformed message ({error})") from error

    def receive(self, into: memoryview) -> None:
        """Fill the buffer with bytes that were requested from the child."""
        while into:
            done = self._output.readinto(into)
            if not done:
                raise self._ended()
            into = into[done:]

    def _ended(self) -> ExportError:
        """The error of a child that has ended, with the end of its stderr."""
        code = self._process.wait(_END_S)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        words = lines[-1] if lines else "it said nothing"  # of a traceback what was raised
        return ExportError(f"{self._module} ended with status {code}: {words}")


@contextmanager
def running(module: str) -> Iterator[Child]:
    """Run ``python -m <module>`` until the end of the block; waits for its normal end, and kills it
    after an error.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            # -P: do not import files of the current folder, such as a downloaded torch.py.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            yield Child(module, process, errors)
            assert process.stdin is not None
            process.stdin.close()
            if process.wait(_END_S):
                raise ExportError(f"{module} ended with status {process.returncode}")
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    # Data for a process that has ended are not needed any more.
                    with suppress(BrokenPipeError):
                        pipe.close()
