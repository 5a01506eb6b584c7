"""Makes the pictures of the documents, light and dark: python docs/tools/pictures.py

One has the training step of mlp as a graph, and the report page of a run; the other is the page of an exported network
with a digit drawn on it. Needs Chromium, and a machine without other work, whose times the report shows.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = Path(__file__).parents[1] / "pictures"
BROWSER = "chromium"
WIDTH, HEIGHT, LEFT = 1300, 560, 800
"""Pixels of the picture, and of the graph in it."""
SCALE = 0.6
"""Of the report."""
PAGE = f"""\
<!DOCTYPE html>
<meta charset="utf-8">
<style>
  :root {{ color-scheme: light dark }}
  body {{ margin: 0; display: flex; height: {HEIGHT}px; overflow: hidden; background: light-dark(#ffffff, #1a2029) }}
  img {{ width: {LEFT}px; object-fit: contain }}
  iframe {{ flex: none; width: {(WIDTH - LEFT) / SCALE}px; height: {HEIGHT / SCALE}px; border: 0;
    transform: scale({SCALE}); transform-origin: 0 0 }}
</style>
<img src="step.svg">
<iframe src="runs/mlp/report.html" scrolling="no"></iframe>
"""
SCHEMES = {"dark": 0, "light": 1}
"""Chromium's numbers of the preferred colour schemes."""
DEMO_WIDTH, DEMO_HEIGHT = 1100, 800
DRAWING = """
<script>ready.then(() => {
  const [first, ...others] = [[175, 60], [110, 80], [112, 130], [176, 122], [180, 64], [176, 215]];
  last = first;
  others.forEach(line);
});</script>
"""
"""A nine."""


def adtrain(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "adtrain", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def screenshot(page: Path, target: Path, scheme: int, width: int = WIDTH, height: int = HEIGHT) -> None:
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
        ]
        options += [f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={scheme}"]
        options += [
            f"--window-size={width},{height}",
            "--force-device-scale-factor=1.5",
            "--allow-file-access-from-files",
            f"--screenshot={target}",
        ]
        subprocess.run([BROWSER, *options, page.as_uri()], check=True, timeout=120, stderr=subprocess.DEVNULL)


def demo_pictures(folder: Path) -> None:
    """The page of the run runs/lenet5 in a folder."""
    adtrain(folder, "export", "runs/lenet5", "demo.html")
    page = folder / "demo.html"
    page.write_text(page.read_text() + DRAWING)
    for scheme, number in SCHEMES.items():
        screenshot(page, PICTURES / f"demo-{scheme}.png", number, DEMO_WIDTH, DEMO_HEIGHT)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adtrain(folder, "train", "mlp", "--device", "cpu")
        adtrain(folder, "report", "runs/mlp")
        adtrain(folder, "graph", "mlp", "--program", "-o", "step.svg")
        page = folder / "page.html"
        page.write_text(PAGE)
        for scheme, number in SCHEMES.items():
            screenshot(page, PICTURES / f"first-{scheme}.png", number)
        adtrain(folder, "train", "lenet5", "--device", "cpu")
        demo_pictures(folder)


if __name__ == "__main__":
    main()
