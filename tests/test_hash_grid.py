"""The hash encoding: against PyTorch, against functions that it represents exactly, and its errors."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from torch_fields import hash_grid

import adtrain as ad
from adtrain import ops
from adtrain.ops.hash_grid import grid_levels

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs_torch


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("d", [2, 3, 4])
def test_values_first_and_second_derivatives_are_those_of_pytorch(d: int, jit: bool) -> None:
    rng = np.random.default_rng(d)
    sizes: tuple[tuple[int, ...], int] = (1, 3, 11), 64
    _, rows = grid_levels(d, *sizes)
    x, w = rng.uniform(0, 1, (7, d)), rng.normal(size=(rows, 2))
    shift, turn = rng.normal(size=x.shape), rng.normal(size=w.shape)

    def loss(f: Any, sin: Any, x: Any, w: Any) -> Any:
        return sin(f(x, w, *sizes)).sum()

    def second(x: Any, w: Any) -> Any:
        value, (gx, gw) = ad.value_and_grad(lambda x, w: loss(ops.hash_grid, ops.sin, x, w), argnums=(0, 1))(x, w)
        return (gx * shift).sum() + (gw * turn).sum(), (value, gx, gw)

    f = ad.value_and_grad(second, argnums=(0, 1), has_aux=True)
    (_, first), found = (ad.jit(f) if jit else f)(ad.array(x), ad.array(w))
    tx, tw = (torch.tensor(a, requires_grad=True) for a in (x, w))
    value = loss(hash_grid, torch.sin, tx, tw)
    gx, gw = torch.autograd.grad(value, (tx, tw), create_graph=True)
    expected = torch.autograd.grad((gx * torch.tensor(shift)).sum() + (gw * torch.tensor(turn)).sum(), (tx, tw))
    for mine, theirs in zip((*first, *found), (value, gx, gw, *expected), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.detach().numpy(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_a_level_without_collisions_represents_linear_functions_and_its_gradients_their_slopes(d: int) -> None:
    resolution, slopes = 3, np.arange(1.0, d + 1)
    corners = np.array(list(product(range(resolution + 1), repeat=d)))[:, ::-1] / resolution
    x = ad.array(np.random.default_rng(0).uniform(0.01, 0.99, (9, d)))

    def f(x: ad.Value) -> ad.Value:
        return ops.hash_grid(x, (corners @ slopes)[:, np.newaxis], (resolution,), 256)

    np.testing.assert_allclose(f(x).numpy()[:, 0], x.numpy() @ slopes, rtol=1e-12)
    np.testing.assert_allclose(ad.grad(lambda x: f(x).sum())(x).numpy(), np.tile(slopes, (9, 1)), rtol=1e-12)


def test_points_outside_have_the_features_of_the_nearest_point_of_the_box_and_no_slope() -> None:
    table = np.random.default_rng(0).normal(size=(9, 2))

    def f(x: Any) -> ad.Value:
        return ops.hash_grid(x, table, (2,), 16)

    outside, nearest = np.array([[-3.0, 0.4], [1.5, 7.0]]), np.array([[0.0, 0.4], [1.0, 1.0]])
    np.testing.assert_array_equal(f(outside).numpy(), f(nearest).numpy())
    slopes = ad.grad(lambda x: f(x).sum())(ad.array(outside)).numpy()
    assert (slopes == 0).tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("points", "table", "resolutions", "size", "error"),
    [
        ((3, 5), (9, 2), (2,), 16, "found points of 5 coordinates, expected 1 to 4"),
        ((3,), (9, 2), (2,), 16, r"found shapes \(3,\) and \(9, 2\), expected points \(N, d\), table \(rows, F\)"),
        ((3, 2), (8, 2), (2,), 16, "found a table of 8 rows, expected 9 for these levels"),
        ((3, 2), (9, 2), (2,), 12, "found table_size 12, expected a power of two from 2 to 2^32"),
        ((3, 2), (9, 2), (0,), 16, r"found resolutions \[0\], expected some from 1 to 16777216"),
        ((3, 2), (9, 2), (), 16, r"found resolutions \[\], expected some from 1 to 16777216"),
    ],
)
def test_wrong_shapes_are_refused(
    points: tuple[int, ...], table: tuple[int, ...], resolutions: tuple[int, ...], size: int, error: str
) -> None:
    with pytest.raises(ad.ShapeError, match="^hash_grid: " + error.replace("^", r"\^") + "$"):
        ops.hash_grid(np.zeros(points), np.zeros(table), resolutions, size)


def test_points_and_table_of_two_types_are_refused() -> None:
    with pytest.raises(ad.DTypeError, match=r"found float32 and float64, expected one floating-point type$"):
        ops.hash_grid(np.zeros((3, 2), np.float32), np.zeros((9, 2)), (2,), 16)
