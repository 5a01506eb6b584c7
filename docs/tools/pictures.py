"""Makes the picture of the README, light and dark: python docs/tools/pictures.py

Left is the training step of mlp as a graph, right the report page of a run. Needs Chromium, Graphviz and a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = Path(__file__).parents[1] / "pictures"
BROWSER = "chromium"
WIDTH, HEIGHT = 1600, 900
PAGE = """\
<!DOCTYPE html>
<meta charset="utf-8">
<style>
  :root {{ color-scheme: light dark }}
  body {{ margin: 0; display: flex; height: {height}px; overflow: hidden; background: Canvas }}
  div, iframe {{ width: 50%; height: 100%; overflow: hidden; border: 0; box-sizing: border-box }}
  div {{ border-right: 1px solid GrayText }}
  img {{ width: 100% }}
  @media (prefers-color-scheme: dark) {{ img {{ filter: invert(1) hue-rotate(180deg) }} }}
</style>
<div><img src="step.svg"></div>
<iframe src="runs/mlp/report.html" scrolling="no"></iframe>
"""
SCHEMES = {"dark": 0, "light": 1}
"""Chromium's numbers of the preferred colour schemes."""


def adtrain(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "adtrain", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def screenshot(page: Path, target: Path, scheme: int) -> None:
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
        ]
        options += [f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={scheme}"]
        options += [f"--window-size={WIDTH},{HEIGHT}", "--allow-file-access-from-files", f"--screenshot={target}"]
        subprocess.run([BROWSER, *options, page.as_uri()], check=True, timeout=120, stderr=subprocess.DEVNULL)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adtrain(folder, "train", "mlp", "--device", "cpu")
        adtrain(folder, "report", "runs/mlp")
        adtrain(folder, "graph", "mlp", "--program", "-o", "step.svg")
        page = folder / "page.html"
        page.write_text(PAGE.format(height=HEIGHT))
        for scheme, number in SCHEMES.items():
            screenshot(page, PICTURES / f"first-{scheme}.png", number)


if __name__ == "__main__":
    main()
