"""Exported C computes the same outputs as the network itself."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import c_programs
import numpy as np
import pytest
from composed_layers import OPERATIONS, Composed, Gated
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_networks import LAYERS, fitting, images, matrices, networks, samples, some_images, with_arrays

from adtrain import config, nn, ops
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.export import onnx_model
from adtrain.export.c import network, source
from adtrain.export.c.source import compiled
from adtrain.training import TrainedModel
from adtrain.training.preparation import outline
from adtrain.training.tasks import Multilabel, NextClass, Regression

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not c_programs.has("gcc"), reason="gcc is not installed"),
]

SANITIZE = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
IMAGES_ONLY = (
    nn.Conv2d, nn.ConvTranspose2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.BatchNorm2d, nn.Patches,
)  # fmt: skip
MATRICES_ONLY = (
    nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.PositionalEmbedding, nn.RNN, nn.LSTM, nn.GRU,
)  # fmt: skip
SHAPES: dict[type[nn.Module], st.SearchStrategy[nn.Shape]] = {
    **dict.fromkeys(IMAGES_ONLY, images),
    **dict.fromkeys(MATRICES_ONLY, matrices),
    nn.BatchNorm1d: st.one_of(st.tuples(st.integers(1, 6)), matrices),
}
CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(9, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3)
)
SMALL = nn.Sequential(nn.Linear(4), nn.BatchNorm1d(), nn.ReLU(), nn.Linear(3))
TOLERANCE = 2e-5


def check(
    trained: TrainedModel,
    path: Path | None = None,
    options: tuple[str, ...] = ("-O0",),
    compiler: tuple[str, ...] = ("gcc",),
    simd: bool = False,
    tolerance: float = TOLERANCE,
    runner: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
    batch: np.ndarray | None = None,
) -> None:
    batch, network = some_images(trained, 3) if batch is None else batch, trained.network
    outputs, _ = network.outputs(trained.params, trained.statistics, array(batch), nn.Mode(training=False))
    expected = network.task.predictions(outputs).numpy()
    with TemporaryDirectory() as folder:
        given = path or Path(folder, "net.c")
        found, classes = c_programs.outputs(trained, given, batch, compiler, options, simd, runner, extra)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    if not trained.targets:
        rows = found.reshape(3, -1, found.shape[-1])[:, -1]
        np.testing.assert_allclose(rows[np.arange(3), classes], rows.max(axis=-1))


def a_layer(kind: type[nn.Module], data: st.DataObject, seed: int) -> TrainedModel:
    shape = data.draw(SHAPES.get(kind, samples))
    layer = data.draw(fitting(kind, shape))
    assume(layer is not None and layer.output_shape(shape))
    return with_arrays(nn.Sequential(layer), shape, seed, loss="mse")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.kind())
@settings(max_examples=1)
@given(data=st.data(), seed=st.integers(0, 99), simd=st.booleans())
def test_a_layer_is_exported(kind: type[nn.Module], data: st.DataObject, seed: int, simd: bool) -> None:
    check(a_layer(kind, data, seed), simd=simd)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.kind())
@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 99), simd=st.booleans())
def test_a_layer_of_any_options_is_exported(kind: type[nn.Module], data: st.DataObject, seed: int, simd: bool) -> None:
    check(a_layer(kind, data, seed), simd=simd, options=SANITIZE)


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_a_hash_grid_is_exported(d: int) -> None:
    """Some levels have a row for each corner, others a hash; some points are outside the box."""
    grid = nn.HashGrid(3, features=3, log2_table_size=6, base_resolution=1, finest_resolution=20)
    trained = with_arrays(nn.Sequential(grid, nn.Linear(2)), (d,), loss="mse", scale=1)
    check(trained, options=SANITIZE, batch=np.random.default_rng(d).uniform(-1, 1, (3, 1, 1, d)).astype(np.float32))


@pytest.mark.parametrize("layer", [nn.LayerNorm(), nn.GroupNorm(2)], ids=lambda layer: layer.kind())
def test_exported_norms_of_equal_numbers_are_zero(layer: nn.Module) -> None:
    trained = with_arrays(nn.Sequential(layer), (40,), loss="mse", scale=1)
    check(trained, batch=np.full((3, 1, 1, 40), 100000.1, np.float32))


@settings(max_examples=3)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_network_of_any_layers_is_exported_and_touches_its_own_memory_only(data: st.DataObject, seed: int) -> None:
    shape = data.draw(samples)
    # Normalising nearly equal numbers amplifies rounding errors.
    check(with_arrays(data.draw(networks(shape)), shape, seed), options=SANITIZE, tolerance=1e-4)


@pytest.mark.exhaustive
@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 99), simd=st.booleans())
def test_a_network_of_any_layers_is_exported(data: st.DataObject, seed: int, simd: bool) -> None:
    shape = data.draw(samples)
    trained = with_arrays(data.draw(networks(shape)), shape, seed)
    check(trained, options=SANITIZE, tolerance=1e-4, simd=simd)


def test_an_embedding_is_exported_and_refuses_numbers_without_a_row(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(7, embedding_dim=4), nn.Flatten(), nn.Linear(2))
    trained = with_arrays(model, (3,), scale=1)
    trained = replace(trained, network=replace(trained.network, mean=(0.0,), std=(1.0,)))
    batch = np.array([[1, 0, 6], [6.5, 6, 2], [0, 7, 0], [0, -1, 0]], np.float32).reshape(-1, 1, 1, 3)
    outputs, _ = trained.network.outputs(trained.params, trained.statistics, array(batch[:2]), nn.Mode(training=False))
    found, returned = c_programs.outputs(trained, tmp_path / "net.c", batch, options=SANITIZE)
    np.testing.assert_allclose(found[:2], trained.network.task.predictions(outputs).numpy(), rtol=1e-5)
    assert returned.tolist() == [*found[:2].argmax(axis=1).tolist(), -1, -1]


@pytest.mark.parametrize("loss", sorted(nn.LOSSES))
def test_probabilities_match_the_loss(loss: str) -> None:
    check(with_arrays(SMALL, (5,), loss=loss))


@pytest.mark.parametrize("normalized", [False, True])
def test_numbers_are_written_in_original_units(normalized: bool) -> None:
    trained = with_arrays(SMALL, (5,), loss="mse")
    task = Regression((1.0, -2.0, 300.0), (0.5, 2.0, 40.0), normalized)
    check(replace(trained, network=replace(trained.network, task=task), targets=("x", "y", "z"), classes=()))


def test_labels_that_are_each_0_or_1_have_probabilities() -> None:
    trained = with_arrays(SMALL, (5,), loss="binary_cross_entropy_with_logits")
    check(replace(trained, network=replace(trained.network, task=Multilabel(3)), targets=("x", "y", "z"), classes=()))


@pytest.mark.parametrize("tied", [False, True])
def test_a_text_has_probabilities_at_each_position(tied: bool) -> None:
    """A tied weight is in the C twice: `linear` reads it in another layout than `embedding`."""
    embedding, layer = nn.Embedding(7, embedding_dim=4), nn.TransformerEncoderLayer(2, causal=True)
    model = nn.Sequential(embedding, layer, nn.Linear(7, tied=tied))
    trained = with_arrays(model, (5,), scale=1)
    task = NextClass(one_hot=False, predictions=ops.softmax, length=5)
    network = replace(trained.network, task=task, mean=(0.0,), std=(1.0,))
    batch = np.random.default_rng(0).integers(0, 7, (3, 1, 1, 5)).astype(np.float32)
    trained = replace(trained, network=network, classes=tuple("abcdefg"))
    check(trained, batch=batch)
    header = source.generate(trained, Path("net.c")).header
    assert "5 numbers: the index of each character, byte or token in net_labels" in header
    assert "5x7 probabilities: after each of them those of the next one" in header


def test_a_full_disk_is_an_error_that_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file = os.replace

    def full(source: Path, target: Path) -> None:
        if target.name == "net.c":
            raise OSError(28, "No space left on device")
        replace_file(source, target)

    trained, path = with_arrays(SMALL, (5,)), Path("net.c")
    files, about = source.generate(trained, path), network.interface(trained)
    monkeypatch.setattr(os, "replace", full)
    message = r"/net\.c: cannot be written \(No space left on device\)"
    with pytest.raises(AdtrainError, match=message), compiled(files, path, about):
        pass


def test_float32_data_are_not_rescaled() -> None:
    check(with_arrays(SMALL, (5,), scale=1))


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(1)), nn.Sequential(nn.Conv2d(1, kernel_size=1))])
def test_one_pixel_and_one_class_are_exported(model: nn.Sequential) -> None:
    check(with_arrays(model, (1, 1, 1)), options=SANITIZE)


@pytest.mark.parametrize(
    "name",
    ["lenet5", "lstm", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("resnet", "vit"))],
)
def test_a_packaged_network_is_exported(name: str) -> None:
    network = outline(config.load(name)).network
    check(with_arrays(network.model, network.input_shape), options=SANITIZE, tolerance=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("simd", [False, True])
def test_a_network_of_300_layers_is_exported(simd: bool) -> None:
    layers = [nn.Linear(20), nn.LayerNorm(), nn.Residual(nn.Tanh())] * 100
    check(with_arrays(nn.Sequential(*layers, nn.Linear(3)), (7,)), options=SANITIZE, tolerance=1e-3, simd=simd)


@pytest.mark.parametrize("name", ["my net-2.c", "3.c", "ñandú.c", "_x.c", "int.c", "'$(x)`;.c"])
def test_a_file_of_any_name_compiles(name: str, tmp_path: Path) -> None:
    check(with_arrays(SMALL, (5,)), tmp_path / name)


@pytest.mark.parametrize("name", ['a"b.c', "a\\b.c", "a\nb.c"])
def test_a_name_that_c_cannot_include_is_refused(name: str) -> None:
    with pytest.raises(AdtrainError, match="characters that #include cannot hold"):
        source.generate(with_arrays(SMALL, (5,)), Path(name))


def test_labels_of_any_characters_are_the_same_in_c(tmp_path: Path) -> None:
    labels = ('"; exit(1); /* ??/', "ünï\ncode\\")
    trained = replace(with_arrays(nn.Sequential(nn.Linear(2)), (2,)), classes=labels)
    c_programs.write(trained, tmp_path / "net.c")
    (tmp_path / "main.c").write_text(
        '#include <stdio.h>\n#include "net.h"\n'
        'int main(void) { printf("%s|%s|", net_labels[0], net_labels[1]); return 0; }\n'
    )
    c_programs.compile_c(["gcc"], tmp_path, "net.c", "main.c", "-o", "program", "-lm")
    done = subprocess.run([tmp_path / "program"], capture_output=True, check=True)
    assert tuple(done.stdout.decode().split("|")[:2]) == labels


def test_its_main_reads_pgm_files(tmp_path: Path) -> None:
    trained = with_arrays(CONVOLUTIONS, (1, 6, 5))
    c_programs.write(trained, tmp_path / "net.c")
    c_programs.compile_c(["gcc"], tmp_path, "-DNET_MAIN", "net.c", "-o", "program", "-lm")
    batch = some_images(trained, 2)
    for i, image in enumerate(batch):
        (tmp_path / f"{i}.pgm").write_bytes(b"P5\n# by hand\n5 6\n255\n" + image.tobytes())
    (tmp_path / "wrong.pgm").write_bytes(b"P5 6 5 255\n" + image.tobytes())
    done = subprocess.run(
        ["./program", "0.pgm", "1.pgm", "wrong.pgm", "none.pgm"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    outputs, _ = trained.network.outputs(trained.params, trained.statistics, array(batch), nn.Mode(training=False))
    rows = trained.network.task.predictions(outputs).numpy()
    names = ("one", "two", "2")
    assert done.stdout.splitlines() == [f"{i}.pgm: {names[row.argmax()]} {row.max():.4f}" for i, row in enumerate(rows)]
    assert done.stderr.splitlines() == [
        f"{name}.pgm: not a binary PGM file of 5 x 6 pixels" for name in ("wrong", "none")
    ]
    assert done.returncode == 2


@pytest.mark.skipif(not c_programs.has("clang"), reason="clang is not installed")
def test_clang_compiles_it_without_a_warning() -> None:
    check(with_arrays(CONVOLUTIONS, (2, 6, 7)), compiler=("clang",), simd=True)


@pytest.mark.parametrize("simd", [False, True])
def test_a_32_bit_program_computes_the_same(simd: bool, tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n")
    if subprocess.run(["gcc", "-m32", "empty.c"], cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("gcc makes no 32-bit programs (gcc-multilib)")
    options = ("-O2", "-m32", *(["-msse2", "-mfpmath=sse", "-Wno-psabi"] if simd else []))
    check(with_arrays(CONVOLUTIONS, (2, 6, 7)), options=options, simd=simd)


CORTEX_M = ("arm-none-eabi-gcc", "-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
QEMU = ("qemu-system-arm", "-M", "mps2-an386", "-nographic", "-semihosting", "-kernel")
STARTUP = """\
#include <stdint.h>
extern void _start(void);
static void reset(void) {
    *(volatile uint32_t *)0xE000ED88 |= 0xF << 20; /* enable the FPU */
    _start();
}
extern const void *const vectors[2];
__attribute__((section(".vectors"))) const void *const vectors[2] = {(void *)0x20400000, (void *)reset};
"""


@pytest.mark.skipif(not c_programs.has(CORTEX_M[0], QEMU[0]), reason=f"{CORTEX_M[0]} and {QEMU[0]} are not installed")
def test_a_cortex_m4_computes_the_same(tmp_path: Path) -> None:
    (tmp_path / "startup.c").write_text(STARTUP)
    extra = ("startup.c", "--specs=rdimon.specs", "-Wl,--section-start=.vectors=0")
    options = ("-O2", "-Wno-pedantic")
    trained = with_arrays(CONVOLUTIONS, (2, 6, 7))
    check(trained, tmp_path / "net.c", options, CORTEX_M, runner=QEMU, extra=extra)


def test_the_memory_is_stated_and_none_is_allocated(tmp_path: Path) -> None:
    files = source.generate(with_arrays(CONVOLUTIONS, (1, 6, 5)), tmp_path / "net.c")
    padded, filtered = 8 * 7, 9 * 6 * 5
    assert files.memory >= 4 * (padded + filtered)
    assert f"NET_MEMORY = {files.memory} /* bytes */" in files.header
    assert f"static float memory[{files.memory // 4}];" in files.source
    assert "alloc" not in files.source.replace("allocates nothing", "")


def test_weights_in_a_separate_file_give_the_same_outputs(tmp_path: Path) -> None:
    trained = with_arrays(CONVOLUTIONS, (1, 6, 5))
    files = source.generate(trained, tmp_path / "net.c", weights=tmp_path / "net.bin")
    assert files.weights is not None
    (tmp_path / "net.c").write_text(files.source)
    (tmp_path / "net.h").write_text(files.header)
    (tmp_path / "net.bin").write_bytes(files.weights)
    (tmp_path / "other.bin").write_bytes(b"x" + files.weights[1:])
    (tmp_path / "short.bin").write_bytes(files.weights[:-1])
    (tmp_path / "image.pgm").write_bytes(b"P5 5 6 255\n" + some_images(trained, 1).tobytes())
    c_programs.compile_c(["gcc"], tmp_path, *SANITIZE, "-DNET_MAIN", "net.c", "-o", "program", "-lm")

    def run(weights: str) -> tuple[str, str]:
        command = ["./program", weights, "image.pgm"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stdout, done.stderr

    printed = run("net.bin")
    (tmp_path / "inside").mkdir()
    rows, _ = c_programs.outputs(trained, tmp_path / "inside" / "net.c", some_images(trained, 1))
    assert printed[0].endswith(f" {rows.max():.4f}\n")
    for name in ("other.bin", "short.bin", "none.bin"):
        assert run(name) == ("", f"{name}: not the weights of this network\n")


def test_weights_that_overflowed_are_refused() -> None:
    trained = with_arrays(SMALL, (5,))
    trained.params["0"]["bias"] = array(np.full(4, np.nan, np.float32))
    for calibration in (None, some_images(trained, 2)):
        with pytest.raises(AdtrainError, match="weights are NaN or infinite"):
            source.generate(trained, Path("net.c"), calibration=calibration)


COMPOSED = list(OPERATIONS.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [0, 2, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in (1, 3))])
def test_layers_composed_of_operations_are_exported(first: int) -> None:
    """A quarter of the operations side by side, each with a product, so that its output has one shape."""
    branches = [nn.Sequential(Composed(*each), nn.Flatten(), nn.Linear(2)) for each in COMPOSED[first::4]]
    check(
        with_arrays(nn.Sequential(nn.Concat(*branches)), (4, 6), loss="mse", scale=1), options=SANITIZE, tolerance=1e-4
    )


def test_infinities_and_nan_are_exported_and_reduced_as_in_the_network() -> None:
    def found(x: Value) -> Value:
        column = np.array([0, 0, -np.inf, 0, 0, np.inf], np.float32)
        chosen = np.array([True, False, True, True, False, True])
        infinite = ops.logsumexp(ops.where(chosen, x, 0) + column, axis=1)
        with_nan = x + np.array([[0], [np.nan], [0], [0]], np.float32)
        extremes = ops.concatenate([ops.max(with_nan, axis=1), ops.min(with_nan, axis=1)], axis=1)
        return ops.concatenate([ops.exp(-infinite), ops.astype(ops.isnan(extremes), "float32")], axis=1)

    check(with_arrays(nn.Sequential(Composed(found, (18,))), (4, 6), loss="mse", scale=1), options=SANITIZE)


def test_nan_is_larger_than_every_number_as_in_the_network() -> None:
    """In positions of maxima, in orders, in windows, and in the class that the function returns."""
    nan = np.zeros((4, 6), np.float32)
    nan[0, 3] = nan[1, 2] = nan[1, 4] = nan[2, 0] = nan[3, 5] = np.nan

    def found(x: Value) -> Value:
        x = x + nan
        orders = [ops.argsort(x, axis=2), ops.argsort(x, axis=2, descending=True), ops.argmax(x, axis=2)[:, :, None]]
        pooled = [ops.max_pool1d(x, 2), ops.max_pool1d(x, 2, return_indices=True)[1]]
        return ops.concatenate([ops.astype(each, "float32") for each in (*orders, *pooled)], axis=2)

    trained = with_arrays(nn.Sequential(Composed(found, (4, 19))), (4, 6), loss="mse", scale=1)
    check(replace(trained, targets=("value",) * 19, classes=()), options=SANITIZE)


def test_the_class_of_outputs_with_nan_is_that_of_the_first(tmp_path: Path) -> None:
    layer = Composed(lambda x: x + np.array([0, np.nan, 9, np.nan], np.float32), (4,))
    trained = with_arrays(nn.Sequential(layer), (4,), loss="binary_cross_entropy_with_logits", scale=1)
    _, classes = c_programs.outputs(trained, tmp_path / "net.c", some_images(trained, 2), options=SANITIZE)
    assert classes.tolist() == [1, 1]


def test_a_composed_layer_with_weights_is_exported() -> None:
    check(with_arrays(nn.Sequential(Gated(3), nn.Flatten(), nn.Linear(2)), (4, 6)), options=SANITIZE)


def test_the_comments_name_each_layer_in_order() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, kernel_size=3, padding=1), nn.ReLU(), nn.Residual(nn.Sequential(nn.BatchNorm2d(), nn.ReLU())),
        nn.Dropout(0.5), nn.Flatten(), nn.Linear(2),
    )  # fmt: skip
    text = source.generate(with_arrays(model, (1, 6, 5)), Path("net.c")).source
    body = text[text.index("int net_predict(") : text.index("return argmax")]
    assert re.findall(r"^    /\* (.*) \*/$", body, re.MULTILINE) == [
        "input: 1x6x5, normalised",
        "0 conv2d: 1x6x5 -> 4x6x5, 40 parameters",
        "1 relu: 4x6x5 -> 4x6x5",
        "2.body.0 batch_norm2d: 4x6x5 -> 4x6x5, 8 parameters",
        "2.body.1 relu: 4x6x5 -> 4x6x5",
        "2 residual",
        "3 dropout: 4x6x5 -> 4x6x5",
        "4 flatten: 4x6x5 -> 120",
        "5 linear: 120 -> 2, 242 parameters",
        "probabilities",
    ]


def test_an_operation_without_c_is_refused_with_the_name_of_its_layer() -> None:
    layer = Composed(lambda x: ops.astype(ops.astype(x, "int32") @ np.eye(5, dtype="int32"), "float32"), (5,))
    with pytest.raises(AdtrainError, match=r"layer 1\.body: composed: matmul_integers has no C"):
        source.generate(with_arrays(nn.Sequential(nn.Tanh(), nn.Residual(layer)), (5,)), Path("net.c"))


@pytest.mark.parametrize(
    ("name", "function"), {"linear": lambda x: x @ np.ones(5), "logsumexp": lambda x: ops.logsumexp(x, axis=2)}.items()
)
def test_an_operation_of_float64_that_c_has_in_float_is_refused(name: str, function: Callable[[Value], Value]) -> None:
    double = Composed(lambda x: ops.astype(x, "float64"), (4, 5))
    single = Composed(lambda x: ops.astype(function(x), "float32"), (4,))
    with pytest.raises(AdtrainError, match=rf"composed: {name} of float64 has no C"):
        source.generate(with_arrays(nn.Sequential(double, single), (4, 5), loss="mse"), Path("net.c"))


def test_attention_with_a_mask_is_refused_with_the_name_of_its_layer() -> None:
    layer = Composed(lambda x: ops.attention(x, x, x, mask=x[..., 0] > 0), (4, 5))
    with pytest.raises(AdtrainError, match=r"composed: attention with a mask, documents or dropout has no C"):
        source.generate(with_arrays(nn.Sequential(nn.Tanh(), layer, nn.Flatten(), nn.Linear(2)), (4, 5)), Path("net.c"))


@pytest.mark.parametrize("take", [ops.take, ops.take_along_axis])
def test_a_computed_index_out_of_range_is_refused_by_the_function(tmp_path: Path, take: Callable[..., Any]) -> None:
    layer = Composed(lambda x: take(np.arange(4, dtype="float32"), ops.astype(x[:, 0], "int32"), axis=0), ())
    model = nn.Sequential(layer, nn.Reshape((1,)), nn.Linear(2))
    trained = with_arrays(model, (1,), loss="mse", scale=1)
    trained = replace(trained, network=replace(trained.network, mean=(0.0,), std=(1.0,)))
    batch = np.array([3, 4, 1], np.float32).reshape(-1, 1, 1, 1)
    _, returned = c_programs.outputs(trained, tmp_path / "net.c", batch, options=SANITIZE)
    assert (returned >= 0).tolist() == [True, False, True]


def test_the_programs_of_the_document_compile_and_run(tmp_path: Path) -> None:
    """With a network that has the names of the document's."""
    document = Path(__file__).parents[1] / "docs" / "how-to" / "export-c.md"
    predict, train = re.findall(r"^```c\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
    c_programs.write(with_arrays(CONVOLUTIONS, (1, 28, 28)), tmp_path / "net.c")
    (tmp_path / "main.c").write_text(predict)
    c_programs.compile_c(["gcc"], tmp_path, "main.c", "net.c", "-o", "program", "-lm")
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"(one|two|2) with \d+\.\d%\n", done.stdout)
    header = "#include <stdint.h>\nenum { NET_BATCH = 2, NET_INPUTS = 3 };\n"
    header += "void net_train(const uint8_t *images, const int64_t *labels, float *loss);\n"
    (tmp_path / "net.h").write_text(header)
    (tmp_path / "train.c").write_text(train)
    c_programs.compile_c(["gcc"], tmp_path, "-c", "train.c")


