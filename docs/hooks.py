"""Hooks of the site (`mkdocs.yml`): links to files outside of this folder, the reference of `ckptctl`, no outside requests.

Pages are read in the repository, too, where their links lead to files beside `docs/`. The site has a copy of each of
these files under `source/`, and of those that they link to.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import griffe
from markdown import Extension, Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from ckptd.ctl.command import EXIT_MEANINGS
from ckptd.ctl.main import command_parser

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "source/"
_LINK = re.compile(r"(\]\()([^()\s#:]+)((?:#[^()\s]*)?\))")
_SECTION = re.compile(r"\n+(Args|Attributes|Example|Examples|Raises|Returns|Yields):\n")
# Elements whose address a browser fetches by itself.
_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_FETCHED_BY_STYLE = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])(?:https?:)?//")


class _Lists(Extension):
    """What is indented by two columns belongs to the list's item, as in CommonMark; else it takes four."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2
        md.build_parser()


class Sections(griffe.Extension):
    """Our docstrings have no blank line between their sections; griffe wants one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub(r"\n\n\1:\n", obj.docstring.value)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Read pages as the repository's viewers do."""
    config.markdown_extensions.insert(0, _Lists())  # before those that add to the parser
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ to which pages link, and those that these link to."""
    waiting = [(file.src_uri, Path(str(file.abs_src_path))) for file in files.documentation_pages()]
    known: set[str] = set()
    while waiting:
        page, path = waiting.pop()
        for target in (_in_repository(page, found[2]) for found in _LINK.finditer(path.read_text("utf-8"))):
            if target.startswith("docs/") or target in known or not (ROOT / target).is_file():
                continue
            known.add(target)
            files.append(File.generated(config, SOURCE + target, abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                waiting.append((SOURCE + target, ROOT / target))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are in the site, and the generated parts of the reference."""
    here = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        target = _in_repository(here, found[2])
        known = _in_site(target)
        if files.get_file_from_path(known) is None:
            return found[0]  # mkdocs reports it
        return found[1] + posixpath.relpath(known, posixpath.dirname(here) or ".") + found[3]

    markdown = _LINK.sub(moved, markdown)
    for mark, made in _MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Look for addresses elsewhere that a browser would fetch.

    Raises:
        PluginError: a page or a style sheet has some.
    """
    outside = []
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix == ".html":
            parser = _Fetched()
            parser.feed(path.read_text("utf-8"))
            outside += [f"{path}: {address}" for address in parser.outside]
        elif path.suffix == ".css" and _FETCHED_BY_STYLE.search(path.read_text("utf-8")):
            outside.append(f"{path}: an address elsewhere")
    if outside:
        raise PluginError("pages of the site load from elsewhere:\n" + "\n".join(outside))


def _exit_codes() -> str:
    rows = [f"| {code} | {meaning} |" for code, meaning in EXIT_MEANINGS.items()]
    return "\n".join(["| exit code | meaning |", "|---|---|", *rows])


def _commands() -> str:
    os.environ["COLUMNS"] = "100"  # of the parsers' help
    return "\n\n".join(
        f"### {parser.prog.removeprefix('ckptctl ')}\n\n```text\n{parser.format_help().strip()}\n```"
        for parser in _leaves(command_parser())
    )


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for each in groups[0].choices.values() if groups else ():
        yield from _leaves(each)


_MADE = {"<!-- ckptctl -->": _commands, "<!-- exit codes -->": _exit_codes}


class _Fetched(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(_FETCHED.get(tag, "")) or ""
        if re.match(r"(https?:)?//", address) and given.get("rel") != "canonical":
            self.outside.append(address)


def _in_repository(page: str, link: str) -> str:
    """The path of a link's target from the root of the repository; ``page`` is a path in the site."""
    origin = page.removeprefix(SOURCE) if page.startswith(SOURCE) else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _in_site(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else SOURCE + target
