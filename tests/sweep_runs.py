"""Sweeps on the small data set of `training_runs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from training_runs import load

from adtrain.core import tree
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.members import Group, Member, groups_of, members_of
from adtrain.sweeps.session import Session, SweepRun, prepared
from adtrain.sweeps.wave import WaveState, WaveTraining, run_to_end

LAYERS = "[linear: 8, batch_norm1d, relu, dropout: 0.1, linear: 3]"
SGD = "optimizer={sgd: {lr: 0.1, momentum: 0.9}}"


def session(folder: Path, sweep: str, *overrides: str, layers: str = LAYERS) -> Session:
    return prepared(load(folder, f"sweep={sweep}", *overrides, layers=layers), "cpu")


def groups(folder: Path, sweep: str, *overrides: str, layers: str = LAYERS) -> list[Group]:
    cfg = load(folder, f"sweep={sweep}", *overrides, layers=layers)
    return groups_of(cfg, members_of(cfg))


def trained(group: Group, members: Sequence[Member], epochs: int | None = None) -> WaveState:
    """The state of members that are trained together."""
    wave = WaveTraining(group, members, "cpu")
    for _ in range(epochs or group.experiment.epochs):
        assert run_to_end(wave.epoch_in_parts(lambda: False)) is not None
    return wave.host_state()


def bytes_of(state: WaveState, member: int) -> bytes:
    """All numbers of a member."""
    row = state.members.index(member)
    return b"".join(np.asarray(x)[row].tobytes() for x in tree.leaves(state.state))


def run(
    found: Session, path: Path, at_once: int | None = None, halving: bool = False, **followers: Callable[..., Any]
) -> SweepRun:
    """A sweep that is not trained yet, into a new folder or that of a stopped one; `followers` are those of the run."""
    new = not (path / "sweep.yaml").exists()
    if new:
        folder = SweepFolder.create(found.config, found.options(halving, None), path, found.digests)
    else:
        folder = SweepFolder.open(path)
    return SweepRun(found, folder, found.plans(at_once), **followers)


def after(calls: int) -> Callable[[], bool]:
    """A function that returns True from the call with this number on."""
    count = iter(range(1, 10**9))
    return lambda: next(count) >= calls
