"""model.safetensors: a trained model's arrays, and what is needed to show it images."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors_numpy

import adtrain
from adtrain import config, nn
from adtrain.config import Config
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.core.precision import FULL
from adtrain.core.staging import stage
from adtrain.passes import ALL
from adtrain.training import network
from adtrain.training.experiment import TOTALS, Experiment
from adtrain.training.network import Network
from adtrain.training.step import EvaluationStep, TrainState, evaluation_step

METADATA_KEY = "adtrain"


@dataclass(frozen=True)
class TrainedModel:
    """A network with its trained arrays on a device, its classes' names, and the shape (C, H, W) of its images."""

    config: Config
    network: Network
    params: nn.Params
    statistics: nn.State
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]

    @cached_property
    def evaluation_step(self) -> EvaluationStep:
        """The evaluation of a batch, staged as a Program."""
        return stage(evaluation_step(self.network), ALL, donate=TOTALS)


def encode(experiment: Experiment, state: TrainState) -> bytes:
    """The file's content: the same bytes for the same arrays and config.

    Tensors have the names that `tree.paths` gives, those of torch.nn.Sequential. All metadata are JSON under one key,
    for safetensors writes several in an order that differs from run to run.
    """
    about = {
        "version": adtrain.__version__,
        "config": experiment.config_text,
        "classes": experiment.data.classes,
        "image_shape": experiment.image_shape,
        "mean": experiment.network.mean,
        "std": experiment.network.std,
    }
    tensors = {name: x.numpy() for name, x in _named(state.params, state.statistics).items()}
    return safetensors_numpy.save(tensors, {METADATA_KEY: json.dumps(about)})


def load(run: Path, device: str = "cpu") -> TrainedModel:
    """The trained model in a run's folder, with the run's precision; on the CPU with full float32 products.

    Raises:
        ConfigError: its config.yaml is missing or wrong.
        AdtrainError: its model.safetensors is missing, damaged, or not of the config's model.
    """
    if not run.is_dir():
        raise AdtrainError(f"{run}: found {'a file' if run.exists() else 'nothing'}, expected the folder of a run")
    if not (run / "config.yaml").is_file():
        raise AdtrainError(f"{run}: found no config.yaml, expected the folder of a run of adtrain train")
    cfg = config.load(run / "config.yaml")
    path = run / "model.safetensors"
    if not path.is_file():
        raise AdtrainError(f"{run}: found no model.safetensors; the run ended before its first epoch did, train again")
    tensors, about = _read(path)
    try:
        mean, std = (tuple(map(float, about[key])) for key in ("mean", "std"))
        classes = tuple(map(str, about["classes"]))
        channels, height, width = map(int, about["image_shape"])
        fits = (
            np.isfinite(mean).all()
            and (np.array(std) > 0).all()
            and len(mean) == len(std) == channels
            and channels * height * width == prod(cfg.model.input)
        )
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise AdtrainError(f"{path}: its metadata are not those that adtrain train writes for the model of config.yaml")
    net = network.build(cfg, mean, std)
    if device == "cpu":
        net = replace(net, products=FULL)  # the CPU's kernels have no other
    rng = np.random.default_rng(0)
    params, statistics = net.model.init(net.input_shape, rng, net.dtype)
    _check(path, tensors, _named(params, statistics))
    params, statistics = tree.unflatten(
        tree.flatten((params, statistics))[1],
        [array(tensors[name], device=device) for name in _named(params, statistics)],
    )
    return TrainedModel(cfg, net, params, statistics, classes, (channels, height, width))


def _named(params: nn.Params, statistics: nn.State) -> dict[str, Any]:
    names = [*tree.paths(params), *tree.paths(statistics)]
    return dict(zip(names, tree.leaves((params, statistics)), strict=True))


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdtrainError(f"{path}: cannot be read ({error})") from None
    try:
        about = json.loads(metadata[METADATA_KEY])
    except (KeyError, ValueError):
        raise AdtrainError(f"{path}: has no metadata of adtrain; expected a file that adtrain train wrote") from None
    return tensors, about


def _check(path: Path, found: dict[str, np.ndarray], expected: dict[str, Any]) -> None:
    """The first difference between the file's arrays and the model's, as an error."""
    for name, x in expected.items():
        if name not in found:
            raise AdtrainError(f"{path}: has no {name}, which the model of config.yaml needs")
        if found[name].shape != x.shape or found[name].dtype != x.dtype:
            raise AdtrainError(
                f"{path}: {name} is {found[name].dtype}{list(found[name].shape)}, "
                f"the model of config.yaml expects {x.dtype}{list(x.shape)}"
            )
    if extra := sorted(set(found) - set(expected)):
        raise AdtrainError(f"{path}: holds {extra[0]}, which the model of config.yaml does not have")
