"""Taylor mode: the trace that propagates Taylor coefficients, of which forward mode is order 1.

A value is a power series in a parameter t: y(t) = y_0 + y_1 t + ... + y_K t^K. Its coefficient of index k is the k-th
derivative by t at 0, divided by k!. An operation computes the coefficients of its outputs from those of its arguments
(A. Griewank, A. Walther: "Evaluating Derivatives", 2nd ed., ch. 13). The rules follow from the record of a primitive:

- A linear one (`Trait.LINEAR`) is applied to the coefficients of each index.
- A bilinear one (`Trait.BILINEAR`) obeys Leibniz' rule: y_k is the sum of the products of a_j and b_(k-j).
- All others are y = f(x), with a derivative that `vjp` gives: t y' = J(x, y) t x'. Coefficient k of this equation has
  k y_k on the left, and only y_0 to y_(k-1) on the right, because t x' has no coefficient 0. For elementwise primitives
  J is diagonal, so the pullback is the product with J. Otherwise it is the transpose of the pullback, which reverse
  mode gives (J. Townsend: "A new trick for calculating Jacobian vector products", 2017).
- A primitive with a `composition` is differentiated as that composition, and one with a `taylor` rule by it.

So each derivative is stated once, in the record of its primitive. A coefficient that is None is zero.

Collapsed Taylor mode is for sums over directions, such as the Laplacian. Coefficients of index 1 to K - 1 are mapped:
each direction is a member of a `BatchTrace`. The last coefficient is linear in itself, so it is summed over the
directions in each operation, and has no axis of directions (F. Dangel et al.: "Collapsing Taylor mode automatic
differentiation", 2025).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias

from adtrain.core.array import Value
from adtrain.core.autodiff import Recording, spread_numbers
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import Tracer, bind
from adtrain.core.types import ArrayType
from adtrain.core.vmap import BatchTrace

Coefficient: TypeAlias = "Value | None"
"""A Taylor coefficient one level down; None is zero."""


class TaylorTracer(Tracer):
    """A power series. Its coefficients are computed when they are asked for, in the order of their indices.

    Attributes:
        homogeneous: coefficient 0 is zero: the value is linear in t x' of an argument x.
    """

    __slots__ = ("_compute", "_known", "device", "dtype", "homogeneous", "shape", "trace")

    def __init__(
        self,
        trace: TaylorTrace,
        type: ArrayType,
        device: str,
        compute: Callable[[int], Coefficient] | None,
        homogeneous: bool = False,
        known: Iterable[Coefficient] = (),
    ) -> None:
        self.trace: TaylorTrace = trace
        self.shape, self.dtype = type.shape, type.dtype
        self.device = device
        self.homogeneous = homogeneous
        self._compute = compute
        self._known = list(known)

    def coefficient(self, k: int) -> Coefficient:
        """The coefficient of t^k."""
        while len(self._known) <= k:
            index = len(self._known)
            if index == 0 and self.homogeneous:
                self._known.append(None)
                continue
            assert self._compute is not None
            self._known.append(self._compute(index))
        if len(self._known) > self.trace.order:
            self.release()
        return self._known[k]

    def release(self) -> None:
        """Forget how coefficients are computed, and with it the arguments."""
        self._compute = None

    @property
    def primal(self) -> Value:
        """The value at t = 0, one level down."""
        found = self.coefficient(0)
        return Value._ops.zeros(self.shape, self.dtype, self.device) if found is None else found


class TaylorTrace:
    """Computes the coefficients of each operation's outputs one level down, up to that of t^order.

    Args:
        directions: for collapsed Taylor mode the trace of which each direction is a member.
    """

    def __init__(self, level: int, order: int, directions: BatchTrace | None = None) -> None:
        self.level = level
        self.order = order
        self.directions = directions
        self.live = True
        self._inside: dict[int, list[TaylorTracer]] = {}
        """For each thread that evaluates a rule, the series that the rule has made."""

    def input(self, primal: Value, coefficients: Sequence[Coefficient]) -> TaylorTracer:
        """The series of an argument, with its coefficients of t, t^2, ..., t^order."""
        of = ArrayType(primal.shape, primal.dtype)
        return TaylorTracer(self, of, primal.device, None, known=(primal, *coefficients))

    def owns(self, x: Any) -> bool:
        """Whether ``x`` is a series of this trace."""
        return isinstance(x, TaylorTracer) and x.trace is self

    def lower(self, x: Any) -> Any:
        """``x`` one level down: coefficient 0 of a series of this trace; anything else unchanged."""
        return x.primal if self.owns(x) else x

    def coefficient(self, x: Any, k: int) -> Coefficient:
        """The coefficient of t^k of a series of this trace, or of a constant."""
        if self.owns(x):
            found: Coefficient = x.coefficient(k)
            return found
        return x if k == 0 else None

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        types = primitive.output_types(args, params)
        if not primitive.differentiable or all(t.dtype.kind != "f" for t in types):
            return bind(primitive, *map(self.lower, args), **params)
        if primitive.composition is not None:
            return self._composed(primitive, args, params)
        args = spread_numbers(primitive, args, self.owns)
        moving = [i for i, x in enumerate(args) if self.owns(x)]
        homogeneous = any(self._lowest(x) for x in args)
        own_rule = primitive.taylor is not None or not {Trait.LINEAR, Trait.BILINEAR}.isdisjoint(primitive.traits)
        if homogeneous and not own_rule:
            outputs = self._by_linearity(primitive, args, params, types)
        elif own_rule or primitive.expression is not None:
            rule = self._rule(primitive, args, params, moving)
            out = TaylorTracer(self, types[0], args[0].device, lambda k: rule(out, k), homogeneous)
            outputs = (out,)
            self._finish(outputs)
        else:

            def primals() -> Sequence[Value]:
                found = bind(primitive, *map(self.lower, args), **params)
                return (found,) if len(types) == 1 else found

            def pullback(out: Sequence[Value]) -> Callable[[Sequence[Any]], Sequence[Coefficient]]:
                return primitive.pullback(out if len(types) > 1 else out[0], args, params, moving)

            outputs = self.outputs(types, args[0].device, primals, [args[i] for i in moving], pullback)
        return outputs[0] if len(types) == 1 else outputs

    def outputs(
        self,
        types: Sequence[ArrayType],
        device: str,
        primals: Callable[[], Sequence[Value]],
        moving: Sequence[Any],
        pullback: Callable[[Sequence[Value]], Callable[[Sequence[Any]], Sequence[Coefficient]]],
    ) -> tuple[Value, ...]:
        """The outputs of any operation, by the transpose of its pullback. Those not of floating point are primals.

        Args:
            types, device: of the outputs.
            primals: computes the outputs one level down.
            moving: the arguments that are series.
            pullback: from the outputs to the pullback, which takes a cotangent, or None, for each output, and returns
                one, or None, for each moving argument.
        """
        found: list[Sequence[Value]] = []
        products: list[Sequence[Any]] = []
        floats = [i for i, t in enumerate(types) if t.dtype.kind == "f"]

        def compute(i: int, k: int) -> Coefficient:
            if k == 0:
                if not found:
                    found.append(primals())
                return found[0][i]
            if not products:
                products.append(self._by_transpose([out[i] for i in floats], moving, pull, floats, len(types)))
            return _divided(self.coefficient(products[0][floats.index(i)], k), k)

        out: list[Value] = []
        for i, t in enumerate(types):
            if i in floats:
                out.append(TaylorTracer(self, t, device, partial(compute, i)))
            else:
                out.append(compute(i, 0))  # type: ignore[arg-type]

        def pull(cts: Sequence[Any]) -> Sequence[Coefficient]:
            return pullback(tuple(out))(cts)

        self._finish([out[i] for i in floats])  # type: ignore[misc]
        return tuple(out)

    def _by_linearity(
        self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any], types: Sequence[ArrayType]
    ) -> tuple[Value, ...]:
        """The outputs of an operation on homogeneous series, in which it is linear.

        They are the sum of those for each coefficient of these arguments. For one coefficient the arguments are
        constants, and so the rules for other arguments apply.
        """
        parts: dict[int, Sequence[Value]] = {}

        def part(j: int) -> Sequence[Value]:
            if j not in parts:
                given = list(args)
                for i, x in enumerate(args):
                    if self._lowest(x):
                        found = self.coefficient(x, j)
                        given[i] = Value._ops.zeros(x.shape, x.dtype, x.device) if found is None else found
                out = bind(primitive, *given, **params)
                parts[j] = (out,) if len(types) == 1 else out
            return parts[j]

        def compute(i: int, k: int) -> Coefficient:
            return self.total((self.coefficient(part(j)[i], k - j) for j in range(1, k + 1)), k)

        out = [TaylorTracer(self, t, args[0].device, partial(compute, i), True) for i, t in enumerate(types)]
        self._finish(out)
        return tuple(out)

    def _finish(self, outputs: Sequence[TaylorTracer]) -> None:
        """Compute all coefficients of an operation's outputs; but inside a rule they are computed on demand."""
        thread = threading.get_ident()
        if thread in self._inside:
            self._inside[thread] += outputs
            return
        made = self._inside[thread] = []
        try:
            for x in outputs:
                x.coefficient(self.order)
        finally:
            del self._inside[thread]
            for x in made:
                x.release()

    def _rule(
        self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any], moving: Sequence[int]
    ) -> Callable[[TaylorTracer, int], Coefficient]:
        """The function from the one output and an index to the output's coefficient."""
        products: list[Any] = []

        def apply(*values: Value) -> Value:
            found: Value = bind(primitive, *values, **params)
            return found

        def rule(out: TaylorTracer, k: int) -> Coefficient:
            if k == 0:
                return apply(*map(self.lower, args))
            if primitive.taylor is not None:
                found: Coefficient = primitive.taylor(self, k, out, *args, **params)
                return found
            if Trait.LINEAR in primitive.traits:
                return self._linear(primitive, args, params, moving, k)
            if Trait.BILINEAR in primitive.traits:
                a, b = args
                return self.leibniz(apply, a, b, k, symmetric=primitive.expression is not None)
            if not products:
                products.append(self._by_pullback(primitive, out, args, params, moving))
            return _divided(self.coefficient(products[0], k), k)

        return rule

    def _linear(
        self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any], moving: Sequence[int], k: int
    ) -> Coefficient:
        found = {i: self.coefficient(args[i], k) for i in moving}
        given = {i: x for i, x in found.items() if x is not None}
        if not given:
            return None
        floats = [i for i, x in enumerate(args) if x.dtype.kind == "f"]
        lower = [self.lower(x) for x in args]
        if primitive.expression is not None and len(given) < len(floats):  # a sum, without the zeros
            pulled = (primitive.rule(i)(None, *lower, **params)(x) for i, x in given.items())  # type: ignore[misc]
            return self.total(pulled, k)
        for i in floats:
            x = lower[i]
            lower[i] = given[i] if i in given else Value._ops.zeros(x.shape, x.dtype, x.device)
        result: Value = bind(primitive, *lower, **params)
        return result

    def leibniz(
        self,
        apply: Callable[[Value, Value], Value],
        a: Value,
        b: Value,
        k: int,
        first: int = 0,
        symmetric: bool = False,
    ) -> Coefficient:
        """The sum of ``apply(a_j, b_(k-j))`` over j from ``first`` to k, for a bilinear function."""
        products: list[Coefficient] = []
        square = symmetric and a is b and first == 0
        first, last = max(first, self._lowest(a)), k - self._lowest(b)
        for j in range(first, min(last, k // 2 if square else k) + 1):
            x, y = self.coefficient(a, j), self.coefficient(b, k - j)
            if x is not None and y is not None:
                product = apply(x, y)
                products.append(product * 2.0 if square and 2 * j < k else product)
        return self.total(products, k)

    def _lowest(self, x: Value) -> int:
        """The lowest index whose coefficient may differ from zero."""
        return int(isinstance(x, TaylorTracer) and x.trace is self and x.homogeneous)

    def total(self, values: Iterable[Coefficient], k: int) -> Coefficient:
        """A sum of terms of the coefficient of t^k, in collapsed mode also over the directions if k is the order."""
        given = [x for x in values if x is not None]
        if self.directions is not None and k == self.order:
            mapped = [x for x in given if self.directions.maps(x)]
            if mapped:
                over_directions = self.directions.lower(reduce(lambda x, y: x + y, mapped)).sum(0)
                given = [over_directions, *(x for x in given if not self.directions.maps(x))]
        return reduce(lambda x, y: x + y, given) if given else None

    def _t_derivative(self, x: TaylorTracer) -> TaylorTracer:
        """t x'(t)."""

        def compute(k: int) -> Coefficient:
            found = x.coefficient(k)
            return found if found is None or k == 1 else found * float(k)

        return self._made(TaylorTracer(self, ArrayType(x.shape, x.dtype), x.device, compute, homogeneous=True))

    def _made(self, x: TaylorTracer) -> TaylorTracer:
        """A series that a rule uses, to be released at the end of the operation."""
        self._inside[threading.get_ident()].append(x)
        return x

    def _by_pullback(
        self,
        primitive: Primitive,
        out: Value,
        args: Sequence[Value],
        params: Mapping[str, Any],
        moving: Sequence[int],
    ) -> Any:
        """t y' of an elementwise primitive's output y. Its Jacobian is diagonal, so the pullback multiplies by it."""
        rules = [(primitive.rule(i), args[i]) for i in moving]
        terms = [rule(out, *args, **params)(self._t_derivative(x)) for rule, x in rules if rule is not None]  # type: ignore[arg-type]
        return reduce(lambda x, y: x + y, terms) if terms else None

    def _by_transpose(
        self,
        out: Sequence[Any],
        moving: Sequence[TaylorTracer],
        pull: Callable[[Sequence[Any]], Sequence[Coefficient]],
        floats: Sequence[int],
        count: int,
    ) -> Sequence[Any]:
        """t y' of each output of floating point, by the transpose of a pullback."""
        zeros = [
            self._made(TaylorTracer(self, ArrayType(y.shape, y.dtype), y.device, lambda k: None, homogeneous=True))
            for y in out
        ]
        used: list[int] = []

        def pulled(*cts: Value) -> list[Value]:
            every: list[Any] = [None] * count
            for i, ct in zip(floats, cts, strict=True):
                every[i] = ct
            found = [(i, x) for i, x in enumerate(pull(every)) if x is not None]
            used[:] = [i for i, _ in found]
            return [x for _, x in found]

        recording = Recording("jvp", pulled, zeros, range(len(zeros)), has_aux=False)
        return recording.pull_back([self._t_derivative(moving[i]) for i in used], retain=False)

    def _composed(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        """The outputs by the primitive's composition. Those that it leaves out have no derivative."""
        assert primitive.composition is not None
        found = primitive.composition(*args, **params)
        outputs = (found,) if isinstance(found, Value) else tuple(found)
        types = primitive.output_types(args, params)
        if len(outputs) < len(types):
            outputs += tuple(bind(primitive, *map(self.lower, args), **params)[len(outputs) :])
        return outputs[0] if len(types) == 1 else outputs


def _divided(x: Coefficient, k: int) -> Coefficient:
    return x if x is None or k == 1 else x * (1.0 / k)
