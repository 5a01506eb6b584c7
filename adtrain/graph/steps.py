"""The Program of a training step as it is after a pass, chosen by name."""

from __future__ import annotations

from adtrain import training
from adtrain.config import Config
from adtrain.config.problems import known
from adtrain.core.errors import AdtrainError
from adtrain.core.program import Program

TRACE = "trace"
"""The name for: before the first pass."""


def step_program(cfg: Config, after: str | None = None) -> Program:
    """The step on one batch as a Program, after the pass of that name and all before it; by default after all.

    A pass that is run twice counts the first time. No data are read.
    Raises AdtrainError that lists the names for one that is none, and ConfigError for a config that cannot train.
    """
    experiment = training.outline(cfg)
    names = [improve.__name__ for improve in experiment.passes]
    if after is None:
        end = len(names)
    elif after == TRACE:
        end = 0
    elif after in names:
        end = names.index(after) + 1
    else:
        raise AdtrainError(f"unknown pass {after!r}; {known(after, [TRACE, *dict.fromkeys(names)], 'passes')}")
    return experiment.step_program(passes=experiment.passes[:end])
