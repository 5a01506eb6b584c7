"""Training configs: YAML files that are parsed with line and column, checked as a whole, and built into a model.

cfg = config.load("configs/mlp.yaml", ["training.epochs=3"])
model = config.build.model(cfg)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adtrain.lazy import lazy_getattr

if TYPE_CHECKING:
    from adtrain.config import build
    from adtrain.config.document import Config
    from adtrain.config.files import dump, from_values, inline, load, load_data, of_data, parse, plain
    from adtrain.config.names import is_run, is_sweep, packaged, sweep_for_run
    from adtrain.config.problems import ConfigError, Problem

__getattr__ = lazy_getattr(__name__)
