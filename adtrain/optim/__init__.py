"""Optimizers and learning-rate schedules as pure functions over trees of arrays.

Typical use:

    optimizer = optim.Adam(lr=1e-3)
    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(params, grads, opt_state)
"""

from __future__ import annotations

from adtrain.optim import schedules
from adtrain.optim.elementwise import SGD, Adam, AdamW, Lion, RMSprop
from adtrain.optim.groups import NO_DECAY, Group, Grouped, grouped
from adtrain.optim.lbfgs import LBFGS, Sequence
from adtrain.optim.muon import Muon
from adtrain.optim.optimizer import (
    ACCEPTED,
    AVERAGES,
    EMA,
    LOSS,
    STOPPED,
    Average,
    Lookahead,
    Optimizer,
    OptState,
    clip_by_norm,
    clip_by_value,
)
from adtrain.optim.schedules import SCHEDULES, Plateau, Schedule, plateau_of

OPTIMIZERS: dict[str, type[Optimizer]] = {
    optimizer.kind(): optimizer for optimizer in (SGD, Adam, AdamW, RMSprop, Lion, Muon, LBFGS, Sequence)
}
"""Optimizers by their name in a config."""
