"""What to write here for attributes that arrays of PyTorch, TensorFlow, JAX and NumPy have, and PyTorch's modules and
optimizers."""

from __future__ import annotations

from types import ModuleType

_GRADIENT = "functions are differentiated, not arrays: write ad.grad(f)(x)"
_UNCHANGED = "arrays do not change: use x itself"
_NEW = "arrays do not change: write x = ops.where(mask, y, x)"
_ADVICE = {
    "assign": "arrays do not change: write x = y",
    "assign_add": "arrays do not change: write x = x + y",
    "assign_sub": "arrays do not change: write x = x - y",
    "at": _NEW,
    "backward": _GRADIENT,
    "bmm": "write x @ y",
    "bool": "write x.astype('bool')",
    "chunk": "write ops.split(x, parts, axis)",
    "clone": _UNCHANGED,
    "contiguous": _UNCHANGED,
    "copy": _UNCHANGED,
    "cpu": "write x.to('cpu')",
    "cuda": "write x.to('gpu')",
    "detach": "write ops.stop_gradient(x)",
    "dim": "write x.ndim",
    "dot": "write x @ y",
    "double": "write x.astype('float64')",
    "expand": "write ops.broadcast_to(x, shape)",
    "flatten": "write x.ravel()",
    "float": "write x.astype('float32')",
    "gather": "write ops.take_along_axis(x, indices, axis)",
    "grad": _GRADIENT,
    "index_select": "write ops.take(x, indices, axis)",
    "int": "write x.astype('int32')",
    "long": "write x.astype('int64')",
    "masked_fill": "write ops.where(mask, value, x)",
    "mm": "write x @ y",
    "numel": "write x.size",
    "permute": "write x.transpose(axes)",
    "pow": "write x ** y",
    "requires_grad": _GRADIENT,
    "requires_grad_": _GRADIENT,
    "scatter": _NEW,
    "swapaxes": "write x.transpose(axes)",
    "t": "write x.T",
    "tolist": "write x.numpy().tolist()",
    "type": "write x.astype(dtype)",
    "unsqueeze": "write ops.expand_dims(x, axis)",
    "view": "write x.reshape(shape)",
}

_TREES = "its arrays are a tree: write params, state = model.init(shape)"
_MODE = "the mode is an argument: model.forward(params, state, x, mode)"
_DEVICE = "arrays have the device: write tree.map(lambda x: x.to('gpu'), params)"

MODULES = {
    **dict.fromkeys(("parameters", "named_parameters", "state_dict", "load_state_dict"), _TREES),
    **dict.fromkeys(("train", "eval"), _MODE),
    **dict.fromkeys(("to", "cuda", "cpu"), _DEVICE),
}
"""What to write instead of attributes of PyTorch's modules."""

OPTIMIZERS = {
    "step": "write params, state = optimizer.update(params, grads, state)",
    "zero_grad": "gradients are not stored: remove it",
    "param_groups": "the learning rate is an argument: optimizer.update(params, grads, state, lr)",
}
"""What to write instead of attributes of PyTorch's optimizers."""


def advice(name: str, ops: ModuleType) -> str | None:
    """What to write instead of the attribute ``name`` of an array; None if that is unknown."""
    if name in _ADVICE:
        return _ADVICE[name]
    if name in ops.__all__:
        return f"write ops.{name}(x, ...)"
    if name.endswith("_") and not name.startswith("_"):
        return "arrays do not change: write x = x + y"
    return None
