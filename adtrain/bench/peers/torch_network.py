"""Layers, losses and optimizers in PyTorch, as functions of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from adtrain import nn, optim
from adtrain.bench.peers.jobs import Apply, Arrays, built, unsupported
from adtrain.config import Config
from adtrain.nn.attention import QK_NORM_EPS
from adtrain.nn.module import pair
from adtrain.ops.hash_grid import PRIMES, grid_levels
from adtrain.optim.muon import COEFFICIENTS, EPS


def model(layers: nn.Module) -> Apply:
    """The model; see `jobs.built`."""
    import torch

    return built(layers, _layer, torch, torch.nn.functional)


def _layer(layer: nn.Module, path: str) -> Apply:
    import torch

    F = torch.nn.functional
    weight, bias = f"{path}weight", f"{path}bias"
    same: Any = getattr(F, layer.kind(), None)  # PyTorch's function of the same name
    match layer:
        case nn.Linear():
            return lambda a, x: F.linear(x, a[weight], a.get(bias))
        case nn.Embedding():
            return lambda a, x: F.embedding(x.long(), a[weight])
        case nn.Sine():
            return lambda a, x: torch.sin(layer.omega * F.linear(x, a[weight], a[bias]))
        case nn.HashGrid():
            return lambda a, x: _hash_grid(layer, a[weight], x)
        case nn.Conv1d() | nn.Conv2d():
            options: Any = layer.stride, layer.padding, layer.dilation, layer.groups
            return lambda a, x: same(x, a[weight], a.get(bias), *options)
        case nn.ConvTranspose2d():
            options = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
            return lambda a, x: same(x, a[weight], a.get(bias), *options)
        case nn.MaxPool2d() | nn.AvgPool2d():
            return lambda a, x: same(x, layer.kernel_size, layer.stride, layer.padding)
        case nn.AdaptiveAvgPool2d() | nn.AdaptiveMaxPool2d():
            return lambda a, x: same(x, pair(layer.output_size))
        case nn.Upsample():
            return lambda a, x: F.interpolate(x, scale_factor=pair(layer.scale_factor), mode=layer.mode)
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            mean, var = f"{path}running_mean", f"{path}running_var"

            def normalized(a: Arrays, x: Any) -> Any:
                factor, summand = a.get(weight), a.get(bias)
                # Kernels for GPUs take both or none.
                if factor is None and summand is not None:
                    factor = torch.ones_like(summand)
                elif summand is None and factor is not None:
                    summand = torch.zeros_like(factor)
                return F.batch_norm(x, a[mean], a[var], factor, summand, True, layer.momentum, layer.eps)

            return normalized
        case nn.RMSNorm() | nn.LayerNorm():
            given = layer.normalized_shape
            last = len(given) if isinstance(given, tuple) else 1
            if isinstance(layer, nn.RMSNorm):
                return lambda a, x: F.rms_norm(x, x.shape[-last:], a.get(weight), layer.eps)
            return lambda a, x: F.layer_norm(x, x.shape[-last:], a.get(weight), a.get(bias), layer.eps)
        case nn.GroupNorm():
            return lambda a, x: F.group_norm(x, layer.num_groups, a.get(weight), a.get(bias), layer.eps)
        case nn.InstanceNorm2d():
            return lambda a, x: F.instance_norm(x, weight=a.get(weight), bias=a.get(bias), eps=layer.eps)
        case nn.PReLU():
            return lambda a, x: F.prelu(x, a[weight])
        case nn.Select():
            return lambda a, x: x[:, layer.indices]
        case nn.MultiheadAttention(dropout=0, window=None, soft_cap=None):
            return lambda a, x: _attention(layer, path, a, x)
        case nn.ClassToken():
            return lambda a, x: torch.cat([a[weight].expand(len(x), 1, -1), x], 1)
        case nn.Patches():
            size = pair(layer.patch_size)
            return lambda a, x: F.unfold(x, size, stride=size).transpose(1, 2)
        case nn.RNN(dropout=0) | nn.LSTM(dropout=0) | nn.GRU(dropout=0):
            return lambda a, x: _recurrent(layer, path, a, x)
        case nn.GELU():
            return lambda a, x: F.gelu(x, approximate=layer.approximate)
        case nn.Hardswish():
            return lambda a, x: F.hardswish(x)
    unsupported("PyTorch", layer.kind())


def _hash_grid(layer: nn.HashGrid, table: Any, x: Any) -> Any:
    """All levels at once: arrays (points, levels, corners, coordinates)."""
    import torch

    d, like = x.shape[1], {"device": x.device}
    levels, _ = grid_levels(d, layer.resolutions, 1 << layer.log2_table_size)
    resolution, first, mask = torch.tensor(levels, **like)[:, :, None].unbind(1)
    position = ((x[:, None] * 0.5 + 0.5) * resolution).clamp(min=0).minimum(resolution)
    cell = position.detach().floor().minimum(resolution - 1)
    ends = torch.cartesian_prod(*[torch.arange(2, **like)] * d).reshape(-1, d)
    at = cell.long()[:, :, None] + ends
    own = (at * (resolution[:, :, None] + 1) ** torch.arange(d, **like)).sum(-1)
    parts = at * torch.tensor(PRIMES[:d], **like) & 0xFFFFFFFF
    hashed = functools.reduce(torch.bitwise_xor, parts.unbind(-1)) & mask
    fraction = (position - cell)[:, :, None]
    weights = torch.where(ends.bool(), fraction, 1 - fraction).prod(-1, keepdim=True)
    return (weights * table[first + torch.where(mask > 0, hashed, own)]).sum(2).flatten(1)


def _attention(layer: nn.MultiheadAttention, path: str, arrays: Arrays, x: Any) -> Any:
    import torch

    F = torch.nn.functional
    heads, others = layer.num_heads, layer.key_value_heads
    projected = F.linear(x, arrays[f"{path}in_proj_weight"], arrays.get(f"{path}in_proj_bias"))
    by_head = projected.unflatten(-1, (heads + 2 * others, -1)).transpose(1, 2)
    q, k, v = by_head.split((heads, others, others), 1)
    if layer.qk_norm:
        q = F.rms_norm(q, q.shape[-1:], arrays[f"{path}q_norm.weight"], QK_NORM_EPS)
        k = F.rms_norm(k, k.shape[-1:], arrays[f"{path}k_norm.weight"], QK_NORM_EPS)
    if layer.rotary_base is not None:
        q, k = _rotated(q, layer.rotary_base), _rotated(k, layer.rotary_base)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=layer.causal, enable_gqa=others < heads)
    joined = attended.transpose(1, 2).flatten(2)
    return F.linear(joined, arrays[f"{path}out_proj.weight"], arrays.get(f"{path}out_proj.bias"))


def _rotated(x: Any, base: float) -> Any:
    """Queries or keys (..., tokens, n), rotated by their positions; see `nn.MultiheadAttention`."""
    import torch

    tokens, n = x.shape[-2:]
    positions, pairs = (torch.arange(m, device=x.device, dtype=torch.float64) for m in (tokens, n // 2))
    angles = torch.outer(positions, base ** (-pairs / (n // 2))).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat([-second, first], -1) * angles.sin().to(x.dtype)


def _recurrent(layer: nn.RNN | nn.LSTM | nn.GRU, path: str, arrays: Arrays, x: Any) -> Any:
    import torch

    directions = 2 if layer.bidirectional else 1
    of_directions = [names for k in range(layer.num_layers) for names in layer.names(k)]
    weights = [arrays[path + name] for names in of_directions for name in names]
    first = x.new_zeros(len(of_directions), len(x), layer.hidden_size)
    options = weights, layer.bias, layer.num_layers, 0.0, True, layer.bidirectional, True  # in training, batch first
    if isinstance(layer, nn.LSTM):
        steps, hidden, _ = torch.lstm(x, (first, first), *options)
    else:
        name = f"rnn_{layer.nonlinearity}" if isinstance(layer, nn.RNN) else "gru"
        steps, hidden = getattr(torch, name)(x, first, *options)
    return steps if layer.output == "all" else torch.cat(list(hidden[-directions:]), 1)


def loss(cfg: Config, one_hot: Any) -> Callable[[Any, Any], Any]:
    """The loss of outputs (..., C) and labels (...). `one_hot` is the identity matrix (C, C)."""
    import torch

    F = torch.nn.functional
    found: dict[str, Callable[..., Any]] = {
        "cross_entropy": F.cross_entropy,
        "nll": F.nll_loss,
        "mse": lambda outputs, labels: F.mse_loss(outputs, one_hot[labels]),
        "l1": lambda outputs, labels: F.l1_loss(outputs, one_hot[labels]),
        "huber": lambda outputs, labels, delta: F.huber_loss(outputs, one_hot[labels], delta=delta),
        "binary_cross_entropy_with_logits": lambda outputs, labels, **weights: F.binary_cross_entropy_with_logits(
            outputs, one_hot[labels], **weights
        ),
    }
    if cfg.loss.kind not in found:
        unsupported("PyTorch", f"the loss {cfg.loss.kind}")
    f = found[cfg.loss.kind]
    options = {
        name: one_hot.new_tensor(value) if isinstance(value, tuple) else value
        for name, value in cfg.loss.options().items()
    }
    return lambda outputs, labels: f(outputs.flatten(0, -2), labels.flatten(), **options)


def optimizer(cfg: optim.Optimizer, parameters: Mapping[str, Any], captured: bool, products: Any = None) -> Any:
    """The same optimizer in PyTorch, fused where PyTorch has a fused one.

    Args:
        parameters: those that are trained, by path.
        captured: whether its steps are captured in a CUDA graph.
        products: the type of Muon's products; None: the type of the parameters.
    """
    by_kind: dict[str, list[tuple[optim.Optimizer, float, list[Any]]]] = {}
    for rule, lr, own in _rules(cfg, parameters):
        by_kind.setdefault(rule.kind(), []).append((rule, lr, own))
    made = [_of_kind(kind, rules, captured, products) for kind, rules in by_kind.items()]
    return made[0] if len(made) == 1 else Together(made)


def _rules(
    cfg: optim.Optimizer, parameters: Mapping[str, Any], factor: float = 1.0
) -> Iterator[tuple[optim.Optimizer, float, list[Any]]]:
    """Optimizers without groups, each with its learning rate and the parameters that it updates."""
    match cfg:
        case optim.Grouped():
            for rule, own, paths in cfg.rules(parameters):
                yield from _rules(rule, {path: parameters[path] for path in paths}, 1.0 if own is None else own)
        case optim.Muon():
            matrices = cfg.matrices({path: x.ndim for path, x in parameters.items()})
            others = {path: x for path, x in parameters.items() if path not in matrices}
            if matrices:
                yield cfg, cfg.lr * factor, [parameters[path] for path in matrices]
            if others:
                yield from _rules(cfg.rest, others, factor)
        case _:
            yield cfg, cfg.lr * factor, list(parameters.values())


def _of_kind(
    kind: str, rules: Sequence[tuple[optim.Optimizer, float, list[Any]]], captured: bool, products: Any
) -> Any:
    """One optimizer of PyTorch for rules of one kind, which may differ in their numbers."""
    import torch

    names = {
        "sgd": ("momentum", "weight_decay", "nesterov"),
        "adam": ("betas", "eps", "weight_decay", "amsgrad"),
        "adamw": ("betas", "eps", "weight_decay", "amsgrad"),
        "rmsprop": ("alpha", "eps", "weight_decay", "momentum"),
        "muon": ("momentum", "nesterov", "weight_decay", "ns_steps", "adjust_lr_fn", "normalize_weights"),
    }.get(kind)
    if names is None:
        unsupported("PyTorch", kind)
    groups = [{"params": own, "lr": lr, **{name: getattr(rule, name) for name in names}} for rule, lr, own in rules]
    match kind:
        case "sgd":
            return torch.optim.SGD(groups, fused=True)
        case "adam" | "adamw":
            kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
            return kinds[kind](groups, fused=True, capturable=captured)
        case "rmsprop":
            return torch.optim.RMSprop(groups, foreach=True, capturable=captured)
    return muon(groups, products)


class Together:
    """Several optimizers of PyTorch, used as one."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {key: x for each in self.optimizers for key, x in each.state.items()}

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)


