"""Helpers for the tests of reports: runs on the small data set, and the contents of pages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from click.testing import Result
from command_line import command


class Elements(HTMLParser):
    """The contents of a page: text by element id, cells by row, headings, tags, and all addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.by_id: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.inside: tuple[str, str] = "", ""
        self.in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.inside = tag, found.get("id", "")
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")
            self.in_cell = True
        self.addresses += [found[name] for name in ("src", "href", "srcset", "data", "action") if name in found]

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.rows[-1][-1] += data
        tag, name = self.inside
        if name:
            self.by_id[name] = self.by_id.get(name, "") + data
        if tag == "h2":
            self.headings.append(data.strip())
        self.inside = "", ""


def train(cfg: Path, folder: Path, *options: str) -> Path:
    """Train into `folder` in eager mode, which needs no compiler; returns the folder."""
    command("train", cfg, "--device", "cpu", "--eager", "--output-dir", folder, *options)
    return folder


def one_line(result: Result) -> str:
    """The single line of an error message, without its prefix."""
    (line,) = result.stderr.splitlines()
    assert result.stdout == ""
    assert line.startswith("adtrain: error: ")
    return line.removeprefix("adtrain: error: ")


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def assert_needs_no_network(text: str) -> None:
    """The page has no scripts and no addresses other than data URLs."""
    found = Elements(text)
    assert all(address.startswith("data:image/png;base64,") for address in found.addresses)
    assert not found.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert not re.search(r"url\(|@import|https?:", text)
    assert "default-src 'none'" in text
