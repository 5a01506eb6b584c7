"""A trained network's arrays as PyTorch names and lays them out, for `load_state_dict` of the same torch.nn.Sequential.

A layer is named by its position in the list of layers. Inside `residual` come `body.` and `shortcut.`, inside `concat`
and `add` the position of the branch; what is in them is a Sequential again: `3.body.0.weight`, `4.1.0.bias`.
"""

from __future__ import annotations

import json

import numpy as np
from safetensors import numpy as safetensors_numpy

import adtrain
from adtrain import config
from adtrain.core import tree
from adtrain.training import TrainedModel

METADATA_KEY = "adtrain"


def encode(trained: TrainedModel) -> bytes:
    """The content of a safetensors file: the same bytes for the same run.

    Its metadata, JSON under one key, hold the classes, the config, and what the network's input is to be divided by
    first, `scale`, and then normalised by, the mean and standard deviation of each channel.
    """
    about = {
        "version": adtrain.__version__,
        "config": config.dump(trained.config),
        "classes": trained.classes,
        "scale": trained.network.scale,
        "mean": trained.network.mean,
        "std": trained.network.std,
    }
    return safetensors_numpy.save(tensors(trained), {METADATA_KEY: json.dumps(about)})


def tensors(trained: TrainedModel) -> dict[str, np.ndarray]:
    """The arrays in the run's precision, with what PyTorch's state of a batch normalisation has beyond ours: 0 as the
    number of batches it has seen, which it only reads where momentum is None."""
    found = named_arrays(trained)
    for name in list(found):
        layer, _, last = name.rpartition(".")
        if last == "running_var":
            found[f"{layer}.num_batches_tracked"] = np.array(0)
    return found


def named_arrays(trained: TrainedModel) -> dict[str, np.ndarray]:
    """Parameters and running statistics by their PyTorch names."""
    both = trained.params, trained.statistics
    names = [name for each in both for name in tree.paths(each)]
    return {name: x.numpy() for name, x in zip(names, tree.leaves(both), strict=True)}
