"""Passes for layers on sequences: flattened rows, sums of columns, chains of products on few rows, long products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host
from program_samples import ON_GPU, everywhere, for_gpu, names

import adtrain as ad
from adtrain import config, ops, passes
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms import column_sum
from adtrain.backends.cuda.forms.horizontal import MAX_K
from adtrain.backends.cuda.forms.row_products import ROWS
from adtrain.backends.cuda.lower import Lowering
from adtrain.cache import Cache
from adtrain.core.kernel import Target
from adtrain.core.program import Equation, Program, body_of, label
from adtrain.core.staging import evaluate, stage
from adtrain.training.preparation import outline

TOLERANCE = 3e-6
"""Of the norm of the difference over the norm."""
SMALL = Target((9, 0), 6, 227 << 10)
"""A GPU with few multiprocessors: few rows are enough for it."""
WIDTH, HIDDEN, HEADS = 32, 64, 2


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


def traced(f: Callable[..., Any], arrays: Sequence[np.ndarray]) -> Program:
    return stage(f, passes.SIMPLIFY).program(*arrays)


def values(program: Program, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [v.numpy() for v in evaluate(program, [ad.array(x) for x in arrays])]


def linear(x: Any, w: Any, b: Any) -> Any:
    """A linear layer on sequences."""
    length = x.shape[-2]
    return ops.reshape(ops.matmul(ops.reshape(x, (-1, x.shape[-1])), w, transpose_b=True), (-1, length, len(w))) + b


def encoder(x: Any, *w: Any, causal: bool = False) -> Any:
    """A layer of a transformer: attention and two linear layers, each behind a norm and beside a residual sum."""
    scale, shift, qkv, qkv_bias, out, out_bias, up, up_bias, down, down_bias = w

    def norm(x: Any) -> Any:
        return ops.layer_norm(x, WIDTH, scale, shift)

    x = x + linear(ops.self_attention(linear(norm(x), qkv, qkv_bias), HEADS, causal=causal), out, out_bias)
    return x + linear(ops.gelu(linear(norm(x), up, up_bias)), down, down_bias)


def encoder_gradients(x: Any, *w: Any, causal: bool = False) -> Any:
    return ad.grad(lambda x, *w: ops.sum(ops.square(encoder(x, *w, causal=causal))), tuple(range(len(w) + 1)))(x, *w)


def encoder_arguments(examples: int, length: int) -> list[np.ndarray]:
    shapes = [(WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    shapes += [(HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,)]
    weights = [drawn(*shape, seed=i) / np.float32(np.sqrt(shape[-1])) for i, shape in enumerate(shapes)]
    return [drawn(examples, length, WIDTH), *weights]


def step(name: str, *overrides: str) -> Program:
    return outline(config.load(name, overrides)).step_program(passes=ON_GPU)


def test_flattened_rows_give_the_same_bits() -> None:
    arrays = encoder_arguments(5, 7)
    program = traced(encoder_gradients, arrays)
    flat = passes.flatten_rows(program)
    for found, expected in zip(values(flat, arrays), values(program, arrays), strict=True):
        # A sum over the rows of a matrix is that over the leading axes of sequences, in another order.
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * abs(expected).max())
    kept = [e for e in flat.equations if any(len(v.type.shape) > 2 for v in (*e.inputs, *e.outputs))]
    assert {e.name for e in kept} <= {"reshape", "self_attention", "self_attention_grad", "broadcast_to"}


@pytest.mark.parametrize("shape", [(5, 1, 4), (1, 5, 4), (5, 1, 4, 4)])
def test_rows_of_sequences_with_axes_of_length_1_keep_their_values(shape: tuple[int, ...]) -> None:
    def f(x: Any, w: Any) -> Any:
        y = ops.reshape(ops.matmul(ops.reshape(x, (-1, 4)), w), shape)
        found = [ops.sum(y, axis) for axis in range(len(shape))]
        turned = ops.transpose(y, (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2))
        return [*found, ops.sum(y, (0, 1)), ops.logsumexp(y, -1), ops.flip(y, 1), turned]

    arrays = [drawn(*shape), drawn(4, 4)]
    program = traced(f, arrays)
    for found, expected in zip(values(passes.flatten_rows(program), arrays), values(program, arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_rows_that_a_gather_feeds_keep_their_shape() -> None:
    def f(table: Any, at: Any, w: Any) -> Any:
        x = ops.take(table, at, axis=0) * 2.0
        return ops.matmul(ops.reshape(x, (-1, x.shape[-1])), w)

    program = passes.flatten_rows(traced(f, [drawn(9, 4, 6), np.array([3, 1]), drawn(6, 5)]))
    assert [e.outputs[0].type.shape for e in program.equations if e.name == "mul"] == [(2, 4, 6)]


def test_a_step_of_a_vision_transformer_is_twelve_launches() -> None:
    program = step("vit")
    launches = [e for e in program.equations if e.name != "reshape"]
    assert len(launches) == 12
    chains = [e for e in launches if e.name == "row_products"]
    assert sum(label(e).count("self_attention") for e in chains) >= 2
    inside = [e.name for chain in chains for e in everywhere(body_of(chain))]
    assert inside.count("self_attention") == inside.count("self_attention_grad") == 4
    assert [e.name for e in everywhere(launches[-1].params["body"])].count("column_sum") == 36


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("examples", "length", "causal"),
    [
        (4, 16, False),
        pytest.param(16, 4, False, marks=pytest.mark.exhaustive),
        pytest.param(8, 16, True, marks=pytest.mark.exhaustive),
    ],
)
def test_chains_of_a_transformer_match_the_reference(
    examples: int, length: int, causal: bool, small_host: Host
) -> None:
    arrays = encoder_arguments(examples, length)

    def f(*arrays: Any) -> Any:
        return encoder_gradients(*arrays, causal=causal)

    program = for_gpu(traced(f, arrays), SMALL)
    chains = [e for e in program.equations if e.name == "row_products"]
    few = examples * length <= ROWS * SMALL.multiprocessors
    assert ("self_attention_grad" in names(body_of(chains[-1]))) is few
    check_launches(small_host, program, arrays)


@pytest.mark.parametrize("patch", [2, 3])
def test_gathered_images_are_stored_as_patches(patch: int, small_host: Host) -> None:
    size = 4 * patch

    def f(images: Any, at: Any) -> Any:
        x = ops.reshape(ops.take(images, at, axis=0) * 0.5, (-1, 4, patch, 4, patch))
        return ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4)), (-1, patch * patch))

    arrays = [drawn(7, size, size), np.arange(200) * 3 % 7]
    program = for_gpu(traced(f, arrays))
    assert "gather" in names(program)
    assert "transpose" not in names(program)
    check_launches(small_host, program, arrays)


@pytest.mark.parametrize("length", [16, 4])
def test_positions_are_added_to_sequences_inside_a_chain(length: int, small_host: Host) -> None:
    def f(x: Any, positions: Any, w: Any) -> Any:
        return ops.matmul(ops.reshape(ops.relu(x + positions), (-1, x.shape[-1])), w)

    arrays = [drawn(5 * ROWS // length, length, 32), drawn(length, 32), drawn(32, 64)]
    program = for_gpu(traced(f, arrays), SMALL)
    assert names(program) == ["row_products"]
    check_launches(small_host, program, arrays)


def test_products_of_infinite_rows_are_infinite_or_nan(small_host: Host) -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        return ops.matmul(ops.relu(ops.matmul(x, w)), v, transpose_b=True)

    x, w, v = drawn(4 * ROWS, 32), drawn(32, 64), drawn(32, 64)
    x[3, 5], x[20, 1], w[7, 9] = np.inf, np.nan, 1e38
    program = for_gpu(traced(f, [x, w, v]), SMALL)
    (chain,) = program.equations
    assert chain.name == "row_products"
    with np.errstate(all="ignore"):
        (expected,) = values(program, [x, w, v])
    (found,) = small_host.computed(chain, None, [x, w, v])
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


@pytest.mark.parametrize("rows", [ROWS * 2, ROWS * 7, ROWS * 4 + 1])
def test_too_few_or_too_many_rows_are_no_chain(rows: int) -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        return ops.matmul(ops.relu(ops.matmul(x, w)), v)

    program = for_gpu(traced(f, [drawn(rows, 32), drawn(32, 64), drawn(64, 32)]), SMALL)
    assert "row_products" not in names(program)


@pytest.mark.parametrize("columns", [512, 544, 1024])
def test_a_chain_has_products_of_which_a_block_computes_all_columns(columns: int) -> None:
    """A block has 16 warps, each for 32 columns."""

    def f(x: Any, w: Any, v: Any) -> Any:
        return ops.relu(ops.matmul(ops.relu(ops.matmul(x, w)), v))

    program = for_gpu(traced(f, [drawn(2048, 64), drawn(64, 32), drawn(32, columns)]))
    assert names(program) == ["row_products", *(["product"] if columns > 512 else [])]
    assert all(Lowering(H200).launches(e) for e in program.equations)


@pytest.mark.parametrize("width", [80, 128])
def test_a_chain_of_many_rows_has_narrow_products(width: int) -> None:
    """Its blocks have 8 warps, each for 32 columns."""

    def f(x: Any, w: Any, b: Any) -> Any:
        return ops.self_attention(linear(x, w, b), width // 16)

    program = for_gpu(traced(f, [drawn(512, 8, 32), drawn(3 * width, 32), drawn(3 * width)]))
    assert all(Lowering(H200).launches(e) for e in program.equations if not e.is_view)


@pytest.mark.parametrize(("rows", "columns"), [(2048, 64), (1100, 100), (300, 1000), (16384, 8)])
def test_sums_of_columns_match_the_reference(rows: int, columns: int, small_host: Host) -> None:
    def f(x: Any, y: Any, w: Any) -> Any:
        return w - 0.1 * ops.sum(x * y, 0), ops.exp(ops.sum(x, 0) * 1e-3), ops.sum(y, 0)

    arrays = [drawn(rows, columns), drawn(rows, columns, seed=1), drawn(columns)]
    program = for_gpu(traced(f, arrays))
    (launch,) = program.equations
    assert names(launch.params["body"]) == ["column_sum"] * 3
    check_launches(small_host, program, arrays)


@pytest.mark.parametrize(("shape", "others"), [((80, 16, 64), [(80, 1, 64), (16, 1)]), ((700, 20, 6), [(20, 6), (6,)])])
def test_sums_of_columns_of_broadcasts_match_the_reference(
    shape: tuple[int, ...], others: list[tuple[int, ...]], small_host: Host
) -> None:
    def f(x: Any, w: Any, *ys: Any) -> Any:
        return [w - 0.1 * ops.sum(x * y, 0) for y in ys]

    arrays = [drawn(*shape), drawn(shape[-1]), *(drawn(*other) for other in others)]
    program = for_gpu(traced(f, arrays))
    assert names(program) == ["horizontal"]
    assert names(program.equations[0].params["body"]) == ["column_sum"] * len(others)
    check_launches(small_host, program, arrays)


@pytest.mark.parametrize(("rows", "launches"), [(2048, 2), (1021, 1)])
def test_blocks_divide_the_rows_of_a_long_sum_of_few_columns(rows: int, launches: int, small_host: Host) -> None:
    def f(x: Any, y: Any, w: Any) -> Any:
        return w - 0.1 * ops.sum(x * y, 0)

    arrays = [drawn(rows, 100), drawn(rows, 100, seed=1), drawn(100)]
    program = for_gpu(traced(f, arrays))
    assert names(program) == ["column_sum"]
    assert len(small_host.lowering.launches(program.equations[0])) == launches
    check_launches(small_host, program, arrays)


@pytest.fixture
def long_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of few rows are too long to share a launch."""
    monkeypatch.setattr(column_sum, "MAX_SHARED_ROWS", 256)


