"""Convolution, pooling and normalisation on random geometry: values and gradients are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs_torch
F = torch.nn.functional

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


def draw_arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(map(sum, shapes)))
    return [rng.normal(size=shape) for shape in shapes]


def assert_like_torch(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: np.ndarray) -> None:
    out, pullback = ad.vjp(ours, *inputs)
    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    expected = theirs(*leaves)
    np.testing.assert_allclose(out.numpy(), expected.detach().numpy(), rtol=1e-10, atol=1e-12)
    ct = np.random.default_rng(1).normal(size=out.shape)
    expected.backward(torch.tensor(ct))
    for grad, leaf in zip(pullback(ct), leaves, strict=True):
        np.testing.assert_allclose(grad.numpy(), leaf.grad.numpy(), rtol=1e-9, atol=1e-11)


@given(
    n=st.integers(1, 3), groups=st.integers(1, 2), channels=pairs, size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=pairs, stride=pairs, padding=st.tuples(st.integers(0, 2), st.integers(0, 2)), dilation=pairs,
)  # fmt: skip
def test_conv2d_and_its_gradients_agree_with_pytorch(
    n: Any, groups: Any, channels: Any, size: Any, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> None:
    assume(all(s + 2 * p >= d * (k - 1) + 1 for s, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    x, w, b = draw_arrays(
        (n, channels[0] * groups, *size), (channels[1] * groups, channels[0], *kernel), (channels[1] * groups,)
    )
    assert_like_torch(
        lambda x, w, b: ops.conv2d(x, w, b, **options), lambda x, w, b: F.conv2d(x, w, b, **options), x, w, b
    )


@given(
    groups=st.integers(1, 2), channels=pairs, size=st.tuples(st.integers(1, 5), st.integers(1, 5)), kernel=pairs,
    stride=pairs, padding=st.integers(0, 2), dilation=st.integers(1, 3), extra=st.integers(0, 2),
)  # fmt: skip
def test_conv_transpose2d_and_its_gradients_agree_with_pytorch(
    groups: Any, channels: Any, size: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, extra: Any
) -> None:
    options: dict[str, Any] = {
        "stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "output_padding": extra,
    }  # fmt: skip
    assume(all(extra < max(s, dilation) for s in stride))
    lengths = [
        (n - 1) * s - 2 * padding + dilation * (k - 1) + extra + 1 for n, s, k in zip(size, stride, kernel, strict=True)
    ]
    assume(min(lengths) > 0)
    x, w = draw_arrays((2, channels[0] * groups, *size), (channels[0] * groups, channels[1], *kernel))
    assert_like_torch(
        lambda x, w: ops.conv_transpose2d(x, w, **options), lambda x, w: F.conv_transpose2d(x, w, **options), x, w
    )


@given(size=st.tuples(st.integers(3, 9), st.integers(3, 9)), kernel=pairs, stride=pairs, padding=st.booleans())
def test_poolings_and_their_gradients_agree_with_pytorch(size: Any, kernel: Any, stride: Any, padding: Any) -> None:
    around = tuple(k // 2 if padding else 0 for k in kernel)
    (x,) = draw_arrays((2, 3, *size))
    args = (kernel, stride, around)
    assert_like_torch(lambda x: ops.max_pool2d(x, *args), lambda x: F.max_pool2d(x, *args), x)
    assert_like_torch(lambda x: ops.avg_pool2d(x, *args), lambda x: F.avg_pool2d(x, *args), x)
    assert_like_torch(lambda x: ops.adaptive_avg_pool2d(x, kernel), lambda x: F.adaptive_avg_pool2d(x, kernel), x)


def test_max_pool_propagates_nan() -> None:
    x = np.zeros((1, 1, 2, 4))
    x[0, 0, 0, 0] = np.nan
    out = ops.max_pool2d(x, 2).numpy()
    assert np.isnan(out[0, 0, 0, 0])
    assert out[0, 0, 0, 1] == 0


def test_gradients_of_batch_norm_have_the_types_of_the_arguments() -> None:
    x, w, b = draw_arrays((4, 3, 2), (3,), (3,))
    args = ad.array(x.astype(np.float32)), ad.array(w), ad.array(b.astype(np.float32))
    _, pullback = ad.vjp(lambda x, w, b: ops.batch_norm(x, np.zeros(3), np.ones(3), w, b)[0], *args)
    assert [g.dtype for g in pullback(np.ones((4, 3, 2)))] == [np.float32, np.float64, np.float32]


@given(n=st.integers(2, 5), groups=st.integers(1, 3), width=st.integers(1, 3), rest=st.sampled_from([(), (3,), (2, 3)]))
def test_normalisations_and_their_gradients_agree_with_pytorch(n: Any, groups: Any, width: Any, rest: Any) -> None:
    channels = groups * width
    x, w, b, mean = draw_arrays((n, channels, *rest), (channels,), (channels,), (channels,))
    var = np.abs(mean) + 0.5
    for training in (True, False):
        assert_like_torch(
            lambda x, w, b, t=training: ops.batch_norm(x, mean, var, w, b, training=t)[0],
            lambda x, w, b, t=training: F.batch_norm(x, torch.tensor(mean), torch.tensor(var), w, b, t),
            x, w, b,
        )  # fmt: skip
    running = torch.tensor(mean), torch.tensor(var)
    F.batch_norm(torch.tensor(x), *running, training=True, momentum=0.3)
    for ours, theirs in zip(ops.batch_norm(x, mean, var, momentum=0.3)[1:], running, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-12)
    assume(width * int(np.prod(rest)) > 1)
    assert_like_torch(
        lambda x, w, b: ops.group_norm(x, groups, w, b), lambda x, w, b: F.group_norm(x, groups, w, b), x, w, b
    )
    shape = x.shape[1:]
    weight, bias = draw_arrays(shape, shape)
    assert_like_torch(
        lambda x, w, b: ops.layer_norm(x, shape, w, b), lambda x, w, b: F.layer_norm(x, shape, w, b), x, weight, bias
    )


@given(n=st.integers(1, 5), classes=st.integers(2, 6), smoothing=st.sampled_from([0.0, 0.1, 0.5]))
def test_losses_and_their_gradients_agree_with_pytorch(n: Any, classes: Any, smoothing: Any) -> None:
    logits, other = draw_arrays((n, classes), (n, classes))
    labels = np.arange(n) % classes
    index = torch.tensor(labels)
    assert_like_torch(
        lambda x: ops.cross_entropy(x, labels, smoothing),
        lambda x: F.cross_entropy(x, index, label_smoothing=smoothing),
        logits,
    )
    share = 1 / (1 + np.exp(-other))
    tail = (logits, other)
    assert_like_torch(ops.mse_loss, F.mse_loss, *tail)
    assert_like_torch(ops.l1_loss, F.l1_loss, *tail)
    assert_like_torch(lambda x, y: ops.huber_loss(x, y, 0.6), lambda x, y: F.huber_loss(x, y, delta=0.6), *tail)
    assert_like_torch(
        lambda x: ops.binary_cross_entropy_with_logits(x, share),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.tensor(share)),
        logits,
    )


REDUCTIONS = st.sampled_from(["none", "sum", "mean"])


@given(
    rows=st.sampled_from([(), (4,), (3, 2), (2, 1, 3)]), classes=st.integers(1, 5), weighted=st.booleans(),
    ignored=st.sampled_from([None, -100, 0, 1]), smoothing=st.sampled_from([0.0, 0.3]), reduction=REDUCTIONS,
    probabilities=st.booleans(),
)  # fmt: skip
def test_options_of_class_losses_equal_pytorch(
    rows: Any, classes: Any, weighted: Any, ignored: Any, smoothing: Any, reduction: Any, probabilities: Any
) -> None:
    logits, other = draw_arrays(*[(*rows[:1], classes, *rows[1:])] * 2)
    weight = np.linspace(0.5, 2, classes) if weighted else None
    labels = np.arange(int(np.prod(rows))).reshape(rows) % classes
    theirs: dict[str, Any] = {"reduction": reduction, "weight": None if weight is None else torch.tensor(weight)}
    if probabilities:
        shares = np.abs(other)
        assert_like_torch(
            lambda x: ops.cross_entropy(x, shares, smoothing, weight=weight, reduction=reduction),
            lambda x: F.cross_entropy(x, torch.tensor(shares), label_smoothing=smoothing, **theirs),
            logits,
        )
        return
    if ignored is not None:
        labels.reshape(-1)[::3] = ignored if ignored < classes else 0
        theirs["ignore_index"] = ignored
    ours: dict[str, Any] = {"reduction": reduction, "weight": weight, "ignore_index": ignored}
    assert_like_torch(
        lambda x: ops.cross_entropy(x, labels, smoothing, **ours),
        lambda x: F.cross_entropy(x, torch.tensor(labels), label_smoothing=smoothing, **theirs),
        logits,
    )
    assert_like_torch(
        lambda x: ops.nll_loss(x, labels, **ours), lambda x: F.nll_loss(x, torch.tensor(labels), **theirs), logits
    )


def test_mean_loss_is_nan_if_all_labels_are_ignored() -> None:
    labels = np.full(2, -1)
    assert np.isnan(ops.cross_entropy(np.ones((2, 3)), labels, ignore_index=-1).item())
    assert ops.cross_entropy(np.ones((2, 3)), labels, ignore_index=-1, reduction="sum").item() == 0


@given(reduction=REDUCTIONS, weight=st.sampled_from([None, (3, 1), (4,)]), pos_weight=st.sampled_from([None, (), (4,)]))
def test_options_of_elementwise_losses_equal_pytorch(reduction: Any, weight: Any, pos_weight: Any) -> None:
    x, y = draw_arrays((3, 4), (3, 4))
    share = 1 / (1 + np.exp(-y))
    for ours, theirs in ((ops.mse_loss, F.mse_loss), (ops.l1_loss, F.l1_loss), (ops.huber_loss, F.huber_loss)):
        assert_like_torch(
            lambda x, y, f=ours: f(x, y, reduction=reduction), lambda x, y, f=theirs: f(x, y, reduction=reduction), x, y
        )
    drawn = {"weight": weight, "pos_weight": pos_weight}
    weights = {name: np.abs(draw_arrays(shape)[0]) + 0.5 for name, shape in drawn.items() if shape is not None}
    assert_like_torch(
        lambda x: ops.binary_cross_entropy_with_logits(x, share, reduction=reduction, **weights),
        lambda x: F.binary_cross_entropy_with_logits(
            x, torch.tensor(share), reduction=reduction, **{k: torch.tensor(v) for k, v in weights.items()}
        ),
        x,
    )


@given(st.integers(0, 60))
def test_erf_is_accurate_to_the_last_bits(seed: Any) -> None:
    x = np.random.default_rng(seed).uniform(-7, 7, 200)
    np.testing.assert_allclose(ops.erf(x).numpy(), torch.erf(torch.tensor(x)).numpy(), rtol=1e-15, atol=0)
