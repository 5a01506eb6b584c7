"""adtrain: train neural networks on a readable automatic-differentiation core.

``import adtrain as ad`` gives arrays (`array`), operations on them (`ops`), operations of your own (`custom_op`),
transformations of functions (`grad`, `value_and_grad`, `vjp`, `jvp`, `hvp`, `jacobian`, `hessian`, `custom_vjp`,
`vmap`), compiled functions (`jit`), layers (`nn`), optimizers (`optim`), names in configs for classes of your own
(`register`), and functions of trees of arrays (`tree`).

`train` trains the network of a config, `load` reads a trained run or a tree of arrays, `save` writes a tree. `graph`
draws a function.
"""

from typing import TYPE_CHECKING, Any

import adtrain.startup  # noqa: F401  (before all that takes time to import)
from adtrain import nn, ops, optim, register
from adtrain.backends.cpu import CpuBackend
from adtrain.backends.cuda import load as load_cuda
from adtrain.core import tree
from adtrain.core.array import Array, Value, array, from_dlpack
from adtrain.core.autodiff import grad, hessian, hvp, jacobian, jvp, value_and_grad, vjp
from adtrain.core.custom import custom_vjp
from adtrain.core.devices import register_device
from adtrain.core.errors import AdtrainError, DeviceError, DTypeError, OptionError, ShapeError, TraceError
from adtrain.core.types import ArrayType
from adtrain.core.vmap import vmap
from adtrain.custom_op import custom_op
from adtrain.jit import jit
from adtrain.version import __version__ as __version__

if TYPE_CHECKING:
    from adtrain.api import load, save, train
    from adtrain.graphs import graph

register_device("cpu", CpuBackend)
register_device("gpu", load_cuda)

__all__ = [
    "AdtrainError",
    "Array",
    "ArrayType",
    "DTypeError",
    "DeviceError",
    "OptionError",
    "ShapeError",
    "TraceError",
    "Value",
    "array",
    "custom_op",
    "custom_vjp",
    "from_dlpack",
    "grad",
    "graph",
    "hessian",
    "hvp",
    "jacobian",
    "jit",
    "jvp",
    "load",
    "nn",
    "ops",
    "optim",
    "register",
    "save",
    "train",
    "tree",
    "value_and_grad",
    "vjp",
    "vmap",
]


def __getattr__(name: str) -> Any:
    """`graph`, `load`, `save` and `train`, at their first use: they import the config language and all of training."""
    if name in ("load", "save", "train"):
        from adtrain import api

        return getattr(api, name)
    if name == "graph":
        from adtrain import graphs

        return graphs.graph
    raise AttributeError(f"module 'adtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
