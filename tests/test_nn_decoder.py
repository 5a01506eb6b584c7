"""Layers of language models: what decoder_layer consists of, tied weights, derivatives, dropout, initial weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import nn, ops
from adtrain.core import tree
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.passes import ALL

FLOAT64 = np.dtype(np.float64)
SHAPE = (5, 16)
OPTIONS: dict[str, Any] = {
    "num_key_value_heads": 2, "window": 3, "rotary_base": 50.0, "qk_norm": True, "soft_cap": 4.0, "bias": False
}  # fmt: skip


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def named(arrays: nn.Params) -> dict[str, Any]:
    return dict(zip(tree.paths(arrays), tree.leaves(arrays), strict=True))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_decoder_layer_equals_its_list_of_layers(activation: str) -> None:
    """The list is that of docs/how-to/sequences.md."""
    layer = nn.DecoderLayer(4, dim_feedforward=10, activation=activation, norm="rms_norm", causal=True, **OPTIONS)  # type: ignore[arg-type]
    linear = nn.Linear(10, bias=False)
    hidden = nn.Multiply(nn.Sequential(linear, nn.SiLU()), linear) if activation == "swiglu" else nn.GELU()
    first = [hidden] if activation == "swiglu" else [linear, hidden]
    listed = nn.Sequential(
        nn.Residual(nn.Sequential(nn.RMSNorm(eps=1e-5), nn.MultiheadAttention(4, causal=True, **OPTIONS))),
        nn.Residual(nn.Sequential(nn.RMSNorm(eps=1e-5), *first, nn.Linear(16, bias=False))),
    )
    params, _ = layer.init(SHAPE, 0, FLOAT64)
    gate = {"gate": params["gate"]} if activation == "swiglu" else {}
    up = {"1": {"0": {"0": gate["gate"]}, "1": params["linear1"]}} if gate else {"1": params["linear1"]}
    down = {("2" if gate else "3"): params["linear2"]}
    of_list = {
        "0": {"body": {"0": params["norm1"], "1": params["self_attn"]}},
        "1": {"body": {"0": params["norm2"], **up, **down}},
    }
    x = ad.array(tokens(2, *SHAPE))
    np.testing.assert_allclose(layer(params, x), listed(of_list, x), rtol=1e-13)


@pytest.mark.needs_torch
@pytest.mark.parametrize("options", [OPTIONS, {"rotary_base": 50.0}, {"window": 2, "soft_cap": 3.0}], ids=str)
def test_second_derivatives_equal_pytorchs(options: dict[str, Any]) -> None:
    """The derivative of the sum of the gradient's sines, for each parameter and the input."""
    torch = pytest.importorskip("torch")
    from torch_tokens import torch_tokens

    layer = nn.DecoderLayer(4, dim_feedforward=6, activation="swiglu", norm="rms_norm", **options)
    params, _ = layer.init(SHAPE, 0, FLOAT64)
    theirs = torch_tokens(layer, SHAPE).double()
    theirs.load_state_dict({name: torch.tensor(x.numpy()) for name, x in named(params).items()})
    x = tokens(2, *SHAPE)

    def of_gradient(params: nn.Params, x: ad.Value) -> ad.Value:
        grads = ad.grad(lambda params, x: ops.sum(ops.sin(layer(params, x))), argnums=(0, 1))(params, x)
        return sum((ops.sum(ops.sin(g)) for g in tree.leaves(grads)), start=ad.array(0.0))

    by_params, by_x = ad.grad(of_gradient, argnums=(0, 1))(params, ad.array(x))
    x_torch = torch.tensor(x, requires_grad=True)
    inputs = [*theirs.parameters(), x_torch]
    grads = torch.autograd.grad(torch.sin(theirs(x_torch)).sum(), inputs, create_graph=True)
    expected = torch.autograd.grad(sum(torch.sin(g).sum() for g in grads), inputs)
    names = [name for name, _ in theirs.named_parameters()]
    for name, mine in zip([*names, "input"], [*(named(by_params)[n] for n in names), by_x], strict=True):
        at = expected[names.index(name) if name in names else -1].numpy()
        np.testing.assert_allclose(mine, at, rtol=1e-8, atol=1e-9, err_msg=name)


@pytest.mark.compiled
def test_compiled_step_equals_the_eager_one() -> None:
    layer = nn.DecoderLayer(4, dim_feedforward=6, activation="swiglu", dropout=0.2, **OPTIONS)
    model = nn.Sequential(nn.Embedding(9, embedding_dim=16), layer, nn.Linear(9, tied=True), nn.SoftCap(3.0))
    params, _ = model.init((5,), 0, FLOAT64)
    x = np.random.default_rng(1).integers(0, 9, (2, 5)).astype(np.int32)
    mode = nn.Mode(training=True, rng=ops.rng_state(3, 1))

    def step(params: nn.Params, x: ad.Value) -> Any:
        return ad.value_and_grad(lambda p: ops.mean(ops.square(model.forward(p, {}, x, mode)[0])))(params)

    found = stage(step, ALL)(params, ad.array(x))
    for mine, eager in zip(tree.leaves(found), tree.leaves(step(params, ad.array(x))), strict=True):
        np.testing.assert_allclose(mine, eager, rtol=1e-9, atol=1e-12)


def test_a_token_sees_those_of_its_window_only() -> None:
    """By the derivatives of the output at one position."""
    for causal, seen in ((True, [2, 3, 4]), (False, [2, 3, 4, 5, 6])):
        layer = nn.MultiheadAttention(2, causal=causal, window=3)
        params, _ = layer.init((8, 4), 0, FLOAT64)
        grad = ad.grad(lambda x, layer=layer, params=params: ops.sum(layer(params, x)[:, 4]))(ad.array(tokens(1, 8, 4)))
        assert np.flatnonzero(np.abs(grad.numpy()[0]).sum(axis=-1)).tolist() == seen


