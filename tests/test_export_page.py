"""Exported WebAssembly, and pages that run networks on drawings, rows and texts, in headless Chromium."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import c_programs
import numpy as np
import pytest
from browser import Browser, assert_fits
from command_line import command
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from random_networks import networks, samples, with_arrays
from report_runs import one_line

from adtrain import nn
from adtrain.core.errors import AdtrainError
from adtrain.data import Split
from adtrain.export import page
from adtrain.export.c import source
from adtrain.export.page import javascript, page_program
from adtrain.training import TrainedModel, inputs, model_file, sampling
from adtrain.training.evaluation import predictions

pytestmark = pytest.mark.compiled
of_clang = pytest.mark.skipif(not c_programs.has("clang", "wasm-ld"), reason="clang and lld are not installed")

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
    path.write_bytes(page_of(trained))
    return path


@pytest.fixture(scope="module")
def digits(trained: TrainedModel) -> Split:
    return trained.test_split()


def page_of(trained: TrainedModel, examples: Split | None = None) -> bytes:
    return page.encode(trained, page_program(trained), examples)


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
    path.write_bytes(page_of(model))
    browser.open(path)
    browser.run("ready")
    assert tuple(shown(browser))[:2] == labels
    assert not browser.errors()


def in_browser(browser: Browser, trained: TrainedModel, images: np.ndarray, folder: Path) -> list[dict[str, Any]]:
    """What a page's `predict` gives for each image."""
    path = folder / "network.html"
    path.write_text(f"<script>{page.script(page_program(trained))}</script>")
    browser.open(path)
    rows = json.dumps(images.reshape(len(images), -1).tolist())
    found: list[dict[str, Any]] = browser.run(f"load().then(() => {rows}.map(predict))")
    assert not browser.errors()
    return found


def test_a_page_computes_what_the_network_does(browser: Browser, tmp_path: Path) -> None:
    model = with_arrays(SMALL, (1, 6, 5))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 1, 6, 5), dtype=np.uint8)
    expected = predictions(model.network, model.params, model.statistics, pixels, "cpu")
    for found, row in zip(in_browser(browser, model, pixels, tmp_path), expected, strict=True):
        np.testing.assert_allclose(found["outputs"], row, atol=1e-5)
        assert found["best"] == row.argmax()
        assert len(found["layer"]) == 3 * 4 * 3


def test_a_page_computes_rotated_attention(browser: Browser, tmp_path: Path) -> None:
    layer = nn.DecoderLayer(2, rotary_base=100.0, num_key_value_heads=1, qk_norm=True)
    model = with_arrays(nn.Sequential(nn.Linear(8), layer, nn.Flatten(), nn.Linear(3)), (5, 4))
    pixels = np.random.default_rng(0).integers(0, 256, (2, *model.image_shape), dtype=np.uint8)
    expected = predictions(model.network, model.params, model.statistics, pixels, "cpu")
    found = [x["outputs"] for x in in_browser(browser, model, pixels, tmp_path)]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@settings(max_examples=100)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_page_computes_a_network_of_any_layers(browser: Browser, data: st.DataObject, seed: int) -> None:
    shape = data.draw(samples)
    model = with_arrays(data.draw(networks(shape)), shape, seed)
    images = np.random.default_rng(seed).integers(0, 256, (2, *model.image_shape), dtype=np.uint8)
    with TemporaryDirectory() as folder:
        found = [x["outputs"] for x in in_browser(browser, model, images, Path(folder))]
    expected = predictions(model.network, model.params, model.statistics, images, "cpu")
    np.testing.assert_allclose(found, expected.reshape(2, -1), rtol=1e-4, atol=1e-4)


def test_a_function_that_pages_do_not_have_is_refused() -> None:
    with pytest.raises(AdtrainError, match="found bfloat16_value, which pages do not have"):
        javascript("loop_0", "(const float *x, float *y) {\n    y[0] = bfloat16_value(x[0]);\n}")


