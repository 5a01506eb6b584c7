"""Ranks use the same kernels: those that rank 0 chose. Other candidates can give other bits."""

from __future__ import annotations

import json
from collections.abc import Sequence

from adtrain.backends.cuda.lower import Lowering, problem, problem_text
from adtrain.backends.cuda.tuner.autotune import tuning_problems
from adtrain.core import communicator
from adtrain.core.program import Equation
from adtrain.passes.place_collectives import exchanges_data


def share_choices(lowering: Lowering, equations: Sequence[Equation]) -> None:
    """Take over rank 0's choice for each problem of the equations, if exchanges are among them.

    Then all ranks compile them, at the same time. Ranks whose shards of a short batch have other sizes have other
    problems, for which their own choices stay. They also stay for problems without a `problem_text`.
    """
    if communicator.current().size == 1 or not any(map(exchanges_data, equations)):
        return
    problems = list(tuning_problems(lowering, equations))
    own = [[problem_text(x.equation), lowering.chosen(x.equation).label] for x in problems]
    of_first = json.loads(communicator.gathered_texts(json.dumps(own))[0])
    chosen = dict(map(tuple, of_first))
    for tuned, (name, label) in zip(problems, own, strict=True):
        if name is not None and chosen.get(name, label) != label:
            lowering.measured[problem(tuned.equation)] = {chosen[name]: 0.0}