@pytest.mark.parametrize(("rows", "columns"), [(1100, 64), (2048, 100), (700, 128), (513, 256)])
@pytest.mark.usefixtures("long_sums")
def test_long_sums_that_read_the_same_rows_are_one_kernel(rows: int, columns: int, small_host: Host) -> None:
    def f(x: Any, y: Any, w: Any) -> Any:
        return w - 0.1 * ops.sum(x * y, 0), ops.sum(ops.square(x) * y, 0), ops.exp(ops.sum(x, 0) * 1e-3) * w

    arrays = [drawn(rows, columns), drawn(rows, columns, seed=1), drawn(columns)]
    program = for_gpu(traced(f, arrays))
    assert names(program) == ["column_sum"]
    check_launches(small_host, program, arrays)


@pytest.mark.usefixtures("long_sums")
def test_long_sums_that_read_the_same_rows_through_reshapes_are_one_kernel(small_host: Host) -> None:
    """The gradients of a mixture by means and scales."""

    def f(x: Any, means: Any, scales: Any, weights: Any) -> Any:
        z = (x[:, None] - means) * scales
        weighted = z * weights[:, :, None]
        return ops.sum(weighted, 0), ops.sum(weighted * z, 0) * scales

    arrays = [drawn(1400, 8), drawn(12, 8), drawn(12, 8, seed=1), drawn(1400, 12)]
    program = for_gpu(traced(f, arrays))
    assert sorted(names(program)) == ["column_sum", "reshape", "reshape"]
    check_launches(small_host, program, arrays)


