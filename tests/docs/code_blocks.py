"""The code blocks of the documentation, and the pages that have them.

A new block needs nothing if it is a command of ckptd, settings, or Python on the names of `tests.docs.training`. Python
that needs more gets it from `tests.docs.preparations`; a program that no test may start is listed with the reason in
`tests.docs.test_console_blocks`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LANGUAGES", "ROOT", "CodeBlock", "blocks_of", "code_blocks", "pages"]

ROOT = Path(__file__).resolve().parents[2]
# What each language's blocks go through; a fence with another one, or with none, is refused.
LANGUAGES = {
    "console": "tests/docs/test_console_blocks.py",
    "json": "tests/docs/test_data_blocks.py",
    "path": "tests/test_paths.py",
    "python": "tests/docs/test_python_blocks.py",
    "text": "no code: a drawing, a format, or what a program prints",
    "toml": "tests/docs/test_data_blocks.py",
    "yaml": "tests/docs/test_data_blocks.py",
}
_FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """One block: its page and line, and its text without the indentation of a list."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """README.md and all below docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[CodeBlock]:
    """The blocks of one page, in their order."""
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    return [
        CodeBlock(name, text.count("\n", 0, found.start()) + 1, found[2], textwrap.dedent(found[3]))
        for found in _FENCE.finditer(text)
    ]


def code_blocks(*languages: str) -> list[CodeBlock]:
    """The blocks of all pages in one of these languages."""
    return [block for page in pages() for block in blocks_of(page) if block.language in languages]
