"""adtrain: train neural networks on a readable automatic-differentiation core.

``import adtrain as ad`` gives arrays (`array`), operations on them (`ops`), operations of your own (`custom_op`),
transformations of functions (`grad`, `value_and_grad`, `vjp`, `jvp`, `jet`, `laplacian`, `hvp`, `jacobian`, `jacfwd`,
`hessian`, `custom_vjp`, `vmap`), curvature of losses (`per_example_grad`, `top_eigenvalues`), compiled functions
(`jit`), layers (`nn`), optimizers (`optim`), names in configs for classes of your own (`register`), and functions of
trees of arrays (`tree`).

`train` trains the network of a config, `load` reads a trained run or a tree of arrays, `save` writes a tree. `graph`
draws a function.
"""

from typing import TYPE_CHECKING

import adtrain.core.timeline  # noqa: F401  (imports count from here)
from adtrain.lazy import lazy_getattr

if TYPE_CHECKING:
    from adtrain import nn, ops, optim, register
    from adtrain.api import load, save, train
    from adtrain.core import tree
    from adtrain.core.array import Array, Value, array, from_dlpack
    from adtrain.core.autodiff import grad, value_and_grad, vjp
    from adtrain.core.custom import custom_vjp
    from adtrain.core.errors import AdtrainError, DeviceError, DTypeError, OptionError, ShapeError, TraceError
    from adtrain.core.forward import hessian, hvp, jacfwd, jacobian, jet, jvp, laplacian
    from adtrain.core.types import ArrayType
    from adtrain.core.vmap import vmap
    from adtrain.curvature import per_example_grad, top_eigenvalues
    from adtrain.custom_ops import custom_op
    from adtrain.graphs import graph
    from adtrain.jitted import jit

__version__ = "0.1.0"

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
    "jacfwd",
    "jacobian",
    "jet",
    "jit",
    "jvp",
    "laplacian",
    "load",
    "nn",
    "ops",
    "optim",
    "per_example_grad",
    "register",
    "save",
    "top_eigenvalues",
    "train",
    "tree",
    "value_and_grad",
    "vjp",
    "vmap",
]


__getattr__ = lazy_getattr(__name__)
"""`graph`, `load`, `save` and `train` import the config language and all of training; the others do not."""


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