def muon(groups: Sequence[dict[str, Any]], products: Any) -> Any:
    """Muon (Jordan et al. 2024) with the options of `optim.Muon`. That of PyTorch takes matrices only.

    `products` is the type of the products of the Newton-Schulz steps; None: the type of the parameters.
    """
    import torch

    def orthogonal(matrix: Any, steps: int) -> Any:
        a, b, c = COEFFICIENTS
        x = matrix if products is None else matrix.to(products)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / x.norm().clamp(min=EPS)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return (x.T if tall else x).to(matrix.dtype)

    class Muon(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.move(p, group)

        def move(self, p: Any, group: dict[str, Any]) -> None:
            direction, momentum = p.grad, group["momentum"]
            if momentum:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum_buffer"].mul_(momentum).add_(p.grad)
                direction = p.grad + momentum * buffer if group["nesterov"] else buffer
            rows, columns = p.shape[0], p.numel() // p.shape[0]
            factors = {"original": max(1, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}
            if group["normalize_weights"]:
                p.mul_(rows**0.5 / p.norm())
            p.mul_(1 - group["lr"] * group["weight_decay"])
            moved = orthogonal(direction.reshape(rows, columns), group["ns_steps"]).reshape(p.shape)
            p.sub_(group["lr"] * factors.get(group["adjust_lr_fn"], 1.0) * moved)

    return Muon(groups, {})
