"""register: layers, losses, data sets, metrics and others of your own, by their names in a config.

    @ad.register.layer("shifted")
    class Shifted(ad.nn.Module):
        by: float = 2.0

        def output_shape(self, shape):
            return shape

        def forward(self, params, state, x, mode):
            return x + self.by, state

The class becomes a frozen dataclass. Its fields are the options: their names, types, bounds and defaults are those of
the annotations. `adtrain.option_types` has types with bounds, such as Positive and Size. A config and a call in
Python are checked by them. The results of its methods are checked too. So a mistake is an error in one line.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from adtrain import ops
from adtrain.augment import Augmentation, Batch
from adtrain.core import tree
from adtrain.core.array import Value, type_with_article
from adtrain.core.errors import Definition, OptionError, caller
from adtrain.core.options import CheckedArguments, checked_options, is_integer, shown
from adtrain.core.types import ArrayType
from adtrain.custom_ops import OWN_OPS, OwnOp
from adtrain.metrics import ByClass, ClassPredictions
from adtrain.nn import Module
from adtrain.optim import Optimizer, Schedule
from adtrain.plugins import PluginError, watched

__all__ = ["augment", "dataset", "layer", "loss", "metric", "op", "optimizer", "schedule"]

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
Check: TypeAlias = Callable[..., Any]


class Decorator(Protocol):
    """A function from a class to the same class."""

    def __call__(self, cls: C, /) -> C: ...


_defined: dict[str, Definition] = {}
"""Where each name was registered."""


def layer(name: str) -> Decorator:
    """Register a subclass of `nn.Module`.

    Raises:
        OptionError: the name is taken or not an identifier, or the class lacks a method, or types of its options.
    """
    checks: dict[str, Check] = {
        "output_shape": _output_shape,
        "forward": _forward,
        "parameter_shapes": _parameter_shapes,
        "new_arrays": _new_arrays,
    }
    return _decorator("layer", name, Module, checks)


def loss(name: str) -> Decorator:
    """Register a class whose objects map outputs (N, classes) and labels int64 (N,) to the mean loss, shape ().

    Probabilities are the softmax of the outputs. Errors are those of `layer`.
    """
    return _decorator("loss", name, object, {"__call__": _scalar("the mean loss")})


def optimizer(name: str) -> Decorator:
    """Register a subclass of `optim.Optimizer`. Errors are those of `layer`."""
    return _decorator("optimizer", name, Optimizer, {"init": _initial, "updated": _updated})


def schedule(name: str) -> Decorator:
    """Register a subclass of `optim.Schedule`, whose objects map the step to a factor on the learning rate.

    Its unit is the step. Fields `total_steps` and `steps_per_epoch` are no options: they get these numbers of the
    training.
    Errors are those of `layer`.
    """
    return _decorator("schedule", name, Schedule, {"__call__": _scalar("the factor")})


def augment(name: str) -> Decorator:
    """Register a subclass of `augment.Augmentation`. Errors are those of `layer`."""
    return _decorator("augmentation", name, Augmentation, {"__call__": _augmented})


def dataset(name: str) -> Decorator:
    """Register a class with a method `load()`, which returns the training part and the test part.

    A part is a pair of arrays, images and labels, of the shapes and types that NPZ files can have. The test part may be
    None: then `data.test` is the fraction held out. Each call must return the same arrays, because `eval` and a resumed
    run load them again. Errors are those of `layer`.
    """
    return _decorator("data set", name, object, {"load": _loaded})


def metric(name: str) -> Decorator:
    """Register a class whose objects map `metrics.ClassPredictions` to a finite number, or to a `metrics.ByClass`.

    For `training.best_by` higher values are better, unless the class has the attribute `higher_is_better = False`.
    Errors are those of `layer`.
    """
    return _decorator("metric", name, object, {"__call__": _measured})


def op(name: str, *, samples: Callable[..., Sequence[Any]]) -> Callable[[F], F]:
    """Register a function of arrays that calls public operations or a `custom_op`; it is returned unchanged.

    `adtrain gradcheck --plugin FILE` checks its derivatives, and its compiled Program against NumPy. `adtrain bench
    --plugin FILE` times it. A `custom_op` with samples is registered by itself.

    Args:
        samples: from a NumPy generator to arguments. With a second parameter, a size, `bench` times several sizes.

    Raises:
        OptionError: the name is taken or not an identifier.
    """
    here = caller(1)

    def register(f: F) -> F:
        if not name.isidentifier():
            raise OptionError(f"op {name!r}: expected an identifier")
        if name in ops.__all__:
            raise OptionError(f"op {name}: the name is taken by adtrain.ops; choose another at {here}")
        if name in OWN_OPS and not here.replaces(earlier := OWN_OPS[name].place):
            raise OptionError(f"op {name}: the name is taken at {earlier}; choose another at {here}")
        OWN_OPS[name] = OwnOp(name, f, here, samples)
        return f

    return register


def _decorator(family: str, name: Any, base: type, checks: dict[str, Check]) -> Decorator:
    here = caller(2)
    if not isinstance(name, str):  # the decorator without a call gets the class
        given = name.__name__ if isinstance(name, type) else shown(name)
        raise OptionError(f'{family}: found {given} in place of the name, expected a decorator with ("name")')

    def register(cls: C) -> C:
        from adtrain.config import specs

        _check_name(family, name, here)
        if not isinstance(cls, type):
            raise OptionError(f"{family} {name}: found {type_with_article(cls)}, expected a class")
        if not issubclass(cls, base):
            raise OptionError(f"{family} {name}: {cls.__name__} is not a subclass of {base.__module__}.{base.__name__}")
        for method in [*getattr(cls, "__abstractmethods__", ()), *checks]:
            if method in getattr(cls, "__abstractmethods__", ()) or not hasattr(cls, method):
                raise OptionError(f"{family} {name}: {cls.__name__} has no method {method}")
        made: Any = cls if "__dataclass_params__" in vars(cls) else dataclass(frozen=True)(cls)
        made.kind, made.registered_at = classmethod(lambda _: name), f"{here}: {name}"
        specs.add(family, name, made)
        made.__init__ = watched(made.__init__, f"{made.registered_at}: {cls.__name__}()")
        if not issubclass(made, CheckedArguments):
            made.__init__ = checked_options(made.__init__, name)
        for method, check in checks.items():
            setattr(made, method, _with_check(getattr(made, method), f"{made.registered_at}: {method}", check))
        _defined[name] = here
        return made

    return register


def _check_name(family: str, name: str, here: Definition) -> None:
    from adtrain.config import explain, specs

    if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in {*explain.MODELS, *specs.FAMILIES}:
        raise OptionError(f"{family} {name!r}: expected lower-case letters, digits and _, not a key of configs")
    if name in _defined:
        if not here.replaces(_defined[name]):
            raise OptionError(f"{family} {name}: the name is taken at {_defined[name]}; choose another at {here}")
    elif (spec := specs.by_kind(name)) is not None:
        taken = f"{spec.target.__module__}.{spec.target.__qualname__}"
        raise OptionError(f"{family} {name}: the name is taken by {taken}; choose another at {here}")


def _with_check(method: Callable[..., Any], what: str, check: Check) -> Callable[..., Any]:
    """The method, whose results are checked; `what` names it in messages."""
    method, where = watched(method, what), what.removesuffix(" __call__")

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **named: Any) -> Any:
        return check(method(self, *args, **named), where, self, *args, **named)

    return checked


# The checks of what methods return. Each gets the result, the method's name for messages, the object and the arguments,
# and gives the result that the caller gets.


def _output_shape(found: Any, where: str, layer: Module, shape: Any) -> Any:
    if not _is_shape(found):
        expected = "expected the shape of one sample, a tuple of positive integers"
        raise PluginError(f"{where} returned {shown(found)}, {expected}")
    return tuple(found)


def _forward(found: Any, where: str, layer: Module, params: Any, state: Any, x: Value, mode: Any) -> Any:
    out, new_state = _pair(found, where, "the output and the state")
    _check_value(out, where)
    _check_tree(new_state, where, "the state")
    given = ArrayType(out.shape, out.dtype)
    expected = ArrayType((x.shape[0], *layer.output_shape(x.shape[1:])), x.dtype)
    if given != expected:
        raise PluginError(f"{where} returned {given}, expected {expected}, as output_shape gives")
    return found


def _parameter_shapes(found: Any, where: str, layer: Module, shape: Any) -> Any:
    if not isinstance(found, dict) or not all(isinstance(name, str) and _is_shape(x) for name, x in found.items()):
        expected = "expected a dict from the name of each parameter to its shape, a tuple of positive integers"
        raise PluginError(f"{where} returned {shown(found)}, {expected}")
    return {name: tuple(x) for name, x in found.items()}


def _new_arrays(found: Any, where: str, layer: Module, shape: Any, rng: Any, dtype: Any) -> Any:
    params, state = _pair(found, where, "the parameters and the state")
    _check_tree(params, where, "the parameters")
    _check_tree(state, where, "the state")
    shapes, expected = {key: getattr(x, "shape", None) for key, x in params.items()}, layer.parameter_shapes(shape)
    if shapes != expected:
        raise PluginError(f"{where} returned {shapes}, expected {expected}, as parameter_shapes gives")
    return found


def _scalar(what: str) -> Check:
    def check(found: Any, where: str, *_: Any) -> Any:
        _check_value(found, where.removesuffix(":"))
        if found.shape != () or found.dtype.kind != "f":
            given = ArrayType(found.shape, found.dtype)
            raise PluginError(f"{where} returned {given}, expected {what}, a float of shape ()")
        return found

    return check


def _initial(found: Any, where: str, optimizer: Optimizer, params: Any) -> Any:
    _check_tree(found, where, "the state")
    step = found.get("step")
    if not isinstance(step, Value) or step.shape or step.dtype != np.int64:
        given = ArrayType(step.shape, step.dtype) if isinstance(step, Value) else shown(step)
        expected = "expected 0 as int64[], the number of updates so far"
        raise PluginError(f"{where} returned {given} for the key step, {expected}")
    return found


def _updated(found: Any, where: str, optimizer: Any, params: Any, grads: Any, state: Any, lr: Value) -> Any:
    new_params, new_state = _pair(found, where, "the parameters and the state")
    for what, new, old in (("parameters", new_params, params), ("state", new_state, state)):
        if tree.flatten_like(tree.flatten(old)[1], new) is None:
            raise PluginError(f"{where} returned a tree of {what} of another structure than it was given")
    return found


def _augmented(found: Any, where: str, augmentation: Augmentation, batch: Batch, rng: Value) -> Any:
    if not isinstance(found, Batch):
        raise PluginError(f"{where} returned {type_with_article(found)}, expected a Batch")
    _check_value(found.images, f"{where} for the images,")
    _check_value(found.labels, f"{where} for the labels,")
    given, expected = (ArrayType(x.images.shape, x.images.dtype) for x in (found, batch))
    if given != expected:
        raise PluginError(f"{where} returned images {given}, expected {expected}")
    return found


def _loaded(found: Any, where: str, data_set: Any) -> Any:
    return _pair(found, where, "the training part and the test part, or None")


def _measured(found: Any, where: str, metric: Any, predictions: ClassPredictions) -> Any:
    by_class = found.by_class if isinstance(found, ByClass) else {}
    if not isinstance(by_class, dict):
        raise PluginError(f"{where} returned a ByClass of {shown(by_class)}, expected a dict from class to number")
    for x in [found.macro, *by_class.values()] if isinstance(found, ByClass) else [found]:
        if not _is_finite(x):
            what = shown(x) if isinstance(x, Real) else type_with_article(x)
            raise PluginError(f"{where} returned {what}, expected a finite number, or a ByClass of them")
    return found if isinstance(found, ByClass) else float(found)


def _is_finite(found: Any) -> bool:
    try:
        return isinstance(found, Real) and math.isfinite(found)
    except OverflowError:  # an integer above the largest float
        return False


def _is_shape(found: Any) -> bool:
    return isinstance(found, (tuple, list)) and all(is_integer(x, 1) for x in found)


def _pair(found: Any, where: str, what: str) -> Any:
    if not (isinstance(found, tuple) and len(found) == 2):
        raise PluginError(f"{where} returned {type_with_article(found)}, expected a tuple of two: {what}")
    return found


def _check_tree(found: Any, where: str, what: str) -> None:
    if not isinstance(found, dict):
        raise PluginError(f"{where} returned {shown(found)}, expected a dict of arrays for {what}")
    for x in tree.leaves(found):
        _check_value(x, f"{where}, in {what},")


def _check_value(found: Any, where: str) -> None:
    if not isinstance(found, Value):
        raise PluginError(f"{where} returned {type_with_article(found)}, expected an array")
