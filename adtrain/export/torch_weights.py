"""A trained network's arrays by the names that the run's model file has, which are those of torch.nn.Sequential.

`training.init_from` reads the file, and so does `load_state_dict` of the same network in PyTorch. A layer's name is its
position in the list of layers. A `residual` adds `body.` or `shortcut.`, a `concat` or `add` the position of the
branch. Each of these contains a Sequential: `3.body.0.weight`, `4.1.0.bias`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain import config
from adtrain.training import TrainedModel, tensor_file
from adtrain.training.tasks import Regression
from adtrain.version import __version__


def encode(trained: TrainedModel) -> bytes:
    """The content of a safetensors file: the same bytes for the same run.

    Its metadata, JSON under one key, are the classes, the targets, the config, and the input's normalisation: division
    by `scale`, then `mean` and `std` per channel; for rows of a table also the encoder of their columns, and for
    tokens the content of `tokenizer.json`. With `data.normalize_targets` a predicted number is
    output * `target_std` + `target_mean`.
    """
    about: dict[str, Any] = {
        "version": __version__,
        "config": config.dump(trained.config),
        "classes": trained.classes,
        "scale": trained.network.scale,
        "mean": trained.network.mean,
        "std": trained.network.std,
        "encoder": trained.encoder,
        "targets": trained.targets,
    }
    if isinstance(trained.network.task, Regression) and trained.network.task.normalized:
        about |= {"target_mean": trained.network.task.mean, "target_std": trained.network.task.std}
    if trained.tokenizer is not None:
        about["tokenizer"] = trained.tokenizer.content
    return tensor_file.encode(named_arrays(trained), about)


def named_arrays(trained: TrainedModel) -> dict[str, np.ndarray]:
    """Parameters and running statistics by name, in the run's precision."""
    return {name: x.numpy() for name, x in tensor_file.named(trained.params, trained.statistics).items()}