@pytest.mark.parametrize(
    ("f", "sums"),
    [
        (lambda x, y, _: (ops.sum(ops.exp(x), 0), ops.sum(ops.exp(y), 0)), [1, 1]),  # of different rows
        (lambda x, y, z: (ops.sum(x * y, 0), ops.sum(z * y[:, :1], 0)), [1, 1]),  # a column in common
        (lambda x, y, _: (t := ops.sum(x * y, 0), ops.sum(x * t, 0)), [1, 1]),  # one needs the other
        (lambda x, y, _: [ops.sum(x**k * y, 0) for k in range(2, 7)], [1, 4]),  # more than MAX_SUMS
    ],
)
@pytest.mark.usefixtures("long_sums")
def test_other_long_sums_are_kernels_of_their_own(f: Callable[..., Any], sums: list[int]) -> None:
    program = for_gpu(traced(f, [drawn(1100, 64, seed=i) for i in range(3)]))
    kernels = [body_of(e).equations for e in program.equations if e.name == "column_sum"]
    assert sorted(len([e for e in body if e.name == "sum"]) for body in kernels) == sums


def test_long_weight_gradients_share_a_launch_where_they_fill_the_gpu() -> None:
    def f(x: Any, *ys: Any) -> Any:
        return [ops.matmul(x, y, transpose_a=True) for y in ys]

    def launches(count: int) -> list[Equation]:
        arrays = [drawn(2 * MAX_K, 128), *(drawn(2 * MAX_K, 256, seed=i) for i in range(count))]
        return list(for_gpu(traced(f, arrays)).equations)

    assert len(launches(2)) == 2  # 2 x 4 x 8 tiles of 32 x 32
    (shared,) = launches(5)
    assert shared.name == "horizontal"
    assert 5 * 4 * 8 >= H200.multiprocessors > 2 * 4 * 8


