"""A small data set that a network can learn, and configs that train on it, for the tests of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from idx_files import write_idx

from adtrain import config, training
from adtrain.config import Config

CLASSES = 3
SHAPE = (1, 6, 6)

TEXT = """\
name: tiny
data: {path: PATH, batch_size: 16}
model:
  input: [36]
  layers:
    - linear: 16
    - relu
    - linear: 3
loss: cross_entropy
optimizer: {adam: {lr: 0.01}}
training: {epochs: 3, seed: 0}
"""


def images_of(labels: np.ndarray, seed: int) -> np.ndarray:
    """Noise with two bright rows whose position is the class: uint8 (N, 6, 6)."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 120, (len(labels), *SHAPE[1:]), dtype=np.uint8)
    for row in range(2):
        images[np.arange(len(labels)), 2 * labels + row] += 100
    return images


def write_data(folder: Path, train: int = 90, test: int = 30, classes: int = CLASSES) -> Path:
    """Write the four files of MNIST's format; the labels cycle through the classes."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, count) in enumerate({"train": train, "t10k": test}.items()):
        labels = np.arange(count) % classes
        write_idx(folder / f"{part}-images-idx3-ubyte", images_of(labels % CLASSES, seed))
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels.astype(np.uint8))
    return folder


def write_config(folder: Path, text: str = TEXT) -> Path:
    """Write the config and its data; returns the config's path."""
    data = write_data(folder / "data")
    path = folder / "tiny.yaml"
    path.write_text(text.replace("PATH", str(data)))
    return path


def load(folder: Path, *overrides: str, layers: str | None = None) -> Config:
    """The config with overrides; `layers`, in YAML's flow style, replace its layers."""
    path = write_config(folder)
    return config.load(path, [*overrides, *([f"model.layers={layers}"] if layers else [])])


def prepare(folder: Path, *overrides: str, layers: str | None = None) -> training.Experiment:
    return training.prepare(load(folder, *overrides, layers=layers))