def test_the_packaged_layers_are_made_of_the_packaged_c() -> None:
    assert source.ready_layers().endswith(source.SECTION + source.layers_digest()), "run docs/tools/wasm_layers.py"


@of_clang
def test_layers_compiled_by_clang_compute_what_the_packaged_ones_do(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_arrays(SMALL, (1, 6, 5))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 1, 6, 5), dtype=np.uint8)
    ready = in_browser(browser, model, pixels, tmp_path)
    monkeypatch.setattr(page, "ready_layers", source.compiled_layers)
    assert in_browser(browser, model, pixels, tmp_path) == ready


MODULE = """WebAssembly.instantiate(Uint8Array.from(atob("CONTENT"), c => c.charCodeAt(0))).then(({instance}) => {
  const {memory, image, outputs, predict} = instance.exports;
  new Uint8Array(memory.buffer, image()).set(PIXELS);
  return [predict(), Array.from(new Float32Array(memory.buffer, outputs(), 3))];
})"""


@of_clang
def test_a_module_computes_what_the_network_does(browser: Browser, tmp_path: Path) -> None:
    model = with_arrays(SMALL, (1, 6, 5))
    pixels = np.random.default_rng(0).integers(0, 256, (1, 1, 6, 5), dtype=np.uint8)
    (tmp_path / "empty.html").write_text("")
    browser.open(tmp_path / "empty.html")
    content = base64.b64encode(source.webassembly(model).content).decode()
    script = MODULE.replace("CONTENT", content).replace("PIXELS", json.dumps(pixels.reshape(-1).tolist()))
    best, outputs = browser.run(script)
    expected = predictions(model.network, model.params, model.statistics, pixels, "cpu")[0]
    assert best == expected.argmax()
    np.testing.assert_allclose(outputs, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "start"),
    [
        pytest.param("net.wasm", "WebAssembly", b"\0asm", marks=[pytest.mark.exhaustive, of_clang]),
        ("net.html", "page", b"<!DOCTYPE html>"),
    ],
)
def test_the_command_writes_the_module_or_the_page_and_compares_its_c(
    name: str, kind: str, start: bytes, run: Path, tmp_path: Path
) -> None:
    found = json.loads(command("export", run, tmp_path / name, "--json").stdout)
    assert found["format"] == kind
    assert (found["check"]["images"], found["check"]["different"]) == (10_000, 0)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_without_clang_a_page_is_written_and_the_error_of_a_module_says_what_to_install(
    run: Path, trained: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WASM_CC", "no-such-clang")
    assert page_of(trained)
    line = one_line(command("export", run, "net.wasm", expect=2))
    assert line == (
        "no-such-clang: no such program; WebAssembly needs clang: install clang and lld (apt install clang lld), "
        "or name one by the environment variable WASM_CC"
    )


def test_a_network_for_other_arrays_has_no_page() -> None:
    model = with_arrays(nn.Sequential(nn.Flatten(), nn.Linear(3)), (2, 4, 4), scale=1)
    with pytest.raises(AdtrainError, match=r"pages are for images .* and texts; this run takes 2x4x4 numbers"):
        page_of(model)


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
    (tmp_path / "demo.html").write_bytes(page_of(trained))
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


TABLE = """
name: table
data: {path: rows.csv, LABEL, dates: [sold], missing: mean, test: 0.2, validation: 0, batch_size: 8}
model: {layers: [{linear: 8}, relu, {linear: 2}]}
loss: cross_entropy
optimizer: {adam: {lr: 0.01}}
training: {epochs: 2}
"""
ROWS: dict[str, list[Any]] = {
    "size": [1.5, None, 7.25], "town": ["Ulm", "Bonn", "Rome"],
    "sold": ["2024-02-29", "1999-12-31", None], "rooms": [3, 4, 2],
}  # fmt: skip
CHOOSE = """((row) => {
  for (const column of about.columns) {
    const value = row[column.name], isKnown = !column.categories || column.categories.includes(value);
    column.input.value = value === null ? "" : isKnown ? value : OTHER;
  }
  fields.dispatchEvent(new Event("input"));
  return [about.columns.map(features).flat(), predict(about.columns.map(features).flat()).outputs];
})(ROW)"""


@pytest.mark.parametrize(
    ("label", "changes"),
    [
        ("label: kind", []),
        ("label: kind, category_encoding: index", []),
        ("target: [price]", ["loss=mse", "data.normalize_targets=true", "model.layers.2.linear=1"]),
    ],
)
def test_the_fields_of_a_table_give_the_features_and_predictions_of_python(
    label: str, changes: list[str], browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    other = "price" if "kind" in label else "kind"
    lines = ["size,town,sold,rooms,kind,price"]
    for i in range(60):
        size = "" if i % 7 == 0 else f"{random.normal():.3f}"
        sold = "" if i % 9 == 0 else f"20{i % 20 + 10}-0{i % 9 + 1}-1{i % 10}"
        lines.append(f"{size},{['Ulm', 'Bonn'][i % 2]},{sold},{i % 5},{'ab'[i % 2]},{1000 * i}")
    Path("rows.csv").write_text("\n".join(lines))
    Path("table.yaml").write_text(TABLE.replace("LABEL", f"{label}, drop: [{other}]"))
    options = [text for change in changes for text in ("--set", change)]
    command("train", "table.yaml", "--device", "cpu", "--output-dir", "run", "-q", *options)
    trained = model_file.load(Path("run"))
    path = tmp_path / "demo.html"
    path.write_bytes(page_of(trained, trained.test_split()))
    assert_fits(browser, path)
    browser.run("ready")
    assert trained.encoder is not None
    images = inputs.of_rows(ROWS, trained).images
    expected = predictions(trained.network, trained.params, trained.statistics, images, "cpu")
    for i in range(len(images)):
        row = json.dumps({name: values[i] for name, values in ROWS.items()})
        features, outputs = browser.run(CHOOSE.replace("ROW", row))
        np.testing.assert_allclose(features, images[i].reshape(-1), rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(outputs, expected[i], rtol=1e-4)
    assert [row[0] for row in browser.run(SHOWN)] == list(trained.targets or trained.classes)
    assert not browser.errors()


TEXT = """
name: text
data: {path: book.txt, DATA, length: 12, test: 0.2, validation: 0, batch_size: 8}
model:
  layers:
    - embedding: {num_embeddings: 300, embedding_dim: 8}
    - lstm: {hidden_size: 8, output: all}
    - linear: 300
loss: cross_entropy
optimizer: {adam: {lr: 0.01}}
training: {epochs: 1}
"""


@pytest.mark.parametrize("data", ["unit: character", "unit: byte", "{unit: token, vocabulary: 300}"])
def test_a_text_gets_the_classes_and_probabilities_of_python(
    data: str, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("It's a wide, wide world: 1234 miles,\n\n  and more. Ünder trees we're happy.\n" * 20)
    Path("text.yaml").write_text(TEXT.replace("DATA", data.strip("{}")))
    command("train", "text.yaml", "--device", "cpu", "--eager", "--output-dir", "run", "-q")
    trained = model_file.load(Path("run"))
    path = tmp_path / "demo.html"
    path.write_bytes(page_of(trained))
    assert_fits(browser, path)
    browser.run("ready")
    following = sampling.next_class_of(trained, "cpu")
    for text in ("", "It's", " a world\n\n  and Ünder we're 12 trees"):
        classes = sampling.prompt_classes(trained, text)
        assert browser.run(f"classesOf({json.dumps(text)})") == classes.tolist()
        found = browser.run(f"following(classesOf({json.dumps(text)}))")
        np.testing.assert_allclose(found, np.exp(following(classes)), rtol=1e-4)
    browser.run("prompt.value = 'a w'; count.value = 5; write()")
    assert browser.run("written.textContent.startsWith('a w') && written.textContent.length > 3")
    if "character" in data:
        browser.run("prompt.value = '€'; write()")
        assert browser.run("status.textContent") == 'found "€", which the training\'s text does not have'
    assert not browser.errors()
