"""Helpers for the tests of reports: runs on the small data set, and pages in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from waiting import PATIENCE

from adtrain.cli import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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


def command(*arguments: str | Path, expect: int = 0) -> Result:
    """Run `adtrain` with the arguments and check its exit code."""
    result = CliRunner().invoke(main.cli, [*map(str, arguments)])
    assert result.exit_code == expect, result.stderr
    return result


def train(cfg: Path, folder: Path, *options: str) -> Path:
    """Train into `folder` in eager mode, which needs no compiler; returns the folder."""
    command("train", cfg, "--device", "cpu", "--eager", "--output-dir", folder, "--profile-steps", "0", *options)
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


def in_browser(page: Path, *arguments: str, width: int = 1280, height: int = 1600) -> str:
    """The output of headless Chromium for the page. Skips the test where no browser is installed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"found no browser ({', '.join(BROWSERS)})")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    where = [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},{height}", page.as_uri()]
    done = subprocess.run([browser, *quiet, *arguments, *where], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_drawn(page: Path, folder: Path, width: int, scheme: str) -> None:
    """The page is drawn in the colour scheme "light" or "dark", neither empty nor full. `folder` is for files."""
    picture = folder / "page.png"
    setting = f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"
    in_browser(Path(shutil.copy(page, folder)), f"--screenshot={picture}", setting, width=width, height=1600)
    with Image.open(picture) as drawn:
        assert (drawn.format, drawn.size) == ("PNG", (width, 1600))
        pixels = np.asarray(drawn.convert("L")).astype(int)
    corner = pixels[2, 2]
    assert corner > 200 if scheme == "light" else corner < 60
    assert 0.005 < (abs(pixels - corner) > 80).mean() < 0.5  # text and lines on a mostly empty page


def assert_needs_no_network(text: str) -> None:
    """The page has no scripts and no addresses other than data URLs."""
    found = Elements(text)
    assert all(address.startswith("data:image/png;base64,") for address in found.addresses)
    assert not found.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert not re.search(r"url\(|@import|https?:", text)
    assert "default-src 'none'" in text
