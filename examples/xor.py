"""Train a two-layer network on XOR by hand: parameters in a dict, gradients by ad.value_and_grad, plain descent."""

from __future__ import annotations

import numpy as np

import adtrain as ad
from adtrain import ops

X = ad.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
Y = ad.array([[0.0], [1.0], [1.0], [0.0]])


def logits(params: dict[str, ad.Value], x: ad.Value) -> ad.Value:
    hidden = ops.tanh(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss(params: dict[str, ad.Value]) -> ad.Value:
    return ops.binary_cross_entropy_with_logits(logits(params, X), Y)


def main() -> None:
    rng = np.random.default_rng(0)
    params: dict[str, ad.Value] = {
        "w1": ad.array(rng.normal(size=(2, 8)), "float32"),
        "b1": ops.zeros((8,)),
        "w2": ad.array(rng.normal(size=(8, 1)), "float32"),
        "b2": ops.zeros((1,)),
    }
    step = ad.value_and_grad(loss)
    for i in range(501):
        value, grads = step(params)
        params = {name: params[name] - 0.5 * grads[name] for name in params}
        if i % 100 == 0:
            print(f"step {i:3d}  loss {value.item():.4f}")

    probabilities = ops.sigmoid(logits(params, X)).numpy()
    for x, p in zip(X.numpy(), probabilities, strict=True):
        print(f"{x[0]:.0f} xor {x[1]:.0f} = {p[0]:.3f}")


if __name__ == "__main__":
    main()
