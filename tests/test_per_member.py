"""`per_member`: a function of one member as one equation, against `vmap`."""

from __future__ import annotations

from typing import Any

import numpy as np

import adtrain as ad
from adtrain import ops
from adtrain.core.fused import per_member_p
from adtrain.core.per_member import per_member
from adtrain.core.staging import stage

AXES = (0, None, 1, None)


def member(weight: Any, shared: Any, by_column: Any, number: Any) -> Any:
    def loss(weight: Any) -> Any:
        return ops.sum((shared @ weight) * by_column) * number

    value, grad = ad.value_and_grad(loss)(weight)
    return {"loss": value, "weight": weight - 0.1 * grad, "same": number + np.float32(1)}


def test_per_member_equals_vmap() -> None:
    rng = np.random.default_rng(0)
    arguments = [ad.array(rng.normal(size=shape).astype("float32")) for shape in ((3, 4, 5), (2, 4), (5, 3), ())]
    expected = ad.vmap(member, AXES)(*arguments)
    staged = stage(per_member(member, AXES))
    assert [e.primitive for e in staged.program(*arguments).equations if e.primitive is per_member_p] == [per_member_p]
    for found in (per_member(member, AXES)(*arguments), staged(*arguments)):
        for name in ("loss", "weight", "same"):
            np.testing.assert_allclose(found[name].numpy(), expected[name].numpy(), rtol=1e-6, atol=1e-6)
