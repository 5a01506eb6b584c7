"""Headless Chromium, started once for many pages and driven by its DevTools protocol through two pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe", "about:blank",
]  # fmt: skip
HEIGHT = 1600
SCHEMES, WIDTHS = ("light", "dark"), (1280, 390)
# Chromium reads commands from file descriptor 3 and writes answers to 4.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)

LAYOUT_PROBLEMS = """(() => {
  const found = [], wide = document.documentElement.clientWidth;
  const name = e => `${e.tagName}.${e.getAttribute("class") || ""} "${e.textContent.trim().slice(0, 40)}"`;
  if (document.documentElement.scrollWidth > wide) found.push("the page scrolls sideways");
  for (const e of document.querySelectorAll("body *")) {
    const style = getComputedStyle(e);
    if (!e.checkVisibility() || !e.textContent.trim()) continue;
    if (["text", "TD", "TH"].includes(e.tagName)) {
      const range = document.createRange();
      range.selectNodeContents(e);
      const text = range.getBoundingClientRect(), around = (e.closest("svg") || e).getBoundingClientRect();
      if (["left", "top"].some(side => text[side] < around[side] - 2) ||
          ["right", "bottom"].some(side => text[side] > around[side] + 2))
        found.push(`outside of its picture or cell: ${name(e)}`);
    } else if (e instanceof HTMLElement && style.display != "inline" && style.overflowX != "visible"
               && style.textOverflow != "ellipsis" && e.tabIndex < 0 && e.scrollWidth > e.clientWidth + 1) {
      found.push(`wider than its place: ${name(e)}`);
    }
  }
  return found;
})()"""
"""What does not fit into the window. What the keyboard can scroll may be wider. Text may end in an ellipsis."""

CONTRAST_PROBLEMS = """(() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const pen = canvas.getContext("2d", {willReadFrequently: true}), known = {}, found = new Set();
  const colour = text => {
    if (known[text]) return known[text];
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = "transparent";
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return (known[text] = [r, g, b, a / 255]);
  };
  const over = (top, below) => [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * below[i]);
  const light = rgb => rgb.map(x => x / 255).map(x => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const faded = (e, [r, g, b, a]) => {
    for (; e; e = e.parentElement) a *= Number(getComputedStyle(e).opacity);
    return [r, g, b, a];
  };
  // What an element paints, one layer over the other: lists of the colours that the layer has.
  const painted = e => {
    const style = getComputedStyle(e), before = getComputedStyle(e, "::before");
    if (e instanceof SVGElement) {
      if (["svg", "g", "text", "tspan"].includes(e.tagName) || style.fill == "none") return [];
      const [r, g, b, a] = colour(style.fill);
      return [[[r, g, b, a * Number(style.fillOpacity)]]];
    }
    const stops = style.backgroundImage.match(/(?:rgba?|color|oklab)\\([^()]*\\)/g), layers = [[style.backgroundColor]];
    if (stops) layers.push(stops);
    if (before.content != "none" && before.position == "absolute") layers.push([before.backgroundColor, "transparent"]);
    return layers.map(colours => colours.map(colour));
  };
  const text = e => [...e.childNodes].filter(x => x.nodeType == Node.TEXT_NODE && x.data.trim());
  for (const e of document.querySelectorAll("body *")) {
    if (!text(e).length || ["SCRIPT", "STYLE", "OPTION", "TITLE", "DESC"].includes(e.tagName.toUpperCase()) ||
        !e.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
    const range = document.createRange(), style = getComputedStyle(e), isSvg = e instanceof SVGElement;
    range.selectNodeContents(text(e)[0]);
    const box = range.getBoundingClientRect(), [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
    const stack = document.elementsFromPoint(x, y), place = stack.findIndex(below => below == e || e.contains(below));
    if (place < 0) continue;
    let grounds = [colour(getComputedStyle(document.body).backgroundColor).slice(0, 3)];
    const ink = faded(e, colour(isSvg ? style.fill : style.color));
    for (const layer of stack.slice(place).reverse())
      for (const paints of painted(layer))
        grounds = paints.flatMap(paint => grounds.map(ground => over(faded(layer, paint), ground)));
    const hasHalo = isSvg && style.stroke != "none" && style.paintOrder.startsWith("stroke");
    if (hasHalo) grounds = [colour(style.stroke).slice(0, 3)];
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700);
    const ratio = Math.min(...grounds.map(ground => contrast(over(ink, ground), ground)));
    const name = e.getAttribute("class") || e.tagName;
    if (ratio < (isLarge ? 3 : 4.5))
      found.add(`contrast ${ratio.toFixed(1)}: ${name} "${e.textContent.trim().slice(0, 30)}"`);
  }
  return [...found];
})()"""
"""Texts whose contrast with what is below is less than WCAG 2 asks for (AA)."""

LARGEST_HEIGHT = 16000
"""Pixels of a page that `Browser.low_contrasts` looks at."""


class Browser:
    """A running browser with one tab."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands, self._answers = commands, answers
        self._calls, self._session = 0, ""
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        self._calls += 1
        command: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while (message := self._read()).get("id") != self._calls:
            self._events.append(message)
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    def open(self, page: Path, width: int = 1280, scheme: str = "light") -> None:
        """Load the page in a window of `width` pixels in the colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def low_contrasts(self) -> list[str]:
        """The texts that are hard to read, see CONTRAST_PROBLEMS."""
        width, height = self.run("[innerWidth, document.documentElement.scrollHeight]")
        height = min(height, LARGEST_HEIGHT)  # `elementsFromPoint` sees the window only
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **shape)
        found: list[str] = self.run(CONTRAST_PROBLEMS)
        return found

    def source(self) -> str:
        """The page as HTML after its scripts have run."""
        source: str = self.run("document.documentElement.outerHTML")
        return source

    def screenshot(self, whole: bool = False) -> bytes:
        """The window, or the whole page, as a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def errors(self) -> list[str]:
        """Errors in the console and exceptions since the page was opened."""
        found = []
        for event in self._events:
            about = event.get("params", {})
            if event["method"] == "Log.entryAdded" and about["entry"]["level"] == "error":
                found.append(about["entry"]["text"])
            if event["method"] == "Runtime.exceptionThrown":
                found.append(about["exceptionDetails"]["text"])
            if event["method"] == "Runtime.consoleAPICalled" and about["type"] == "error":
                found.append(json.dumps(about["args"]))
        return found

    def _read(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            message += byte
        found: dict[str, Any] = json.loads(message)
        return found


def installed() -> str | None:
    """The path of an installed browser."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def started(path: str, profile: Path) -> Iterator[Browser]:
    """The browser at `path` with a new profile, until the end of the block."""
    ours, theirs = os.pipe(), os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (ours[0], theirs[1])]
    command = [sys.executable, "-c", START, *map(str, high), path, f"--user-data-dir={profile}", *OPTIONS]
    process = subprocess.Popen(command, pass_fds=high, stderr=subprocess.DEVNULL)
    for fd in (*high, ours[0], theirs[1]):
        os.close(fd)
    with open(ours[1], "wb") as commands, open(theirs[0], "rb") as answers:
        try:
            browser = Browser(commands, answers)
            yield browser
            browser._session = ""
            browser.call("Browser.close")
            process.wait()
        finally:
            process.kill()
            process.wait()


def assert_fits(browser: Browser, page: Path) -> None:
    """Wide and light, narrow and dark: the page is drawn in its scheme, nothing is cut, and there are no errors.

    Texts can be read on what is below them.
    """
    for width, scheme in zip(WIDTHS, SCHEMES, strict=True):
        browser.open(page, width, scheme)
        problems = browser.run(LAYOUT_PROBLEMS) + browser.low_contrasts() + browser.errors()
        assert not problems, "\n".join([f"{page.name}, {width} px, {scheme}:", *problems])
        assert browser.run("document.body.innerText.trim().length") > 0
        red = int(browser.run("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])
        assert (red > 200) == (scheme == "light")
