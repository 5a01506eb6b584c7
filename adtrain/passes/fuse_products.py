"""Product fusion: a matrix product and the elementwise equation that reads it, as one kernel with an epilogue.

It fuses the bias and activation of a linear layer, the activation's mask on the input gradient, and the update of a
weight from its gradient. The product itself is never written to memory.
"""

from __future__ import annotations

from adtrain.core.primitive import Trait
from adtrain.core.program import LOOPS, PRODUCT, Equation, Program, Variable
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.fusion import Fusion, FusionPass
from adtrain.passes.groups import Groups


class EpilogueFusion(Fusion):
    """A product or convolution and the elementwise equation that reads it: its epilogue."""

    early = True

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        """Whether a kernel of ``product`` can compute ``epilogue``."""
        raise NotImplementedError

    def weight(self, producer: Equation) -> float:
        """Where a sum of two products can join either one, it joins the longer one, which hides more of its traffic."""
        return producer.cost.flops

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        product, e = groups.equations[producer], groups.equations[reader]
        alone = all(len(groups.members[groups.of[i]]) == 1 for i in (producer, reader))
        return alone and by_element(e) and self.takes(product, e) and reads_by_element(e, value)


class ProductFusion(EpilogueFusion):
    """A matrix product with an epilogue."""

    form = PRODUCT

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        """On the CPU a batch may have one axis. An epilogue counts rows and columns in 32 bits."""
        c = product.outputs[0]
        if not product.has(Trait.MATMUL) or max(c.type.shape[-2:]) >= 2**31:
            return False
        return len(c.type.shape) <= 3 or c.device != "cpu"


fuse_product = FusionPass((ProductFusion,))


def reads_by_element(equation: Equation, v: Variable) -> bool:
    """Whether each element of the elementwise result needs only the same element of `v`."""
    if equation.outputs[0].type.shape != v.type.shape:
        return False
    if equation.form != LOOPS:
        return not equation.has(Trait.BROADCAST)
    body: Program = equation.params["body"]
    inner = body.inputs[equation.inputs.index(v)]
    return all(inner not in e.inputs or not e.has(Trait.BROADCAST) for e in body.equations)
