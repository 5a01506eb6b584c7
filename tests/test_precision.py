"""Rounded products: the rounding itself, which equations are rounded, and which devices accept such a config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import invoke
from training_runs import write_config

import adtrain as ad
from adtrain import config, ops, training
from adtrain.core.precision import DROPPED_BITS, rounded
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.passes import ALL

ROUNDED = pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
RNG = np.random.default_rng(0)
PRODUCTS = {"matmul", "conv2d", "conv2d_input_grad", "conv2d_weight_grad"}


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def nearest(x: np.ndarray, dropped: int) -> np.ndarray:
    """Round to the nearest number of the format by comparing distances in float64; ties go to the even number."""
    low = bits(x) & ~np.uint32((1 << dropped) - 1)
    high = low + np.uint32(1 << dropped)

    def size(pattern: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            found = np.abs(pattern.view(np.float32).astype(np.float64))
        return np.where(np.isinf(found), 2.0**128, found)  # the next number after the largest finite one

    below, above = np.abs(x.astype(np.float64)) - size(low), size(high) - np.abs(x.astype(np.float64))
    even = (low >> np.uint32(dropped)) % 2 == 0
    return np.where((below < above) | ((below == above) & even), low, high).view(np.float32)


@ROUNDED
def test_rounding_is_to_the_nearest_number_and_to_even_at_ties(precision: str) -> None:
    dropped = DROPPED_BITS[precision]
    high_bits = RNG.integers(0, 1 << (32 - dropped), 20_000, dtype=np.uint32) << np.uint32(dropped)
    half = 1 << (dropped - 1)
    ends = [0, 1, half - 1, half, half + 1, (1 << dropped) - 1]
    patterns = [high_bits + np.uint32(end) for end in ends] + [RNG.integers(0, 2**32, 50_000, np.uint32)]
    x = np.concatenate(patterns).view(np.float32)
    x = x[np.isfinite(x)]
    np.testing.assert_array_equal(bits(rounded(x, precision)), bits(nearest(x, dropped)))


@ROUNDED
def test_rounding_keeps_nan_infinity_and_signs(precision: str) -> None:
    nans = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    np.testing.assert_array_equal(bits(rounded(nans, precision)), bits(nans))
    ends = np.array([np.inf, -np.inf, 0.0, -0.0], np.float32)
    np.testing.assert_array_equal(bits(rounded(ends, precision)), bits(ends))
    largest = np.finfo(np.float32).max
    assert rounded(np.array([largest, -largest]), precision).tolist() == [np.inf, -np.inf]
    tiny = np.array([2.0**-149, 2.0**-126], np.float32)
    assert rounded(tiny, precision).tolist() == [0.0, 2.0**-126]


@ROUNDED
def test_rounding_a_view_rounds_its_elements(precision: str) -> None:
    x = RNG.normal(size=(4, 6)).astype(np.float32)
    np.testing.assert_array_equal(rounded(x.T[::2], precision), rounded(x, precision).T[::2])
    assert rounded(np.array(1.1, np.float32), precision).shape == ()
    assert rounded(x[:0], precision).shape == (0, 6)
    assert rounded(x, "full") is x


@ROUNDED
def test_products_and_their_derivatives_multiply_rounded_operands(precision: str) -> None:
    a, b, ct = (RNG.normal(size=s).astype(np.float32) for s in ((5, 7), (7, 4), (5, 4)))
    with ops.matmul_precision(precision):
        out, pullback = ad.vjp(ops.matmul, a, b)
    exact_a, exact_b, exact_ct = (rounded(x, precision).astype(np.float64) for x in (a, b, ct))
    da, db = pullback(ct)  # outside the block, but as precise as the forward product
    for found, expected in (
        (out, exact_a @ exact_b), (da, exact_ct @ exact_b.T), (db, exact_a.T @ exact_ct)
    ):  # fmt: skip
        np.testing.assert_allclose(found.numpy(), expected, rtol=2e-6, atol=2e-6)


@ROUNDED
def test_convolutions_and_their_derivatives_convolve_rounded_operands(precision: str) -> None:
    x, w, ct = (RNG.normal(size=s).astype(np.float32) for s in ((2, 4, 6, 5), (6, 2, 3, 3), (2, 6, 3, 3)))

    def convolved(x: Any, w: Any) -> Any:
        return ops.conv2d(x, w, stride=2, padding=1, groups=2)

    with ops.matmul_precision(precision):
        out, pullback = ad.vjp(convolved, x, w)
    exact, exact_pullback = ad.vjp(convolved, *(rounded(v, precision).astype(np.float64) for v in (x, w)))
    expected = exact_pullback(rounded(ct, precision).astype(np.float64))
    for a, b in zip((out, *pullback(ct)), (exact, *expected), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=5e-6, atol=5e-6)


def precisions(program: Program) -> set[str]:
    return {e.params["precision"] for e in program.equations if e.name in PRODUCTS}


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "matmul": (ops.matmul, (3, 4), (4, 5)),
    "many by one": (ops.matmul, (2, 3, 4), (4, 5)),
    "vectors": (ops.matmul, (4,), (4,)),
    "conv2d": (ops.conv2d, (1, 2, 4, 4), (3, 2, 2, 2)),
    "conv_transpose2d": (ops.conv_transpose2d, (1, 2, 4, 4), (2, 3, 2, 2)),
}


@ROUNDED
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_every_order_inherit_the_precision(precision: str, name: str) -> None:
    f, *shapes = FUNCTIONS[name]
    x, w = (RNG.normal(size=s).astype(np.float32) for s in shapes)

    def inside(x: Any, w: Any) -> Any:
        with ops.matmul_precision(precision):
            return ops.sum(ops.square(f(x, w)))

    def slope(x: Any, w: Any) -> Any:
        return sum(ops.sum(ops.square(g)) for g in ad.grad(inside, (0, 1))(x, w))

    for g in (inside, ad.grad(inside, (0, 1)), ad.grad(slope, (0, 1))):
        program = stage(g).program(x, w)
        assert precisions(program) == {precision}
        assert f"precision={precision}" in str(program)
    forward = stage(lambda x, w: ad.jvp(inside, (x, w), (x, w))).program(x, w)
    assert precisions(forward) == {precision}


def test_precision_blocks_nest_and_float64_is_not_rounded() -> None:
    single, double = np.ones((2, 2), np.float32), np.ones((2, 2))

    def several(x: Any, y: Any) -> Any:
        with ops.matmul_precision("tf32"):
            with ops.matmul_precision("bfloat16"):
                first = ops.matmul(x, x)
            return first, ops.matmul(x, x), ops.matmul(y, y), ops.adaptive_avg_pool2d(ops.reshape(x, (1, 1, 2, 2)), 2)

    found = [e.params["precision"] for e in stage(several).program(single, double).equations if "precision" in e.params]
    assert found == ["bfloat16", "tf32", "full", "full", "full"]
    assert precisions(stage(ops.matmul).program(single, single)) == {"full"}
    with pytest.raises(ad.OptionError, match="matmul_precision: found 'half', expected one of full, tf32, bfloat16"):
        ops.matmul_precision("half").__enter__()


def test_a_staged_function_is_retraced_for_another_precision() -> None:
    x = RNG.normal(size=(8, 8)).astype(np.float32)
    product = stage(lambda x: ops.matmul(x, x), ALL)
    full = product(x).numpy()
    with ops.matmul_precision("bfloat16"):
        np.testing.assert_array_equal(product(x).numpy(), ops.matmul(x, x).numpy())
        assert (product(x).numpy() != full).any()
    np.testing.assert_array_equal(product(x).numpy(), full)


def run(*arguments: str) -> Any:
    return invoke(*arguments, "--device", "cpu")


@ROUNDED
@pytest.mark.parametrize("command", ["train", "bench"])
def test_the_cpu_refuses_rounded_products_before_training(tmp_path: Path, precision: str, command: str) -> None:
    path = tmp_path / "rounded.yaml"
    path.write_text(config.dump(config.load(write_config(tmp_path), [f"training.precision={precision}"])))
    before = sorted(tmp_path.rglob("*"))
    result = run(command, str(path), *(("--output-dir", str(tmp_path / "run")) if command == "train" else ()))
    (line,) = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    lines = path.read_text().splitlines()
    (number,) = (i for i, text in enumerate(lines, 1) if "precision:" in text)
    column = lines[number - 1].index("precision:") + 1
    assert line == (
        f"adtrain: error: {path}:{number}:{column}: training.precision: found {precision}, expected float32 or float64 "
        "on the cpu: set one of them, or use a GPU (--device gpu)"
    )
    assert sorted(tmp_path.rglob("*")) == before


@ROUNDED
def test_the_step_uses_the_configs_precision(tmp_path: Path, precision: str) -> None:
    experiment = training.prepare(config.load(write_config(tmp_path), [f"training.precision={precision}"]))
    assert precisions(experiment.step_program(passes=())) == {precision}
    assert experiment.network.dtype == np.float32
    full = training.prepare(config.load(write_config(tmp_path)))
    assert precisions(full.step_program(passes=())) == {"full"}


def test_a_run_trained_on_a_gpu_is_evaluated_on_the_cpu_in_float32(tmp_path: Path) -> None:
    cfg = write_config(tmp_path)
    folder = tmp_path / "run"
    assert run("train", str(cfg), "--output-dir", str(folder)).exit_code == 0
    expected = json.loads(run("eval", str(folder), "--json").stdout)["test"]
    rounded_run = config.load(folder / "config.yaml", ["training.precision=tf32"])
    (folder / "config.yaml").write_text(config.dump(rounded_run))
    result = run("eval", str(folder), "--json")
    assert json.loads(result.stdout)["test"] == expected
    assert result.stderr == "trained in tf32, evaluated in float32: the cpu has no tf32\n"


@ROUNDED
def test_summary_names_the_precision_and_counts_the_same_work(tmp_path: Path, precision: str) -> None:
    def summary(*options: str) -> Any:
        return invoke("summary", str(write_config(tmp_path)), *options).stdout

    chosen = ("--set", f"training.precision={precision}")
    assert summary(*chosen).startswith(f"tiny: input 36, {precision}; ")
    full, found = (json.loads(summary("--json", *options)) for options in ((), chosen))
    assert (full["precision"], found["precision"]) == ("float32", precision)
    assert all(full[key] == found[key] for key in ("parameters", "layers", "forward", "backward", "update", "total"))