@pytest.mark.exhaustive
def test_long_products_of_a_launch_match_the_reference(small_host: Host) -> None:
    def f(x: Any, y: Any, z: Any) -> Any:
        return ops.matmul(x, y, transpose_a=True), ops.matmul(x, z, transpose_a=True)

    arrays = [drawn(MAX_K + 48, 64), drawn(MAX_K + 48, 96), drawn(MAX_K + 48, 49)]
    program = for_gpu(traced(f, arrays), SMALL)
    assert names(program) == ["horizontal"]
    check_launches(small_host, program, arrays)


def check_launches(host: Host, program: Program, arrays: Sequence[np.ndarray]) -> None:
    """Compares each launch of a Program with the reference on the same arguments."""
    known = dict(zip(program.inputs, arrays, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    for e in program.equations:
        own = [known[v] for v in e.inputs]
        expected = [v.numpy() for v in evaluate(Program(e.inputs, {}, (e,), e.outputs), [ad.array(x) for x in own])]
        known |= dict(zip(e.outputs, expected, strict=True))
        if host.lowering.launches(e):
            for v, x in zip(e.outputs, host.computed(e, None, own), strict=True):
                error = np.linalg.norm(np.subtract(x, known[v], dtype=np.float64))
                assert error <= TOLERANCE * np.linalg.norm(known[v].astype(np.float64)), f"{label(e)} {v.type}"


@pytest.fixture(scope="module")
def small_host(tmp_path_factory: pytest.TempPathFactory, emulated_code: Cache) -> Host:
    return Host(tmp_path_factory.mktemp("host"), emulated_code, SMALL)
