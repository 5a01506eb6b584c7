"""The Program of a training step after a named pass."""

from __future__ import annotations

from adtrain import training
from adtrain.config import Config
from adtrain.config.problems import known
from adtrain.core.errors import AdtrainError
from adtrain.core.program import Program

TRACE = "trace"
"""The name that selects the Program before the first pass."""


def step_program(cfg: Config, after: str | None = None) -> Program:
    """The Program of a step, after the passes up to the one named `after`; after all passes by default.

    If a pass runs twice, its first run is meant. No data are read.
    Raises AdtrainError, which lists the names, for an unknown pass, and ConfigError for an invalid config.
    """
    experiment = training.outline(cfg)
    names = [apply.__name__ for apply in experiment.passes]
    if after is None:
        end = len(names)
    elif after == TRACE:
        end = 0
    elif after in names:
        end = names.index(after) + 1
    else:
        raise AdtrainError(f"unknown pass {after!r}; {known(after, [TRACE, *dict.fromkeys(names)], 'passes')}")
    return experiment.step_program(passes=experiment.passes[:end])
