"""The files with the states of a sweep's waves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.config.values import Total
from adtrain.core import tree
from adtrain.core.errors import AdtrainError
from adtrain.files import remove_temporaries, unwritable, write_atomic
from adtrain.sweeps.members import Group
from adtrain.sweeps.step import empty_tally
from adtrain.sweeps.wave import WaveState
from adtrain.training import tensor_file
from adtrain.training.checkpoint import named_state
from adtrain.training.step import TrainState

TALLY, LAST, BEST = "tally.", "last.", "best."
"""The prefixes of the names of a tally's arrays, and of the states after the last and after the best epoch."""


@dataclass(frozen=True)
class _Metadata:
    """The metadata of a file; see `WaveState`."""

    members: tuple[Total, ...]
    epochs: Total
    batches: Total
    frozen: tuple[Total, ...]


@dataclass(frozen=True)
class StateFiles:
    """The files in a folder: one for each wave of a group in a rung. Each is replaced as a whole."""

    folder: Path

    def path(self, rung: int, group: int, wave: int) -> Path:
        """The file of a wave's state."""
        return self.folder / f"rung{rung}-group{group}-wave{wave}.safetensors"

    def write(self, rung: int, group: int, wave: int, state: WaveState) -> None:
        """Replace the file of a wave's state. Raises AdtrainError where it cannot be written."""
        path = self.path(rung, group, wave)
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error
        remove_temporaries(path)
        arrays = named_state(state.state)
        if state.tally is not None and state.last is not None:
            arrays |= tensor_file.named(state.tally, prefix=TALLY)
            arrays |= named_state(state.last, LAST)
        if state.best is not None:
            arrays |= named_state(state.best, BEST)
        about = _Metadata(state.members, state.epochs, state.batches, state.frozen)
        write_atomic(path, tensor_file.parts(arrays, about))

    def read(self, rung: int, group: Group, wave: int) -> WaveState | None:
        """The state of a wave; None if there is none yet. Raises AdtrainError where it does not fit the group."""
        path = self.path(rung, group.number, wave)
        if not path.exists():
            return None
        file = tensor_file.TensorFile(path)
        about = file.metadata(_Metadata)
        count, experiment = len(about.members), group.experiment
        known = {member.number for member in group.members}
        if not (
            set(about.frozen) <= set(about.members) <= known
            and 0 < count == len(set(about.members))
            and about.epochs <= experiment.epochs
            and about.batches <= experiment.steps_per_epoch * (about.epochs < experiment.epochs)
        ):
            raise AdtrainError(f"{path}: found metadata that do not fit the members of the sweep: the file is damaged")
        one = experiment.random_initial_state("cpu")
        state: TrainState = tree.map(lambda x: np.broadcast_to(x.numpy(), (count, *x.shape)), one)
        tally = tree.map(lambda x: x.numpy(), empty_tally(experiment.network.task, count, "cpu"))
        parts = {"": named_state(state)}
        if about.batches:
            parts |= {TALLY: tensor_file.named(tally, prefix=TALLY), LAST: named_state(state, LAST)}
        if experiment.restores_best and about.epochs < experiment.epochs:
            parts[BEST] = named_state(state, BEST)
        expected = {name: x for names in parts.values() for name, x in names.items()}
        arrays = file.read(expected, "the sweep's members", finite=False)

        def of_part(like: Any, part: str) -> Any:
            return tree.unflatten(tree.flatten(like)[1], [arrays[name] for name in parts[part]])

        best = of_part(state, BEST) if BEST in parts else None
        found = WaveState(about.members, about.epochs, about.batches, of_part(state, ""), about.frozen, best)
        if not about.batches:
            return found
        return replace(found, tally=of_part(tally, TALLY), last=of_part(state, LAST))

    def latest_rung(self, rungs: int) -> int:
        """The number of the last one of `rungs` rungs that has a stored state; 0 if there is none."""
        return next((x for x in range(rungs - 1, 0, -1) if any(self.folder.glob(f"rung{x}-*.safetensors"))), 0)

    def remove(self, rung: int) -> None:
        """Remove the states of a rung that the next one has replaced."""
        for path in self.folder.glob(f"rung{rung}-*.safetensors"):
            path.unlink(missing_ok=True)
