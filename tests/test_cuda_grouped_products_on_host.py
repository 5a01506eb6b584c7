"""`gemm/grouped_bf16x3.cuh` and the launch after it, emulated on the CPU, against the reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host
from program_samples import for_gpu, names

from adtrain import config, ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.grouped_products import GROUPED_PRODUCTS, MAX_PRODUCTS
from adtrain.backends.cuda.forms.horizontal import is_product
from adtrain.cache import Cache
from adtrain.core.program import label
from adtrain.core.staging import stage
from adtrain.training.preparation import outline

TOLERANCE = 5e-7
"""The largest norm of the difference from the reference, divided by the norm of the reference."""


@pytest.mark.parametrize(
    ("multiprocessors", "lengths"),
    [
        pytest.param(  # a block begins and ends within tiles
            10, [(64, 132, 1056), (64, 49, 1037)], marks=pytest.mark.exhaustive
        ),
        (80, [(64, 64, 1030), (72, 33, 1055)]),  # more blocks than stages
    ],
)
def test_products_with_updates_are_right_wherever_blocks_divide_them(
    multiprocessors: int,
    lengths: Sequence[tuple[int, int, int]],
    tmp_path: Path,
    emulated_code: Cache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["adtrain.backends.cuda.forms.grouped_products"], "MIN_FLOPS", 1)
    target = H200._replace(multiprocessors=multiprocessors)
    rng = np.random.default_rng(0)
    drawn = [
        [rng.standard_normal(shape).astype(np.float32) for shape in ((k, m), (k, n), (m, n))] for m, n, k in lengths
    ]
    for a, _, _ in drawn:
        a[7, 5] = np.inf
    given = [x for three in drawn for x in three]

    def f(*given: Any) -> Any:
        threes = zip(given[::3], given[1::3], given[2::3], strict=True)
        momenta = [(0.9 * w + ops.matmul(a, b, transpose_a=True), w) for a, b, w in threes]
        updates = [(v, w - 0.5 * v) for v, w in momenta]
        # Two sums of columns: the first has its own blocks; the blocks of the second product add the other one.
        return updates, ops.sum(given[1], 0) * 2.0, 1.0 - ops.sum(given[3], 0)

    program = for_gpu(stage(f, ()).program(*given), target)
    assert names(program) == ["grouped_products"]
    (equation,) = program.equations
    known = dict(zip(program.inputs, given, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    found = Host(tmp_path, emulated_code, target).computed(equation, None, [known[v] for v in equation.inputs])
    with np.errstate(invalid="ignore"):
        momenta = [(0.9 * w + a.T.astype(float) @ b, w) for a, b, w in drawn]
        exact = [x for v, w in momenta for x in (v, w - 0.5 * v)]
    exact += [2 * given[1].sum(0, dtype=float), 1 - given[3].sum(0, dtype=float)]
    for x, expected in zip(found, exact, strict=True):
        held = np.isfinite(expected)
        np.testing.assert_array_equal(x[~held], expected[~held])
        assert np.linalg.norm(x[held] - expected[held]) <= TOLERANCE * np.linalg.norm(expected[held])


def test_two_groups_do_not_share_a_sum_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["adtrain.backends.cuda.forms.grouped_products"], "MIN_FLOPS", 1)
    given = [np.ones((1056, 64), np.float32) for _ in range(MAX_PRODUCTS + 4)]

    def f(*given: Any) -> Any:
        return [ops.matmul(x, x, transpose_a=True) for x in given], ops.sum(given[1], 0) * 2.0

    groups = [e for e in for_gpu(stage(f, ()).program(*given)).equations if e.form == GROUPED_PRODUCTS]
    assert sorted(sum(map(is_product, e.params["body"].equations)) for e in groups) == [4, MAX_PRODUCTS]


def test_beside_layer_norms_no_equation_reads_the_same_array_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["adtrain.backends.cuda.forms.grouped_products"], "MIN_FLOPS", 1)
    encoder = "{transformer_encoder_layer: {nhead: 2, dim_feedforward: 128, dropout: 0.0, norm_first: true}}"
    layers = f"model.layers=[{{patches: 7}}, {{linear: 64}}, {encoder}, mean, {{linear: 10}}]"
    step = outline(config.load("vit", [layers, "data.batch_size=128"])).step_program(passes=())
    equations = for_gpu(step).equations
    assert any(e.form == GROUPED_PRODUCTS for e in equations)
    for e in equations:
        assert len(set(e.inputs)) == len(e.inputs), label(e)
