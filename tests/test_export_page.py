"""Exported WebAssembly, and the page that runs it on drawings, in headless Chromium."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import c_programs
import numpy as np
import pytest
from browser import Browser, assert_fits
from command_line import command
from PIL import Image
from random_networks import with_arrays
from report_runs import one_line

from adtrain import nn
from adtrain.core.errors import AdtrainError
from adtrain.data import Split
from adtrain.export.c import build
from adtrain.training import TrainedModel, model_file
from adtrain.training.evaluation import predictions

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not c_programs.has("clang", "wasm-ld"), reason="clang and lld are not installed"),
]

SMALL = nn.Sequential(nn.Conv2d(3, kernel_size=3), nn.GELU(), nn.Flatten(), nn.Linear(4), nn.Softplus(), nn.Linear(3))
DROP = """(async () => {
  const bytes = Uint8Array.from(atob("CONTENT"), c => c.charCodeAt(0)), data = new DataTransfer();
  data.items.add(new File([bytes], "NAME", {type: "TYPE"}));
  document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
  for (let i = 0; i < 200 && document.getElementById("status").textContent.indexOf("NAME") != 0; i++)
    await new Promise(done => setTimeout(done, 10));
  return document.getElementById("status").textContent;
})()"""
SHOWN = """[...document.querySelectorAll("#bars li")].map(
  row => [row.children[0].textContent, Number(row.children[1].style.getPropertyValue("--share"))])"""
SEEN = "Array.from(view.getImageData(0, 0, width, height).data.filter((_, i) => i % 4 == 0))"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short training on MNIST."""
    folder = tmp_path_factory.mktemp("smoke") / "run"
    command("train", "smoke", "--device", "cpu", "--eager", "--output-dir", folder)
    return folder


@pytest.fixture(scope="module")
def trained(run: Path) -> TrainedModel:
    return model_file.load(run)


@pytest.fixture(scope="module")
def demo(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo.html"
    path.write_bytes(build.page(trained, build.webassembly(trained)))
    return path


@pytest.fixture(scope="module")
def digits(trained: TrainedModel) -> Split:
    return trained.test_split()


def drop(browser: Browser, name: str, kind: str, content: bytes) -> str:
    script = DROP.replace("NAME", name).replace("TYPE", kind).replace("CONTENT", base64.b64encode(content).decode())
    found: str = browser.run(script)
    return found


def draw(browser: Browser, image: np.ndarray) -> None:
    """Draw an image (28, 28) on the pad with the mouse: for each bright pixel a short line to the next one."""
    browser.run("document.getElementById('clear').click()")
    left, top, size = browser.run("(r => [r.left, r.top, r.width])(pad.getBoundingClientRect())")

    def mouse(kind: str, row: float, column: float) -> None:
        x, y = left + (column + 0.5) * size / 28, top + (row + 0.5) * size / 28
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    for row, column in np.argwhere(image > 200):
        mouse("mousePressed", row, column)
        mouse("mouseReleased", row, column)
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def shown(browser: Browser) -> dict[str, float]:
    return dict(browser.run(SHOWN))


def of_network(trained: TrainedModel, image: np.ndarray) -> np.ndarray:
    return predictions(trained.network, trained.params, trained.statistics, image.reshape(1, 1, 28, 28), "cpu")[0]


@pytest.mark.exhaustive
def test_the_page_fits_and_needs_no_network(browser: Browser, demo: Path) -> None:
    assert_fits(browser, demo)
    text = demo.read_text()
    assert "default-src 'none'" in text
    assert not any(word in text for word in ("http:", "https:", "fetch(", "<link", "src="))


@pytest.mark.exhaustive
def test_digits_drawn_by_mouse_get_the_classes_of_the_network(
    browser: Browser, demo: Path, trained: TrainedModel, digits: Split
) -> None:
    browser.open(demo)
    browser.run("ready")
    right = 0
    for i in range(4):
        draw(browser, digits.images[i, 0])
        found, seen = shown(browser), np.array(browser.run(SEEN), np.uint8)
        expected = of_network(trained, seen)
        np.testing.assert_allclose(list(found.values()), expected, atol=1e-4)
        right += max(found, key=lambda name: found[name]) == str(of_network(trained, digits.images[i]).argmax())
    assert right >= 3
    assert not browser.errors()


def test_a_dropped_image_or_row_of_the_networks_size_is_taken_as_it_is(
    browser: Browser, demo: Path, trained: TrainedModel, digits: Split, tmp_path: Path
) -> None:
    browser.open(demo, width=390, scheme="dark")
    browser.run("ready")
    for i in range(3):
        image = digits.images[i, 0]
        Image.fromarray(image).save(tmp_path / "digit.png")
        assert drop(browser, "digit.png", "image/png", (tmp_path / "digit.png").read_bytes()) == "digit.png"
        expected = of_network(trained, digits.images[i])
        np.testing.assert_allclose(list(shown(browser).values()), expected, atol=1e-4)
        row = ",".join(map(str, image.reshape(-1)))
        assert drop(browser, "row.csv", "text/csv", f"7,{row}\n".encode()) == "row.csv"
        np.testing.assert_allclose(list(shown(browser).values()), expected, atol=1e-4)
    assert drop(browser, "bad.csv", "text/csv", b"1,2").startswith("bad.csv: found 2 numbers, expected 784")
    assert drop(browser, "bad.png", "image/png", b"1,2") == "bad.png: is not an image that the browser can read"


def test_a_photograph_on_paper_is_inverted_and_centred(
    browser: Browser, demo: Path, trained: TrainedModel, digits: Split, tmp_path: Path
) -> None:
    browser.open(demo)
    browser.run("ready")
    large = np.full((400, 300), 250, np.uint8)
    large[100:300, 50:250] = 255 - np.asarray(Image.fromarray(digits.images[0, 0]).resize((200, 200)))
    Image.fromarray(large).save(tmp_path / "photo.png")
    drop(browser, "photo.png", "image/png", (tmp_path / "photo.png").read_bytes())
    found = shown(browser)
    assert max(found, key=lambda name: found[name]) == str(of_network(trained, digits.images[0]).argmax())


def test_labels_of_any_characters_are_text(browser: Browser, tmp_path: Path) -> None:
    labels = ("</script><b>&'\"", "<!-- \u2028")
    model, path = replace(with_arrays(SMALL, (1, 6, 5)), classes=labels), tmp_path / "demo.html"
    path.write_bytes(build.page(model, build.webassembly(model)))
    browser.open(path)
    browser.run("ready")
    assert tuple(shown(browser))[:2] == labels
    assert not browser.errors()


def test_the_module_computes_what_the_network_does(browser: Browser, tmp_path: Path) -> None:
    model = with_arrays(SMALL, (1, 6, 5))
    path = tmp_path / "demo.html"
    path.write_bytes(build.page(model, build.webassembly(model)))
    browser.open(path)
    browser.run("ready")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 1, 6, 5), dtype=np.uint8)
    found = browser.run(f"predict({json.dumps(pixels.reshape(-1).tolist())})")
    expected = predictions(model.network, model.params, model.statistics, pixels, "cpu")[0]
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-5)
    assert found["best"] == expected.argmax()
    assert len(found["layer"]) == 3 * 4 * 3


