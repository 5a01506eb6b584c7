"""Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from math import prod, sqrt
from typing import Any, ClassVar, Literal

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.errors import OptionError
from adtrain.core.types import Shape
from adtrain.core.views import subview
from adtrain.optim.elementwise import AdamW
from adtrain.optim.groups import matches, require_matches
from adtrain.optim.optimizer import (
    Optimizer,
    OptState,
    Part,
    Tree,
    initial_in_parts,
    initial_state,
    is_zero,
    named,
    updated_in_parts,
)
from adtrain.option_types import Fraction, NonNegative, Patterns, Positive, Size

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b, c of the polynomial a x + b x³ + c x⁵, which moves singular values towards 1 (Jordan et al. 2024)."""
EPS = 1e-7
"""The least norm by which a matrix is divided."""
REST = AdamW(3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
"""The optimizer of arrays of one axis, as in the authors' implementation."""


@dataclass(frozen=True)
class Muon(Optimizer):
    """Momentum, orthogonalized by Newton-Schulz steps (Jordan et al. 2024, "Muon"), as torch.optim.Muon.

    It updates arrays of two axes or more. A filter (out, in, kh, kw) is the matrix (out, in kh kw). `rest` updates the
    other arrays, and those whose paths match `rest_paths`, such as embeddings and the last layer; its learning rate has
    the same schedule. `adjust_lr_fn` multiplies the rate by √max(1, rows / columns) ("original"), by 0.2 √max(rows,
    columns) ("match_rms_adamw"), or by 1 ("none"). With `normalize_weights` a matrix is scaled before its update, so
    that its norm is the root of the number of its rows (Jordan 2024, "94% on CIFAR-10 in 3.29 seconds"). The defaults
    are those of the authors' implementation, not of PyTorch.

    State: "step", with momentum "momentum_buffer", and that of `rest`. The trees of the parameters are dicts by path.
    """

    traceable: ClassVar[tuple[str, ...]] = ("momentum", "weight_decay")
    lr: Positive = 0.02
    _: KW_ONLY
    momentum: Fraction = 0.95
    nesterov: bool = True
    weight_decay: NonNegative = 0.0
    ns_steps: Size = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw", "none"] = "original"
    normalize_weights: bool = False
    rest: Optimizer = REST
    rest_paths: Patterns | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rest, Muon):
            raise OptionError("muon: rest is muon, expected an optimizer of arrays of one axis, such as adamw")

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), **{f"rest.{name}": x for name, x in self.rest.numbers().items()}}

    def with_traced(self, numbers: Mapping[str, Any]) -> Optimizer:
        of_rest = {name.removeprefix("rest."): x for name, x in numbers.items() if name.startswith("rest.")}
        own = {name: x for name, x in numbers.items() if not name.startswith("rest.")}
        return super().with_traced({**own, "rest": self.rest.with_traced(of_rest)})

    def require_fit(self, shapes: Mapping[str, Shape]) -> None:
        if self.rest_paths is not None:
            try:
                require_matches(self.rest_paths, shapes)
            except OptionError as error:
                raise OptionError(f"muon: rest_paths: {error}") from None

    def init(self, params: Tree) -> OptState:
        return initial_in_parts(params, self._parts(params, None))

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        return updated_in_parts(params, grads, state, self._parts(params, lr))

    def _parts(self, params: Tree, lr: Any) -> list[Part]:
        axes = {path: x.ndim for path, x in named(params).items()}
        matrices = self.matrices(axes)
        others = [path for path in axes if path not in matrices]
        rest_lr = lr if lr is None else lr * (self.rest.lr / self.lr)
        return [
            Part(matrices, self._init_matrices, self._updated_matrices, lr),
            Part(others, self.rest.init, self.rest.updated, rest_lr),
        ]

    def matrices(self, axes: Mapping[str, int]) -> list[str]:
        """The paths of the arrays that `rest` does not update. `axes` are the numbers of axes by path."""
        rest = self.rest_paths
        return [path for path, n in axes.items() if n > 1 and not (rest and matches(rest, path, n))]

    def _init_matrices(self, params: Tree) -> OptState:
        return initial_state(params, *(["momentum_buffer"] if self.momentum else []))

    def _updated_matrices(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        new: OptState = {"step": state["step"] + 1}
        direction = grads
        if not is_zero(self.momentum):
            buffer = {path: self.momentum * v + grads[path] for path, v in state["momentum_buffer"].items()}
            new["momentum_buffer"] = direction = buffer
            if self.nesterov:
                direction = {path: grads[path] + self.momentum * v for path, v in buffer.items()}
        directions = orthogonalized(list(direction.values()), self.ns_steps)
        return {path: self._moved(params[path], d, lr) for path, d in zip(direction, directions, strict=True)}, new

    def _moved(self, p: Value, direction: Value, lr: Value) -> Value:
        rows, columns = p.shape[0], prod(p.shape[1:])
        if self.normalize_weights:
            p = p * (sqrt(rows) / ops.sqrt(ops.sum(ops.square(p))))
        if not is_zero(self.weight_decay):
            p = ops.astype(1 - self.weight_decay * lr, p.dtype) * p
        factors = {"original": sqrt(max(1, rows / columns)), "match_rms_adamw": 0.2 * sqrt(max(rows, columns))}
        return p - ops.astype(lr * factors.get(self.adjust_lr_fn, 1.0), p.dtype) * direction


def orthogonalized(arrays: Sequence[Value], steps: int) -> list[Value]:
    """For each array, as a matrix U S Vᵀ with axis 0 as its rows, about U Vᵀ: singular values of about 0.7 to 1.2.

    Arrays of one shape are multiplied together. The products have the precision of `ops.matmul_precision`.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, x in enumerate(arrays):
        alike.setdefault((x.shape[0], prod(x.shape[1:])), []).append(i)
    found: dict[int, Value] = {}
    for shape, positions in alike.items():
        parts = [ops.reshape(arrays[i], (1, *shape)) for i in positions]
        x = _newton_schulz(ops.concatenate(parts) if len(parts) > 1 else parts[0], steps)
        for k, i in enumerate(positions):
            found[i] = subview(x, k * prod(shape), arrays[i].shape)
    return [found[i] for i in range(len(arrays))]


def _newton_schulz(x: Value, steps: int) -> Value:
    """X ← (a I + b X Xᵀ + c (X Xᵀ)²) X for each matrix of x (count, rows, columns), divided by its norm first.

    The product X Xᵀ or Xᵀ X is taken of the shorter axis. With a I in the polynomial, one product gives the next X, and
    no other array of its size is written.
    """
    a, b, c = COEFFICIENTS
    wide = x.shape[1] <= x.shape[2]
    index = ops.arange(min(x.shape[1:]), device=x.device)
    unit = ops.astype(ops.equal(ops.reshape(index, (-1, 1)), index), x.dtype)
    x = x / ops.maximum(ops.sqrt(ops.sum(ops.square(x), axis=(1, 2), keepdims=True)), EPS)
    for _ in range(steps):
        gram = ops.matmul(x, x, transpose_a=not wide, transpose_b=wide)
        polynomial = a * unit + b * gram + c * ops.matmul(gram, gram)
        x = ops.matmul(polynomial, x) if wide else ops.matmul(x, polynomial)
    return x
