"""The checks of pages in a browser find what they are for."""

from __future__ import annotations

from pathlib import Path

from browser import Browser

PAGE = """<body style="margin: 0; background: #fff; color: #000; font: 14px sans-serif">
<p>black on white</p>
<p style="color: #999">grey on white</p>
<p style="color: #777; font-size: 30px">large grey on white</p>
<div style="background: #333"><p>black on grey</p></div>
<p style="opacity: 0.3">faint</p>
<p style="background: linear-gradient(to right, rgb(20, 20, 20) 50%, rgb(255, 255, 255) 0)">on a gradient</p>
<svg width="100" height="40"><rect width="100" height="40" fill="#222"/>
<text x="5" y="20">on a shape</text></svg>
"""


def test_texts_with_little_contrast_are_found(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    browser.open(tmp_path / "page.html")
    found = [text.split('"')[1] for text in browser.low_contrasts()]
    assert found == ["grey on white", "black on grey", "faint", "on a gradient", "on a shape"]
