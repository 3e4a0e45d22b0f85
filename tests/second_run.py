"""``python -m tests.second_run ARGUMENTS OF PYTEST``: pytest, and what failed once more, alone, after all others.

Ten thousand tests with real processes, kills and sockets run side by side, on machines of any speed. One that fails among
them and passes alone says something of the test, of the machine, or of a race in the product: its report stays in the
output, and the last lines name it. More than `MOST` are no chance: then nothing is run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MOST = 2
_FAILED = 1  # what pytest returns if tests failed, and nothing else went wrong


def main(arguments: Sequence[str]) -> int:
    """Run pytest; the exit code is pytest's, or 0 if all that failed passed alone."""
    with tempfile.TemporaryDirectory(prefix="ckptd-pytest-") as cache:
        code = _pytest([*arguments, "-o", f"cache_dir={cache}"])
        found = Path(cache) / "v" / "cache" / "lastfailed"
        failed = sorted(json.loads(found.read_text(encoding="utf-8"))) if found.exists() else []
    if code != _FAILED or not 0 < len(failed) <= MOST:
        return code
    _say("Alone, after all others:", failed)
    os.environ.pop("CKPTD_CPU_SECONDS", None)  # that file is of all tests
    code = _pytest(["-p", "no:cacheprovider", *failed])
    if code == 0:
        _say("FAILED AMONG OTHERS, passed alone (reports above):", failed)
    return code


def _say(text: str, tests: Sequence[str]) -> None:
    sys.stdout.write("\n  ".join((f"\n{text}", *tests)) + "\n")
    sys.stdout.flush()


def _pytest(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
