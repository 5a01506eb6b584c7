"""The site of the documents fits into narrow windows, and can be read in both colour schemes."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from browser import SCHEMES, WIDTHS, Browser

ROOT = Path(__file__).parents[1]
PAGES = ("index", "tutorial", "design", "how-to/export-c", "reference/config", "reference/python")
DRAWN_BY_STYLE = 'md-search__button "Search"'
"""A text of the theme that is hidden below another one."""


@pytest.fixture(scope="module")
def site() -> Path:
    if find_spec("zensical") is None:
        pytest.skip("zensical is not installed")
    for command in (["docs/tools/site.py"], ["-m", "zensical", "build"]):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    return ROOT / "build" / "site"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("width", "scheme"), [*zip(WIDTHS, SCHEMES, strict=True)])
def test_pages_do_not_scroll_sideways_and_can_be_read(browser: Browser, site: Path, width: int, scheme: str) -> None:
    for page in PAGES:
        browser.open(site / f"{page}.html", width, scheme)
        browser.run("localStorage.clear()")  # which has the scheme of another test
        browser.open(site / f"{page}.html", width, scheme)
        assert browser.run("document.body.dataset.mdColorScheme") == ("default" if scheme == "light" else "slate")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), page
        assert not [text for text in browser.low_contrasts() if DRAWN_BY_STYLE not in text], page