def test_the_same_network_gives_the_same_text() -> None:
    first, second = (source.generate(with_arrays(CONVOLUTIONS, (1, 6, 5)), Path("net.c")) for _ in range(2))
    assert (first.source, first.header) == (second.source, second.header)


@pytest.mark.parametrize(
    ("name", "data", "example"),
    [
        ("mlp", {}, "image"),
        ("mlp", {"dataset": None, "path": "a.csv"}, "row"),
        ("mlp", {"dataset": None, "path": "a.npz"}, "example"),
        ("poisson", {}, "point"),
        ("char-gpt", {}, "text"),
    ],
)
def test_the_header_and_the_input_of_onnx_say_what_an_example_is(name: str, data: dict[str, Any], example: str) -> None:
    trained = with_arrays(nn.Sequential(nn.Flatten(), nn.Linear(3)), (2, 1, 1))
    overrides = ["data.path=book.txt"] if name == "char-gpt" else []
    cfg = config.load(name, overrides)
    trained = replace(trained, config=cfg.changed("data", **data) if data else cfg)
    header = source.generate(trained, Path("net.c")).header
    assert f"net_predict(const float *{example}," in header.replace("uint8_t", "float")
    assert f"*{example}s, size_t count" in header
    assert ("image" in header) == (example == "image")
    inputs = {"text": "sequences"}.get(example, f"{example}s")
    assert list(onnx_model.signature(trained).inputs) == [inputs]
