"""docs/troubleshooting.md quotes what the code says: each message and each code of a refusal is in a string of it."""

from __future__ import annotations

import ast
import re

from ckptd.transport.messages import RefusalCode
from tests.docs.code_blocks import ROOT
from tests.docs.test_events_page import of_the_page

PAGE = ROOT / "docs/troubleshooting.md"
CODE = ("ckptd", "client", "storage", "transport")


def strings_of_the_code() -> str:
    """All constants of the code, with parts that an f-string puts together in one line."""
    found = []
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def quoted(text: str) -> list[str]:
    """The first cells of tables of messages, and headings."""
    cells = []
    for table in re.findall(r"^\| message \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines():
            cells += re.findall(r"`([^`]+)`", row.split(" | ")[0])
    return [*cells, *re.findall(r"^##+ `([^`]+)`$", text, re.MULTILINE), "TRAINING IS UNPROTECTED"]


def test_every_message_is_said_somewhere() -> None:
    messages, said = quoted(PAGE.read_text(encoding="utf-8")), strings_of_the_code()
    assert len(messages) > 15
    assert [message for message in messages if message not in said] == []


def test_codes_and_events_are_known() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| code | meaning |")[2].partition("\n\n")[0]
    codes = {code for row in table.splitlines() for code in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert len(codes) >= 7
    assert codes - set(RefusalCode) == {"model_changed"}  # said by the trainer itself
    assert '"model_changed"' in "".join(p.read_text() for p in (ROOT / "client").rglob("*.py"))
    events = {
        name for line in re.findall(r"[Ee]vents? (`[^|]*)", text) for name in re.findall(r"`([a-z_]+)`", line)
    }
    assert {"not_protected", "persist_abandoned"} <= events
    assert events <= of_the_page()
