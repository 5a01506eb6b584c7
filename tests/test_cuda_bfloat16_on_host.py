"""The kernel for products of operands that are bfloat16 in memory, emulated on the CPU, against the reference."""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from program_samples import bfloat16_gradients
from sweeps import spread

import adtrain as ad
from adtrain import ops, passes
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.codegen.loops import GROUPED_BFLOAT16
from adtrain.backends.cuda.forms.grouped_products import GroupedBfloat16Fusion
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.product_precision import store_bfloat16
from adtrain.core.kernel import CudaKernel
from adtrain.core.primitive import Trait
from adtrain.core.program import PRODUCT, Equation, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm.bfloat16 import MATRIX_TILES, Bfloat16Product, Bfloat16Tile, bfloat16_gemm
from adtrain.lowering.cuda.gemm.narrow import narrow_products
from adtrain.ops.channels_last import from_bfloat16_p, matmul_bfloat16_p, to_bfloat16_p
from adtrain.passes.fusion import FusionPass

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

FLAGS = tuple(product((False, True), repeat=2))
TOLERANCE = 5e-7
"""The largest norm of the difference from the reference, divided by the norm of the reference."""


def check(host: Host, tile: Bfloat16Tile, ta: bool, tb: bool, lengths: tuple[int, int, int, int], splits: int) -> None:
    target = H200._replace(multiprocessors=5)  # a block computes several tiles
    kernel = bfloat16_gemm(Bfloat16Product(target, lengths, tile, (ta, not tb), splits))
    assert len(kernel.launches) == 1 + (splits > 1)
    compare(host, kernel, ta, tb, lengths)


def compare(host: Host, kernel: CudaKernel, ta: bool, tb: bool, lengths: tuple[int, int, int, int]) -> None:
    batch, m, n, k = lengths
    rng = np.random.default_rng(n)
    shapes = ((batch, k, m) if ta else (batch, m, k), (batch, n, k) if tb else (batch, k, n))
    arrays = [to_bfloat16_p.reference(rng.standard_normal(shape, np.float32)) for shape in shapes]
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    out = Variable(ArrayType((batch, m, n), np.dtype(np.float32)), "gpu")
    params = {"transpose_a": ta, "transpose_b": tb, "precision": "bfloat16"}
    found = host.computed(Equation(matmul_bfloat16_p, inputs, params, (out,)), kernel, arrays)[0]
    a, b = (from_bfloat16_p.reference(x).astype(float) for x in arrays)
    expected = (a.swapaxes(1, 2) if ta else a) @ (b.swapaxes(1, 2) if tb else b)
    assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)


@pytest.mark.parametrize(("tile", "transposed"), spread(MATRIX_TILES, FLAGS))
def test_products_are_right(host: Host, tile: Bfloat16Tile, transposed: tuple[bool, bool]) -> None:
    check(host, tile, *transposed, (2, 136, 264, 104), 1)


def test_splits_of_k_are_added_and_few_columns_are_right(host: Host) -> None:
    check(host, MATRIX_TILES[-1], True, True, (1, 136, 10, 328), 3)


@pytest.mark.exhaustive
def test_tiles_that_do_not_fill_the_multiprocessors_are_split(host: Host) -> None:
    check(host, MATRIX_TILES[-1], False, False, (1, 264, 136, 200), 2)  # nine tiles on five multiprocessors


@pytest.mark.parametrize("transposed", FLAGS)
@pytest.mark.parametrize(("columns", "swapped"), [(8, False), (16, True)])
def test_products_of_few_columns_are_right(
    host: Host, transposed: tuple[bool, bool], columns: int, swapped: bool
) -> None:
    (ta, tb), rows, k = transposed, 88, 648
    m, n = (columns, rows) if swapped else (rows, columns)
    kernel = narrow_products(H200._replace(multiprocessors=8), [(m, n)], k, (ta, not tb))
    assert kernel is not None
    compare(host, kernel, ta, tb, (1, m, n, k))


def test_conversions_round_to_nearest_even_and_keep_nan_and_infinity() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0x7F800001], np.uint32)
    found = to_bfloat16_p.reference(bits.view(np.float32))
    np.testing.assert_array_equal(found, [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, 0x7FC0])


