"""Passes: functions from a Program to a better Program with the same results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from adtrain.core.backend import backend
from adtrain.core.program import Program
from adtrain.core.staging import Pass, Results, keeps
from adtrain.core.views import by_member
from adtrain.passes.fuse_map_reduce import fuse_map_reduce
from adtrain.passes.fuse_maxpool_gradients import fuse_maxpool_gradients
from adtrain.passes.fusion import fuse_loops, fuse_product
from adtrain.passes.order import optimize_regions, place_collectives, readers_first
from adtrain.passes.plan_memory import MemoryPlan, place_views, plan_memory
from adtrain.passes.products import flatten_rows, fold_transposes, sink_reshapes
from adtrain.passes.recompute import keep_derivatives
from adtrain.passes.simplify import (
    fold_collectives,
    fold_constants,
    merge_common_subexpressions,
    remove_dead_code,
    simplify_reshapes,
)

SIMPLIFY = (fold_collectives, fold_constants, simplify_reshapes, merge_common_subexpressions, remove_dead_code)
"""The passes that remove work without changing any bit of the results."""


@keeps(Results.FINITE)
def fuse(program: Program) -> Program:
    """``program`` after the fusion passes of the device that it runs on."""
    return backend(_device(program)).fuse(program)


def passes_of_ranks(passes: Sequence[Pass]) -> Sequence[Pass]:
    """The passes for a Program with exchanges. ``passes`` are applied to the parts between them."""
    optimize = partial(optimize_regions, passes=(*passes, _fuse_region))
    return fold_collectives, optimize, _fuse_exchanges, place_collectives_of_device, place_views


@keeps(Results.EXACT)
def _fuse_region(program: Program) -> Program:
    return backend(_device(program)).fuse_region(program)


@keeps(Results.EXACT)
def _fuse_exchanges(program: Program) -> Program:
    return backend(_device(program)).fuse_exchanges(program)


@keeps(Results.EXACT)
def place_collectives_of_device(program: Program) -> Program:
    """``program`` after `place_collectives`, with early updates where exchanges run beside kernels."""
    return place_collectives(program, backend(_device(program)).overlaps_exchanges)


def _device(program: Program) -> str:
    variables = (*program.inputs, *program.constants, *program.outputs)
    return next((v.device for v in variables if v.device != "cpu"), "cpu")


ALL = (*SIMPLIFY, fuse)
ALL_BY_MEMBER = (by_member, *ALL)