@pytest.mark.parametrize(
    ("name", "kind", "start"),
    [
        pytest.param("net.wasm", "WebAssembly", b"\0asm", marks=pytest.mark.exhaustive),
        ("net.html", "page with WebAssembly", b"<!DOCTYPE html>"),
    ],
)
def test_the_command_writes_the_module_or_the_page_and_compares_its_c(
    name: str, kind: str, start: bytes, run: Path, tmp_path: Path
) -> None:
    found = json.loads(command("export", run, tmp_path / name, "--json").stdout)
    assert found["format"] == kind
    assert (found["check"]["images"], found["check"]["different"]) == (10_000, 0)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_without_clang_the_error_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WASM_CC", "no-such-clang")
    line = one_line(command("export", run, "net.wasm", expect=2))
    assert line == (
        "no-such-clang: no such program; WebAssembly needs clang: install clang and lld (apt install clang lld), "
        "or name one by the environment variable WASM_CC"
    )


def test_a_network_that_takes_no_images_has_no_page() -> None:
    model = with_arrays(nn.Sequential(nn.Linear(3)), (5,), scale=1)
    with pytest.raises(AdtrainError, match=r"a page draws images in grey or colour.*; this run takes 1x1x5 numbers"):
        build.page(model, build.webassembly(model))


COLOURS = """
name: colours
data: {path: images.npz, batch_size: 8, test: 0.2, validation: 0}
model: {input: [3, 8, 8], layers: [{conv2d: {out_channels: 2, kernel_size: 3}}, relu, flatten, {linear: 3}]}
loss: cross_entropy
optimizer: {adam: {lr: 0.01}}
training: {epochs: 1}
"""


def test_colour_images_are_predicted_as_in_python(browser: Browser, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (40, 3, 8, 8), np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(40) % 3)
    (tmp_path / "colours.yaml").write_text(COLOURS.replace("images.npz", str(tmp_path / "images.npz")))
    command("train", tmp_path / "colours.yaml", "--device", "cpu", "--output-dir", tmp_path / "run", "-q")
    trained = model_file.load(tmp_path / "run")
    (tmp_path / "demo.html").write_bytes(build.page(trained, build.webassembly(trained)))
    assert_fits(browser, tmp_path / "demo.html")
    browser.open(tmp_path / "demo.html")
    browser.run("ready")
    image = images[0]
    Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / "colour.png")
    texts = ",".join(map(str, image.ravel().tolist()))
    for name, kind, content in (
        ("colour.png", "image/png", (tmp_path / "colour.png").read_bytes()),
        ("colour.csv", "text/csv", texts.encode()),
    ):
        assert drop(browser, name, kind, content) == name
        expected = predictions(trained.network, trained.params, trained.statistics, image[np.newaxis], "cpu")[0]
        assert list(shown(browser).values()) == pytest.approx(expected.tolist(), abs=1e-3)
    assert browser.run("document.getElementById('colour').type") == "color"
    browser.run("document.getElementById('clear').click()")
    black = predictions(trained.network, trained.params, trained.statistics, 0 * image[np.newaxis], "cpu")[0]
    assert list(shown(browser).values()) == pytest.approx(black.tolist(), abs=1e-3)
    assert not browser.errors()
