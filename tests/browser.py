"""A browser without a screen, which opens the page of `ckptctl dash`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["find_browser", "open_page", "why_no_browser"]

_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """The program of one that is installed; None: there is none."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def why_no_browser() -> str:
    """Why no page can be opened here; "" if one can."""
    return "" if find_browser() else f"none of {', '.join(_BROWSERS)} is installed"


def open_page(url: str, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Show a page for some seconds of its own time.

    Args:
        profile: a folder for the browser's own files.
        options: of Chromium, such as ``--dump-dom``.
    Raises:
        subprocess.SubprocessError: the browser fails, or takes too long.
    """
    browser = find_browser()
    assert browser is not None, why_no_browser()
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    shown = ["--virtual-time-budget=5000", "--window-size=1280,1600"]
    return subprocess.run(
        [*command, *shown, *options, url], capture_output=True, text=True, timeout=120, check=True
    )