def test_scores_of_rotated_tokens_depend_on_their_distance() -> None:
    """So a sequence of equal tokens gives the same outputs as its part."""
    layer = nn.MultiheadAttention(2, rotary_base=20.0, window=2, causal=True)
    params, _ = layer.init((6, 8), 0, FLOAT64)
    two = tokens(1, 2, 8)
    outputs = layer(params, ad.array(np.concatenate([two, two, two], axis=1))).numpy()[0]
    np.testing.assert_allclose(outputs[3], outputs[5], rtol=1e-12)
    np.testing.assert_allclose(outputs[2], outputs[4], rtol=1e-12)
    assert np.abs(outputs[1] - outputs[2]).max() > 1e-3


def test_a_tied_linear_has_the_gradients_of_both_uses_in_one_array() -> None:
    tied = nn.Sequential(nn.Embedding(7, embedding_dim=4), nn.Linear(7, tied=True))
    apart = nn.Sequential(nn.Embedding(7, embedding_dim=4), nn.Linear(7))
    params, _ = tied.init((3,), 0, FLOAT64)
    assert {name: x.shape for name, x in named(params).items()} == {"0.weight": (7, 4), "1.bias": (7,)}
    assert tied.parameter_shapes((3,)) == {"0.weight": (7, 4), "1.bias": (7,)}
    weight = params["0"]["weight"]
    both = {"0": {"weight": weight}, "1": {"weight": weight, **params["1"]}}
    x = np.array([[0, 3, 6], [3, 3, 1]])

    def loss(model: nn.Module) -> Any:
        return lambda params: ops.sum(ops.sin(model(params, x)))

    (y, grads), (expected, two) = ad.value_and_grad(loss(tied))(params), ad.value_and_grad(loss(apart))(both)
    assert y.item() == expected.item()
    np.testing.assert_allclose(grads["0"]["weight"], two["0"]["weight"] + two["1"]["weight"], rtol=1e-13)
    np.testing.assert_allclose(grads["1"]["bias"], two["1"]["bias"], rtol=1e-13)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, tied=True)).init((3, 4)),
         "layer 0: linear: tied: found 0 embeddings in the list of layers, expected one"),
        (lambda: nn.Sequential(nn.Embedding(5, embedding_dim=4), nn.Linear(6, tied=True)).init((3,)),
         "layer 1: linear: tied: the embedding's weight is (5, 4), expected (6, 4)"),
        (lambda: nn.Linear(4, tied=True)({}, tokens(3, 4)), "linear: tied is for a layer in nn.Sequential"),
        (lambda: nn.MultiheadAttention(4, num_key_value_heads=3).init((3, 8)),
         "multihead_attention: num_key_value_heads 3 does not divide num_heads 4"),
        (lambda: nn.DecoderLayer(4, rotary_base=10.0).init((3, 12)),
         "layer self_attn: multihead_attention: num_heads 4 gives heads of 3 numbers, expected an even number"),
        (lambda: ops.attention(tokens(4, 2), tokens(5, 2), tokens(5, 2), window=2),
         "attention: found 4 queries and 5 keys, expected equal numbers with window"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_one_line(make: Any, message: str) -> None:
    with pytest.raises(AdtrainError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_depth_and_gains_scale_the_initial_weights() -> None:
    """GPT-2: the linear layers before the sums have weights divided by the square root of twice the layers."""
    gains: list[dict[str, Any]] = [{}, {"depth": 8, "init_gain": 0.02}]
    plain, scaled = (
        named(nn.DecoderLayer(2, weight_init="normal", **options).init((3, 8), 0, FLOAT64)[0]) for options in gains
    )
    for name, x in plain.items():
        factor = 1.0
        if name.endswith("weight") and "norm" not in name:
            factor = 0.02 / 4 if name in ("self_attn.out_proj.weight", "linear2.weight") else 0.02
        np.testing.assert_allclose(scaled[name], x.numpy() * factor, rtol=1e-15)
    gained, drawn = (nn.Embedding(50, embedding_dim=4, init_gain=gain).init((3,))[0]["weight"] for gain in (0.5, 1.0))
    np.testing.assert_allclose(gained, drawn * 0.5, rtol=1e-6)


def test_dropout_is_where_pytorch_has_it() -> None:
    """Without weights before the dropped values the output shows each place: the residual is all that is left."""
    layer = nn.DecoderLayer(2, dropout=0.5)
    params, _ = layer.init((4, 8), 0, FLOAT64)
    x, mode = ad.array(tokens(2, 4, 8)), nn.Mode(training=True, rng=ops.rng_state(1, 1))
    ones = {
        "linear2": {"weight": params["linear2"]["weight"] * 0.0, "bias": ad.array(np.ones(8))},
        "out_proj": {"weight": params["self_attn"]["out_proj"]["weight"] * 0.0, "bias": ad.array(np.full(8, 10.0))},
    }
    attention = {**params["self_attn"], "out_proj": ones["out_proj"]}
    biased = {**params, "self_attn": attention, "linear2": ones["linear2"]}
    added = layer.forward(biased, {}, x, mode)[0].numpy() - x.numpy()
    assert set(np.unique(added.round(9))) == {0.0, 2.0, 20.0, 22.0}  # both branches, dropped or doubled
    modes = [nn.Mode(training=True, rng=ops.rng_state(1, n)) for n in (1, 2, 1)]
    first, second, again = (layer.forward(params, {}, x, mode)[0].numpy() for mode in modes)
    assert np.abs(first - second).max() > 0.01
    np.testing.assert_array_equal(again, first)
