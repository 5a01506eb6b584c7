"""Training configs: YAML files that are parsed with line and column, checked as a whole, and built into a model.

cfg = config.load("configs/mlp.yaml", ["training.epochs=3"])
model = config.build.model(cfg)
"""

from __future__ import annotations

from adtrain.config import build
from adtrain.config.document import Config
from adtrain.config.files import (
    dump,
    from_values,
    inline,
    is_run,
    is_sweep,
    load,
    load_data,
    packaged,
    parse,
    plain,
    sweep_for_run,
)
from adtrain.config.problems import ConfigError, Problem
