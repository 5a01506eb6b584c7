"""Far from zero and at the edge: finite values and right gradients; shapes that do not fit, by message."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.ops import conv

FAR = np.array([-1e4, -800.0, -40.0, 0.0, 40.0, 800.0, 1e4])


def slopes(f: Any, x: Any) -> Any:
    return ad.grad(lambda x: f(x).sum())(x).numpy()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sigmoid_and_relatives_are_accurate_for_large_arguments(dtype: Any) -> None:
    x = FAR.astype(dtype)
    s = np.exp(-np.logaddexp(0, -FAR))
    small = np.finfo(dtype).tiny
    np.testing.assert_allclose(ops.sigmoid(x).numpy(), s, rtol=1e-6, atol=small)
    np.testing.assert_allclose(slopes(ops.sigmoid, x), s * (1 - s), rtol=1e-5, atol=1e-16)
    np.testing.assert_allclose(ops.softplus(x).numpy(), np.logaddexp(0, FAR), rtol=1e-6, atol=small)
    np.testing.assert_allclose(slopes(ops.softplus, x), s, rtol=1e-6, atol=small)
    np.testing.assert_allclose(slopes(ops.silu, x), s * (1 + FAR * (1 - s)), rtol=1e-5, atol=1e-12)
    np.testing.assert_array_equal(slopes(ops.gelu, x), np.where(FAR > 0, 1, 0) + 0.5 * (FAR == 0))
    np.testing.assert_allclose(
        slopes(ops.elu, x), np.where(FAR > 0, 1, np.exp(np.minimum(FAR, 0))), rtol=1e-6, atol=1e-7
    )
    np.testing.assert_array_equal(slopes(ops.tanh, x), np.where(FAR == 0, 1, 0))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softmax_and_cross_entropy_are_accurate_for_large_arguments(dtype: Any) -> None:
    x = np.array([[1e4, 0.0, -1e4]], dtype)
    np.testing.assert_array_equal(ops.softmax(x).numpy(), [[1, 0, 0]])
    np.testing.assert_array_equal(ops.log_softmax(x).numpy(), [[0, -1e4, -2e4]])
    np.testing.assert_array_equal(ops.logsumexp(x, 1).numpy(), [1e4])
    for target in range(3):
        value, slope = ad.value_and_grad(lambda x, t=target: ops.cross_entropy(x, np.array([t])))(x)
        assert value.item() == target * 1e4
        np.testing.assert_array_equal(slope.numpy(), [[1, 0, 0]] - np.eye(3)[target])
    bce = ad.grad(lambda x: ops.binary_cross_entropy_with_logits(x, np.array([[0.0, 1.0, 1.0]], dtype)))(x)
    np.testing.assert_allclose(bce.numpy() * 3, [[1, -0.5, -1]])


def test_logsumexp_of_minus_infinities_is_minus_infinity() -> None:
    assert ops.logsumexp(np.full(3, -np.inf)).item() == -np.inf


def test_gradient_of_logsumexp_of_large_numbers_sums_to_one() -> None:
    x = np.float32(1e6 + np.array([0.0, 0.5, 1.0, -0.25]))
    assert float(slopes(ops.logsumexp, x).sum()) == pytest.approx(1, abs=3e-7)


def test_ties_share_the_cotangent() -> None:
    assert slopes(lambda x: ops.maximum(x, 1.0), np.array([1.0])).tolist() == [0.5]
    assert ad.grad(ops.max)(np.array([2.0, 1.0, 2.0])).numpy().tolist() == [0.5, 0, 0.5]
    assert slopes(ops.relu, np.array([0.0])).tolist() == [0]
    assert slopes(ops.abs, np.array([0.0])).tolist() == [0]


def test_derivatives_of_powers_at_zero_are_finite() -> None:
    zero = np.array([0.0])
    assert slopes(lambda x: x**2, zero).tolist() == [0]
    assert slopes(lambda x: x**1, zero).tolist() == [1]
    assert slopes(lambda x: x**0, zero).tolist() == [0]
    base, exponent = ad.grad(lambda a, b: (a**b).sum(), (0, 1))(zero, np.array([2.0]))
    assert (base.item(), exponent.item()) == (0, 0)
    base, exponent = ad.grad(lambda a, b: (a**b).sum(), (0, 1))(np.array([1e-45], np.float32), np.zeros(1, np.float32))
    assert base.item() == 0
    assert ad.grad(lambda b: (zero**b).sum())(np.array([-2.0])).numpy().tolist() == [0]


def test_gradients_of_repeated_indices_are_summed() -> None:
    grad = ad.grad(lambda w: ops.embedding(np.array([1, 1, 0]), w).sum())(np.zeros((3, 2)))
    assert grad.numpy().tolist() == [[1, 1], [2, 2], [0, 0]]


def test_the_hessian_of_a_power_is_symmetric_at_exponent_zero() -> None:
    point = (np.array(2.0), np.array(0.0))
    mixed = [
        ad.grad(lambda b: ad.grad(ops.power)(point[0], b))(point[1]).item(),
        ad.grad(lambda a: ad.grad(ops.power, 1)(a, point[1]))(point[0]).item(),
    ]
    assert mixed == [0.5, 0.5]


def test_huber_loss_is_quadratic_near_zero() -> None:
    assert ad.hessian(lambda x: ops.huber_loss(x, np.zeros(1)))(np.zeros(1)).item() == 1.0


def test_means_of_equal_numbers_are_that_number() -> None:
    for n in range(1, 200):
        assert ops.mean(np.ones(n, np.float32)).item() == 1.0


def test_sums_of_bool_and_small_integers_are_int64() -> None:
    mask = ad.array([1.0, -1.0]) > 0
    assert (mask * 2).numpy().tolist() == [2, 0]
    assert (mask * 0.5).dtype == np.float32
    assert ops.cumsum(np.array([200, 100], np.uint8)).numpy().tolist() == [200, 300]
    assert ops.take(np.arange(300.0), np.array([7, 255], np.uint8)).numpy().tolist() == [7, 255]


def test_values_can_be_unpacked() -> None:
    a, b = ad.array([1.0, 2.0])
    assert (a.item(), b.item()) == (1, 2)


def test_im2col_in_chunks_of_any_size_gives_the_same_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(5, 2, 6, 6)), rng.normal(size=(3, 2, 3, 3))

    def results() -> list[np.ndarray]:
        out, pullback = ad.vjp(ops.conv2d, x, w)
        return [out.numpy(), *(g.numpy() for g in pullback(np.ones(out.shape)))]

    whole = results()
    monkeypatch.setattr(conv, "COLUMN_BYTES", 2 * 18 * 16 * 8)  # two images at a time, then one
    for a, b in zip(whole, results(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


MESSAGES = [
    (lambda: ops.cross_entropy(np.ones((2, 3)), np.array([0, -1])), "index -1 is out of range for length 3"),
    (lambda: ops.one_hot(np.array([-1]), 3), "one_hot: index -1 is out of range for length 3"),
    (lambda: ops.embedding(np.array([-1]), np.ones((3, 2))), "take: index -1 is out of range for length 3"),
    (lambda: ops.conv2d(np.ones((1, 0, 3, 3)), np.ones((1, 0, 1, 1))), "conv2d: found 0 channels and kernel 1x1"),
    (lambda: ops.expand_dims(np.ones(3), None), "expand_dims: found axis None"),
    (lambda: ops.conv_transpose2d(np.ones((1, 2, 3, 3)), np.ones((3, 1, 2, 2))),
     "conv_transpose2d: the input has 2 channels, the weight takes 3"),
    (lambda: ops.stack([np.ones(2), np.ones(3)]), r"concatenate: shapes \(1, 2\) and \(1, 3\) differ beside axis 0"),
    (lambda: ops.slice(np.ones(3), (2,), (5,)), "slice: 2:5:1 does not fit an axis of length 3"),
    (lambda: ops.broadcast_to(np.ones(3), (2, 4)), r"broadcast_to: shapes \(3,\) and \(2, 4\) do not broadcast"),
    (lambda: ops.sum_to(np.ones((2, 3)), (4,)), r"sum_to: shapes \(2, 3\) and \(4,\) do not broadcast"),
    (lambda: ops.take_along_axis(np.ones((2, 3)), np.array([0]), 1), "take_along_axis: indices of shape"),
    (lambda: ops.argmax(np.ones((2, 0)), 1), "argmax: shape .* has no elements along axis 1"),
    (lambda: ops.var(np.ones(1), correction=1), "var: shape .* has 1 elements .* expected over 1"),
    (lambda: ops.add(np.ones((3, 4)), np.ones(5)), r"add: shapes \(3, 4\) and \(5,\) do not broadcast together"),
    (lambda: ops.matmul(np.ones((2, 3)), np.ones((4, 5))),
     r"matmul: inner lengths 3 and 4 differ in \(2, 3\) @ \(4, 5\)$"),
    (lambda: ops.matmul(np.ones((2, 3)), np.ones((3, 5)), transpose_b=True),
     r"matmul: inner lengths 3 and 5 differ in \(2, 3\) @ \(3, 5\), b transposed"),
    (lambda: ops.matmul(np.ones(()), np.ones(3)), r"matmul: found shapes \(\) and \(3,\), expected at least one axis"),
    (lambda: ops.conv2d(np.ones((1, 3, 5, 5)), np.ones((4, 2, 3, 3))),
     r"conv2d: the input has 3 channels, the weight \(4, 2, 3, 3\) takes 2 x 1 groups = 2"),
    (lambda: ops.conv2d(np.ones((1, 1, 2, 2)), np.ones((1, 1, 3, 3))),
     "conv2d: kernel 3x3 .* is larger than the input 2x2"),
    (lambda: ops.max_pool2d(np.ones((1, 1, 2, 2)), 3), "max_pool2d: window 3x3 is larger than the input 2x2"),
    (lambda: ops.reshape(np.ones(6), (4, -1)),
     r"reshape: 6 elements of shape \(6,\) do not fit into shape \(4, -1\)"),
    (lambda: ops.reshape(np.ones(6), (5,)), r"reshape: 6 elements of shape \(6,\) do not fit into shape \(5,\)"),
    (lambda: ops.transpose(np.ones((2, 3)), (0, 0)), r"transpose: axes \(0, 0\) are not a permutation of the 2 axes"),
    (lambda: ops.sum(np.ones((2, 3)), 2), "sum: axis 2 is out of range for an array of 2 dimensions"),
    (lambda: ops.sum(np.ones((2, 3)), (0, -2)), r"sum: axis \(0, -2\) names an axis twice"),
    (lambda: ops.mean(np.ones((0, 3)), 0), r"mean: shape \(0, 3\) has no elements along axes \(0,\)"),
    (lambda: ops.max(np.ones((0, 3)), 0), r"max: shape \(0, 3\) has no elements along axes \(0,\)"),
    (lambda: ops.concatenate([]), "concatenate: found no arrays"),
    (lambda: ops.concatenate([np.ones((2, 3)), np.ones((3, 3))], 1),
     r"concatenate: shapes \(2, 3\) and \(3, 3\) differ beside axis 1"),
    (lambda: ops.take(np.ones(3), np.array([-4])), "take: index -4 is out of range for length 3"),
    (lambda: ops.take(np.ones(3), np.array([3])), "take: index 3 is out of range for length 3"),
    (lambda: ops.cross_entropy(np.ones((2, 3)), np.array([0, 3])),
     "take_along_axis: index 3 is out of range for length 3"),
    (lambda: ops.cross_entropy(np.ones((2, 3)), np.array([0])),
     r"cross_entropy: found \(2, 3\) and targets \(1,\), expected targets \(2,\)"),
    (lambda: ops.cross_entropy(np.ones((2, 3)), np.array([0, 7]), ignore_index=-100),
     r"cross_entropy: a label is out of range \(.* index 7 is out of range for length 3\); ignore_index leaves out"),
    (lambda: ops.cross_entropy(np.ones((2, 3)), np.array([0, 1]), weight=np.ones(2)),
     r"cross_entropy: found weight of shape \(2,\), expected \(3,\): one number for each class"),
    (lambda: ops.cross_entropy(np.ones((2, 3)), np.ones(2)),
     "expected probabilities of the shape of the logits, or integers"),
    (lambda: ops.cross_entropy(np.ones(()), np.ones((), int)), r"expected \(N, C\), \(N, C, d...\) or \(C,\)"),
    (lambda: ops.binary_cross_entropy_with_logits(np.ones((2, 3)), np.ones((2, 3)), pos_weight=np.ones((4, 1, 3))),
     r"found pos_weight of shape \(4, 1, 3\), expected it to broadcast to \(2, 3\)"),
    (lambda: ops.batch_norm(np.ones((1, 3)), np.ones(3), np.ones(3)), "has 1 values a channel, expected at least 2"),
    (lambda: ops.batch_norm(np.ones((2, 3)), None, None), "batch_norm: running_mean or running_var is None, expected"),
    (lambda: ops.layer_norm(np.ones((2, 3)), 4), r"layer_norm: shape \(2, 3\) does not end in \(4,\)"),
    (lambda: ops.group_norm(np.ones((2, 3)), 2), r"group_norm: shape \(2, 3\) does not divide into 2 groups"),
    (lambda: ops.pad(np.ones((2, 3)), ((0, 0), (-2, -2))),
     "pad: widths -2 and -2 cut off more than the 3 elements of axis 1"),
    (lambda: ops.pad(np.ones(3), ((-4, 2),)), "pad: widths -4 and 2 cut off more than the 3 elements of axis 0"),
    (lambda: ops.argmin(np.ones((2, 0)), 1), "argmin: shape .* has no elements along axis 1"),
    (lambda: ops.std(np.ones(1), correction=1), "std: shape .* has 1 elements .* expected over 1"),
    (lambda: ops.prod(np.ones((2, 3)), (1, -1)), r"prod: axis \(1, -1\) names an axis twice"),
    (lambda: ops.tensordot(np.ones((2, 3)), np.ones((4, 3)), 1),
     r"tensordot: lengths 3 and 4 differ, of axis 1 of \(2, 3\) and axis 0 of \(4, 3\)"),
    (lambda: ops.tensordot(np.ones((2, 3)), np.ones(3), 2), "tensordot: found 2 axes .* expected 0 to 1"),
    (lambda: ops.tensordot(np.ones((2, 2)), np.ones((2, 2)), ((0, 0), (0, 1))), "tensordot: axes .* an axis twice"),
    (lambda: ops.cross(np.ones((2, 3)), np.ones(1)), r"cross: axis -1 of shapes \(2, 3\) and \(1,\) is not"),
    (lambda: ops.cross(np.ones((3, 3)), np.ones(3), 0), "cross: axis 0 of shapes .* is not of length 3 in both"),
    (lambda: ops.mse_loss(np.ones(3), np.ones((3, 1))), r"mse_loss: found shapes \(3,\) and \(3, 1\), expected equal"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MESSAGES)
def test_invalid_shapes_raise_an_error_that_explains(call: Any, message: Any) -> None:
    with pytest.raises(ad.ShapeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


TEXT: Any = "a"

OPTIONS = [
    (lambda: ops.max_pool2d(np.ones((1, 1, 3, 3)), (1, 2, 3)), r"max_pool2d: kernel_size is \(1, 2, 3\), expected an"),
    (lambda: ops.max_pool2d(np.ones((1, 1, 4, 4)), 2, padding=2), "padding is 2, expected at most half of the window"),
    (lambda: ops.conv2d(np.ones((1, 1, 2, 2)), np.ones((1, 1, 1, 1)), stride=0),
     r"conv2d: stride is 0, expected an integer in \[1, 2\^31\), or 2 of them"),
    (lambda: ops.conv2d(np.ones((1, 1, 2, 2)), np.ones((1, 1, 1, 1)), groups=0), "conv2d: groups is 0, expected an"),
    (lambda: ops.conv3d(np.ones((1, 1, 2, 2, 2)), np.ones((1, 1, 1, 1, 1)), padding=-1),
     r"conv3d: padding is -1, expected an integer in \[0, 2\^31\), or 3 of them"),
    (lambda: ops.adaptive_avg_pool2d(np.ones((1, 1, 2, 2)), 0), "adaptive_avg_pool2d: output_size is 0, expected an"),
    (lambda: ops.random_uniform(ops.rng_state(0), (2,), stream=2**40), r"expected an integer in \[0, 2\^32\)"),
    (lambda: ops.rng_state(-1), r"rng_state: seed is -1, expected an integer in \[0, 2\^64\)"),
    (lambda: ops.dropout(np.ones(3), 1.0, ops.rng_state(0)), r"dropout: p is 1.0, expected a number in \[0, 1\)"),
    (lambda: ops.soft_cap(np.ones(1), 0), r"soft_cap: cap is 0, expected a number in \(0, 3.4e38\]"),
    (lambda: ops.gelu(np.ones(1), TEXT), "gelu: approximate is 'a', expected one of none, tanh"),
    (lambda: ops.rnn(np.ones(1), np.ones(1), np.ones(1), nonlinearity=TEXT), "rnn: nonlinearity is 'a', expected"),
    (lambda: ops.huber_loss(np.ones(1), np.ones(1), 0), r"huber_loss: delta is 0, expected a number in \(0, 3.4e38\]"),
    (lambda: ops.cross_entropy(np.ones((2, 3)), np.array([0, 1]), np.ones(3)),  # type: ignore[arg-type]
     r"cross_entropy: label_smoothing is array\(\[1., 1., 1.\]\), expected a number in"),
    (lambda: ops.mse_loss(np.ones(3), np.ones(3), reduction=TEXT), "mse_loss: reduction is 'a', expected one of"),
    (lambda: ops.nll_loss(np.ones((2, 3)), np.array([0, 1]), reduction=TEXT), "nll_loss: reduction is 'a'"),
    (lambda: ops.tensordot(np.ones((2, 2)), np.ones((2, 2)), ((0, 1), (0,))), "expected a number, or two sequences"),
    (lambda: ops.softmax(np.ones(2), TEXT), "softmax: found axis 'a', expected an integer"),
    (lambda: ops.einsum("ij->ii", np.ones((2, 2))), "einsum: the result of 'ij->ii' has an axis twice"),
    (lambda: ops.tile(np.ones(2), -1), "tile: found reps -1, expected numbers of at least 0"),
    (lambda: ops.arange(0, 3, 0), "arange: found start 0, stop 3, step 0, expected fewer than 2"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), OPTIONS)
def test_an_option_that_no_input_makes_valid_is_an_option_error(call: Any, message: str) -> None:
    with pytest.raises(ad.OptionError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


TYPES = [
    (lambda: ops.clip(np.ones(2), cast(Any, ad.array(0.0))), "clip: a bound is an array, expected Python numbers"),
    (lambda: -(ad.array([1.0]) > 0), "neg: found bool, expected numbers; use astype"),
    (lambda: ops.random_uniform(ops.rng_state(0), (2,), dtype="int32"), "random_uniform: found dtype int32"),
    (lambda: ops.zeros(2, np.float16), "full: found elements of type float16"),
    (lambda: ad.array([1.0], "nonsense"), "array: "),
    (lambda: ops.exp(np.array([1, 2])), "exp: found int64, expected float32 or float64; use astype"),
    (lambda: ops.take(np.ones(3), np.array([1.0])), "take: the indices are float64, expected integers"),
    (lambda: ops.where(np.array([1, 0]), 1.0, 2.0), "where: the condition is int64, expected bool"),
    (lambda: ops.random_normal(ops.rng_state(0), (2,), dtype="int32"), "random_normal: found dtype int32"),
    (lambda: ops.random_uniform(np.zeros(4), (2,)), r"random_uniform: rng is float64\[4\], expected uint32\[4\]"),
    (lambda: ops.astype(np.ones(2), "float16"), "astype: found elements of type float16, expected one of bool"),
]


@pytest.mark.parametrize(("call", "message"), TYPES)
def test_invalid_types_raise_an_error_that_explains(call: Any, message: Any) -> None:
    with pytest.raises(ad.DTypeError, match=message):
        call()