def test_kernels_of_a_fused_program_with_stored_operands_are_right(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epilogues load and store bfloat16."""
    monkeypatch.setattr(import_module("adtrain.backends.cuda.product_precision"), "MAX_FLOPS", 0)
    rng = np.random.default_rng(0)
    shapes = (40, 64), (64, 1032), (1032, 10), (1032,)
    arrays = [rng.standard_normal(shape, np.float32) / 8 for shape in shapes]

    program = stage(bfloat16_gradients, passes.SIMPLIFY).program(*map(ad.array, arrays))
    program = store_bfloat16(program, H200)
    for improve in (passes.fuse_loops, passes.remove_dead_code, passes.fuse_product):
        program = improve(program)
    known = dict(zip(program.inputs, arrays, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    names = set()
    for e in program.equations:
        inputs = [known[v] for v in e.inputs]
        expected = e.primitive.reference(*inputs, **e.params)
        known.update(zip(e.outputs, (expected,) if len(e.outputs) == 1 else expected, strict=True))
        if e.form == PRODUCT or e.has(Trait.MATMUL):
            launches = host.lowering.launches(e)
            names |= {launch.name for launch in launches if isinstance(launch, LaunchPlan)}
            for found, v in zip(host.computed(e, None, inputs), e.outputs, strict=True):
                x, y = (from_bfloat16_p.reference(a) if a.dtype == np.uint16 else a for a in (found, known[v]))
                assert np.linalg.norm(x - y) <= 1e-4 * np.linalg.norm(y)
    assert names == {"bfloat16_gemm", "narrow_products", "small_gemm"}


WIDE, NARROW = ((136, 264), (264, 136), (72, 200)), ((8, 264), (136, 8), (8, 200))


@pytest.mark.parametrize(("splits", "shapes"), [(1, WIDE), (2, WIDE), (None, NARROW)])
def test_weight_gradients_with_updates_in_one_launch_are_right(
    splits: int | None, shapes: tuple[tuple[int, int], ...], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`splits` is None for the kernel of few columns."""
    monkeypatch.setattr(import_module("adtrain.backends.cuda.product_precision"), "MAX_FLOPS", 0)
    rows, target = 520, H200._replace(multiprocessors=4)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((rows, n), np.float32) for shape in shapes for n in shape]
    weights = [rng.standard_normal(shape, np.float32) for shape in shapes]

    def f(*given: Any) -> Any:
        factors, weights = given[:6], given[6:]
        with ops.matmul_precision("bfloat16"):
            pairs = zip(factors[::2], factors[1::2], weights, strict=True)
            return [w - 0.1 * ops.matmul(a, b, transpose_a=True) for a, b, w in pairs]

    program = store_bfloat16(stage(f, passes.SIMPLIFY).program(*map(ad.array, [*arrays, *weights])), target)
    fusions = (
        passes.fuse_loops,
        passes.remove_dead_code,
        passes.fuse_product,
        FusionPass((GroupedBfloat16Fusion,), target),
    )
    for improve in fusions:
        program = improve(program)
    monkeypatch.setattr(host, "lowering", Lowering(target))
    known = dict(zip(program.inputs, [*arrays, *weights], strict=True))
    known |= {v: x.numpy() for v, x in program.constants.items()}
    together = 0
    for e in program.equations:
        own = [known[v] for v in e.inputs]
        if e.form == GROUPED_BFLOAT16:
            found = [k for k in host.lowering.candidates(e) if isinstance(k, CudaKernel)]
            kernels = [k for k in found if k.launches[0].definitions.get("SPLITS") == splits]
            together += kernels[0].launches[0].definitions["PRODUCTS"]
            known |= zip(e.outputs, host.computed(e, kernels[0], own), strict=True)
        elif e.form == PRODUCT:
            known |= zip(e.outputs, host.computed(e, None, own), strict=True)
        else:
            known[e.outputs[0]] = e.primitive.reference(*own, **e.params)
    assert together >= 2
    for a, b, w, out in zip(arrays[::2], arrays[1::2], weights, program.outputs, strict=True):
        x, y = (from_bfloat16_p.reference(to_bfloat16_p.reference(each)).astype(float) for each in (a, b))
        expected = w - 0.1 * (x.T @ y)
        assert np.linalg.norm(known[out] - expected) <= TOLERANCE * np.linalg.norm(expected)


def test_an_input_whose_sign_is_read_before_its_product_is_converted_first() -> None:
    def f(x: Any, w: Any) -> Any:
        positive = ops.where(ops.less(x, 0.0), 0.0, 1.0)
        with ops.matmul_precision("bfloat16"):
            return ops.matmul(x, w) + ops.sum(positive)

    x, w = (ad.array(np.ones((1024, 1024), np.float32)) for _ in range(2))
    program = store_bfloat16(stage(f, passes.SIMPLIFY).program(x, w), H200)
    names = [e.name for e in program.equations]
    assert names[:3] == ["to_bfloat16", "from_bfloat16", "less"]
