"""Config texts for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from adtrain import config

FULL = """\
name: mnist-cnn
data: {dataset: mnist, batch_size: 128}
model:
  input: [1, 28, 28]
  layers:
    - conv2d: {out_channels: 32, kernel_size: 3}
    - relu
    - conv2d: {out_channels: 64, kernel_size: 3, padding: 1}
    - batch_norm2d
    - relu
    - residual:
        - conv2d: {out_channels: 64, kernel_size: 3, padding: 1}
        - relu
    - max_pool2d: {kernel_size: 2}
    - flatten
    - linear: {out_features: 128}
    - relu
    - dropout: {p: 0.5}
    - linear: {out_features: 10}
loss: {cross_entropy: {label_smoothing: 0.1}}
optimizer: {adam: {lr: 0.001, weight_decay: 0.0}}
schedule: {cosine: {warmup_epochs: 1}}
training: {epochs: 3, seed: 0}
"""
"""A config with every section; layers and options are in the long form."""

SMALL = """\
name: small
data: {dataset: mnist, batch_size: 8}
model:
  input: [1, 6, 6]
  layers:
LAYERS
loss: cross_entropy
optimizer: adam
training: {epochs: 1}
"""


def small(*layers: str) -> str:
    """A config with the given layers; the first is on line 6."""
    return SMALL.replace("LAYERS", "\n".join(f"    - {layer}" for layer in layers))


def load(folder: Path, text: str | bytes, *overrides: str) -> config.Config:
    """Write the text to `c.yaml` in the folder and load it."""
    path = folder / "c.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return config.load(path, overrides)


def problems(folder: Path, text: str | bytes, *overrides: str) -> list[str]:
    """The lines of the ConfigError that loading the text raises, without the folder's path."""
    with pytest.raises(config.ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "").splitlines()
