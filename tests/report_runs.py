"""A finished run of the small data set, and its page in a real browser, for the tests of reports."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from adtrain.cli import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def command(*arguments: str | Path, expect: int = 0) -> Result:
    """Run `adtrain` with the arguments; its exit code is checked."""
    result = CliRunner().invoke(main.cli, [*map(str, arguments)])
    assert result.exit_code == expect, result.stderr
    return result


def train(cfg: Path, folder: Path, *options: str) -> Path:
    """A run in `folder`, by NumPy, for nothing here needs a compiler; the folder."""
    command("train", cfg, "--device", "cpu", "--eager", "--output-dir", folder, "--profile-steps", "0", *options)
    return folder


def one_line(result: Result) -> str:
    """The only line of an error, without its beginning."""
    (line,) = result.stderr.splitlines()
    assert result.stdout == ""
    return line.removeprefix("adtrain: error: ")


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def in_browser(page: Path, *arguments: str, width: int = 1280, height: int = 1600) -> str:
    """What headless Chromium prints of the page; skips the test where there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"found no browser ({', '.join(BROWSERS)})")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    where = [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},{height}", page.as_uri()]
    done = subprocess.run([browser, *quiet, *arguments, *where], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
