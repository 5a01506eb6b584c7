"""Writes docs/reference/config.md from the types of the config: python docs/tools/config_reference.py

Keys, values, bounds, defaults and descriptions are those of the pydantic models. The examples below are checked against
them: a key without an example is a KeyError, a wrong example a ValidationError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from adtrain.config import document, specs
from adtrain.config.specs import Equations, Spec, Term
from adtrain.core.options import is_option, words
from adtrain.nn.init import INITIALIZERS, whitening

PAGE = Path(__file__).parents[1] / "reference" / "config.md"

INTRODUCTION = """\
# Config reference

This page is made by `python docs/tools/config_reference.py`.

A config is a YAML file; [configs/mlp.yaml](../../configs/mlp.yaml) is a complete one. Editors that support JSON Schema
complete its keys if this is the first line: `# yaml-language-server: $schema=schema.json`, with the path of
[configs/schema.json](../../configs/schema.json). Scalars follow YAML 1.2: `1e-3` is a number, and `no` is a string.
Unknown and duplicate keys are errors.

`--set KEY=VALUE` overrides one value. KEY is dotted, and list indices count from 0: `--set
model.layers.0.conv2d.out_channels=16`. VALUE is read as YAML if it is a number, `true`, `false`, `null`, a quoted text,
a list in brackets, a mapping in braces, or a mapping of one name such as `sgd: 0.1`. Anything else is a text with all
of its characters: in `--set 'data.label=label #1'` the column is `label #1`. Quotes make a text of a number: `--set
data.label='"1"'`.

`--set optimizer.sgd.lr=0.1` replaces an optimizer of another name. The same holds for the loss and the schedule. `--set
data.path=images` replaces `data.dataset`, and the reverse.
"""

SECTIONS: dict[str, type[BaseModel]] = {
    "": document.Config,
    "data": document.Data,
    "model": document.Model,
    "training": document.Training,
    "training.early_stopping": document.EarlyStopping,
    "parameter_groups": document.ParameterGroup,
    "lora": document.Lora,
    "plugins": document.Plugin,
    "loss": Term,
}
"""From the dotted key of a section to its keys; those of lists are the keys of each item."""

INITIAL_WEIGHTS = """\
`weight_init` of a layer names its initial weights. Biases start at 0. A weight has the shape (out, in, *kernel);
fan_in = in kh kw and fan_out = out kh kw. `whitening` is for a `conv2d` in the first layer, with groups 1. It takes
normalized training images with 1,000,000 pixels (976 of 32x32), evenly spaced, and adds 0.0005 to each eigenvalue.
A patch of c channels has c kh kw numbers, and at most twice as many filters. This
keeps the filters and trains the bias: `parameter_groups: [{paths: 0.weight, trainable: false}]`.
"""

SWEEP = """\
## Keys of `sweep`

`adtrain sweep` trains a member for each combination of values: see [Train many networks at once](../how-to/sweeps.md).
A key with a dot, or the name of a section, is a path into the config. A key such as `optimizer.sgd.lr` must not replace
an optimizer of another name, as a member would silently differ in more than the key says. A value is one of these:

| value | meaning |
|---|---|
| `[0.1, 0.01]` | these values |
| `{range: 10}`, `{range: [5, 20]}`, `{range: [0, 100, 10]}` | integers: 0 to 9; 5 to 19; 0, 10, ..., 90 |
| `{log_uniform: [1e-4, 1e-2], samples: 20}` | 20 random numbers whose logarithms are uniform |
| `{uniform: [0, 0.5], samples: 20}` | 20 random numbers |
| `{choice: [relu, tanh], samples: 20}` | 20 random values of a list |

Lists and ranges form a grid. Random values are drawn together: a sample has a value for each random key, so all of them
have the same number of samples. The members are the points of the grid, each with every sample.

| option | value | default | meaning |
|---|---|---|---|
| `rank_by` | `train_`, `validation_` or `test_` with a metric | as `training.best_by` | the metric that ranks members |
| `order` | `own`, `shared` | `own` | `shared`: all have the batches and the validation split of `training.seed` |
| `draw_seed` | an integer, at least 0 | `0` | the seed of the random values |
"""

FAMILIES = {
    "layer": """\
A layer, loss, optimizer, schedule or augmentation has three forms:

```yaml
- relu                                  # the name: all options have their defaults
- linear: 128                           # the value of the first option
- conv2d: {out_channels: 32, kernel_size: 3, padding: 1}
```

Options of layers have the names and meanings of PyTorch. `in_features`, `in_channels`, `input_size`, `num_features`,
`num_channels`, `embed_dim` and `d_model` are inferred from the previous layer; if they are given, they are checked.
""",
    "loss": """\
The loss of a batch is the mean over its images. `cross_entropy` and `nll` take class numbers as targets. The others
take numbers, or one-hot rows of classes. `weight` and `pos_weight` are lists with a number for each class or label.
With `weight`, `cross_entropy` and `nll` divide the sum of a batch by the sum of its labels' weights, as PyTorch does.
If all these weights are 0, the loss is 0. The loss of the validation or test part is the sum over its examples divided
by the sum of their weights, so it does not depend on their order. The training loss of an epoch is the mean over its
batches, weighted by their numbers of images. A list in the place of a loss has [equations](../how-to/equations.md) for
the outputs of the network, with [these keys](#keys-of-the-equations-of-loss).
""",
    "optimizer": """\
Options have the names and meanings of PyTorch. [Set the optimizer](../how-to/optimizers.md) explains parameter groups
and Muon.
""",
    "schedule": """\
A schedule is a factor on the optimizer's learning rate. Schedules count in epochs: `step_size`, `milestones`, `period`,
`step_size_up` and `step_size_down` are epochs, and `gamma` of `exponential` is the factor per epoch. With
`warmup_epochs` or `warmup_steps` the learning rate first rises linearly, then the schedule starts.
""",
    "average": """\
`training.average` names one. [Averages of weights](../how-to/optimizers.md#averages-of-weights) explains them.
""",
    "data set": """\
`data.dataset` names one. All but `mnist`, which is part of the package, are downloaded by `adtrain data fetch NAME`.
[Plug-ins](../how-to/own-layer.md#a-data-set) add others, with options: `{spirals: {points: 600}}`.
""",
    "metric": """\
`training.metrics` lists them. `gradient_noise`, `per_example_norm` and `top_eigenvalues` are of the loss of at most 512
examples, evenly spaced, without dropout, with the running statistics and without class weights of single examples.
[Plug-ins](../how-to/own-layer.md#a-metric) add others.
""",
    "augmentation": "[Augment images](../how-to/augment.md) says what the options mean.\n",
}
PLURALS = {family: "losses" if family == "loss" else f"{family}s" for family in FAMILIES}

BRANCHES = [[{"linear": 8}], [{"linear": 8}, "tanh"]]
EXAMPLES: dict[str, Any] = {
    "name": "mlp",
    "plugins": ["my_layers.py"],
    "data": {"dataset": "mnist", "batch_size": 128},
    "model": {"input": [784], "layers": [{"linear": 10}]},
    "loss": "cross_entropy",
    "optimizer": {"adam": {"lr": 0.001}},
    "schedule": "cosine",
    "training": {"epochs": 5},
    "parameter_groups": ["no_decay", {"paths": "0.*", "trainable": False}],
    "data.dataset": "mnist",
    "data.path": "flowers.csv",
    "data.test_path": "more_flowers.csv",
    "data.test": 0.2,
    "data.label": "species",
    "data.target": ["height", "width"],
    "data.header": False,
    "data.delimiter": ";",
    "data.drop": ["id"],
    "data.categories": ["zone"],
    "data.category_encoding": "index",
    "data.dates": ["sold"],
    "data.date_format": "%d/%m/%Y",
    "data.decimal": ",",
    "data.missing": "mean",
    "data.missing_values": ["NA", "?", -999],
    "data.shape": [1, 28, 28],
    "data.image_size": [64, 64],
    "data.channels": 3,
    "data.skip_broken": True,
    "data.format": "text",
    "data.length": 64,
    "data.unit": "byte",
    "data.documents": "separate",
    "data.order": "in_order",
    "data.validation_tokens": 100000,
    "data.vocabulary": 8192,
    "data.tokenizer": "gpt2/tokenizer.json",
    "data.points": {"t": [0, 1], "x": [-1, 1]},
    "data.image": "photo.png",
    "data.volume": "field.npy",
    "data.peak": 2.0,
    "data.reference": "exp(-t) * sin(pi * x)",
    "data.sampling": "sobol",
    "data.resample": "never",
    "data.resample_until": 1000,
    "data.adaptive": True,
    "data.steps_per_epoch": 1000,
    "data.test_points": 2500,
    "data.sdf": "knot.obj",
    "data.sdf_points": 65536,
    "data.measurements": "temperatures.csv",
    "data.measurements_weight": 100,
    "data.batch_size": 128,
    "data.shards": 4,
    "data.validation": 0.1,
    "data.normalize": False,
    "data.normalize_targets": True,
    "data.augment": ["flip", {"crop": 2}],
    "data.views": ["flip", "shift"],
    "model.input": [1, 28, 28],
    "model.output": ["u"],
    "model.coefficients": {"k": 1.0},
    "model.layers": ["flatten", {"linear": 32}, "relu", {"linear": 10}],
    "training.epochs": 5,
    "training.steps": 1000,
    "training.seed": 1,
    "training.precision": "tf32",
    "training.clip_norm": 1.0,
    "training.clip_value": 0.5,
    "training.micro_batch": 32,
    "training.average": {"ema": 0.999},
    "training.init_from": "runs/mlp",
    "training.init_partial": True,
    "training.names": "gpt2",
    "training.checkpoint_every": 500,
    "training.validate_every": 1000,
    "training.best_by": "validation_loss",
    "training.final_model": "last",
    "training.metrics": ["f1", "confusion", {"top_eigenvalues": 5}],
    "count": 5,
    "training.early_stopping": {"patience": 3},
    "training.early_stopping.patience": 3,
    "training.early_stopping.min_delta": 0.001,
    "lora": {"rank": 8, "paths": "*.self_attn.*"},
    "lora.rank": 8,
    "loss.equation": "u_t + u * u_x - 0.1 * u_xx",
    "loss.at": {"t": 0},
    "loss.weight": 10,
    "loss.points": 256,
    "lora.paths": ["*.self_attn.*", "*.linear1.*"],
    "parameter_groups.paths": ["0.weight", "*.bias"],
    "parameter_groups.lr_factor": 10,
    "parameter_groups.weight_decay": 0,
    "parameter_groups.trainable": False,
    "plugins.file": "my_layers.py",
    "plugins.sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "plugins.files": {"softsign.c": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"},
    "activation": "gelu",
    "adjust_lr_fn": "match_rms_adamw",
    "affine": False,
    "sync": True,
    "alpha": 0.5,
    "alternate": True,
    "amsgrad": True,
    "approximate": "tanh",
    "base_resolution": 8,
    "betas": [0.9, 0.99],
    "bias": False,
    "bidirectional": True,
    "body": [{"linear": 64}, "relu"],
    "branches": BRANCHES,
    "brightness": 0.4,
    "cap": 30.0,
    "causal": True,
    "contrast": 0.4,
    "d_model": 64,
    "delta": 0.5,
    "decay": 0.99,
    "depth": 12,
    "decoder_layer.activation": "swiglu",
    "deviation": 0.1,
    "dilation": 2,
    "dim": -1,
    "dim_feedforward": 256,
    "div_factor": 10,
    "dropout": 0.1,
    "elementwise_affine": False,
    "embed_dim": 64,
    "embedding_dim": 16,
    "encoding": "sinusoidal",
    "eps": 1e-6,
    "factor": 0.125,
    "features": 4,
    "final": 0.01,
    "final_div_factor": 100,
    "finest_resolution": 1024,
    "fourier_features.scale": 3.0,
    "sine.first": True,
    "frequencies": 64,
    "gamma": 0.9,
    "groups": 4,
    "hidden_size": 128,
    "hue": 0.1,
    "in_channels": 3,
    "in_features": 784,
    "indices": [0, 2],
    "init_gain": 0.02,
    "init_value": 0.1,
    "input_size": 28,
    "kernel_size": 3,
    "label_smoothing": 0.1,
    "layer_norm_eps": 1e-6,
    "levels": 8,
    "log2_table_size": 15,
    "lowest": 0.05,
    "lr": 0.01,
    "milestones": [3, 5],
    "mode": "bilinear",
    "momentum": 0.9,
    "negative_slope": 0.1,
    "nesterov": True,
    "nhead": 4,
    "norm_first": True,
    "normalize_weights": True,
    "ns_steps": 6,
    "nonlinearity": "relu",
    "norm": "rms_norm",
    "norm_eps": 1e-6,
    "normalized_shape": 128,
    "num_channels": 32,
    "num_embeddings": 1000,
    "num_features": 32,
    "num_groups": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_layers": 2,
    "num_parameters": 32,
    "omega": 15.0,
    "out_channels": 32,
    "output": "all",
    "out_features": 128,
    "out_init_gain": 0.2,
    "output_padding": 1,
    "output_size": 1,
    "p": 0.2,
    "padding": 1,
    "padding_mode": "reflect",
    "patch_size": 7,
    "patience": 5,
    "pct_start": 0.2,
    "period": 5,
    "period_factor": 2,
    "pos_weight": [1.0, 2.5],
    "power": 1.5,
    "probability": 0.3,
    "qk_norm": True,
    "random_resized_crop.scale": [0.25, 1.0],
    "ratio": [0.9, 1.1],
    "rest": {"adamw": {"lr": 0.001}},
    "rest_paths": "9.*",
    "rotary_base": 10000.0,
    "rotation": 10,
    "saturation": 0.4,
    "scale": 0.1,
    "scale_factor": 2,
    "shape": [16, 7, -1],
    "shift": 0.1,
    "shortcut": [{"linear": 64}],
    "size": 6,
    "soft_cap": 50.0,
    "step_size": 2,
    "threshold": 0.001,
    "step_size_down": 3,
    "step_size_up": 1,
    "first": {"adam": {"lr": 0.003}},
    "then": {"lbfgs": {"history": 20}},
    "history": 20,
    "max_evaluations": 10,
    "steps": 10,
    "stride": 2,
    "sweep": {"training.seed": {"range": 10}},
    "tied": True,
    "warmup_epochs": 0.5,
    "warmup_steps": 100,
    "weight": [1.0, 2.5],
    "weight_decay": 0.01,
    "weight_init": "kaiming_normal",
    "window": 256,
}
"""Examples: of the keys of the sections by their dotted keys, of options of layers and others by their names, or by
their kind and name where another kind has an option of this name."""


def page() -> str:
    """The content of docs/reference/config.md."""
    parts = [INTRODUCTION]
    for key, section in SECTIONS.items():
        title = f"Keys of `{key}`" if key else "Sections"
        if section is Term:
            title = "Keys of the equations of `loss`"
        lines = [_row(section, name, f"{key}.{name}" if key else name) for name in section.model_fields]
        parts.append(
            f"## {title}\n\n| key | value | default | meaning | example |\n|---|---|---|---|---|\n{_rows(lines)}"
        )
    parts.append(SWEEP)
    for family, text in FAMILIES.items():
        parts.append(f"## {PLURALS[family].capitalize()}\n\n{text}")
        kinds = [kind for kind in specs.FAMILIES[family].values() if kind is not Equations]  # its keys are a section
        if any(kind.model_fields for kind in kinds):
            parts += map(_kind, kinds)
        else:
            lines = [(f"`{kind.kind}`", _one_line(kind.__doc__ or "")) for kind in kinds]
            parts.append(f"| name | meaning |\n|---|---|\n{_rows(lines)}")
        if family == "layer":
            lines = [(f"`{f.__name__}`", _one_line(f.__doc__ or "")) for f in (*INITIALIZERS.values(), whitening)]
            parts.append(f"## Initial weights\n\n{INITIAL_WEIGHTS}\n| name | weights |\n|---|---|\n{_rows(lines)}")
    return "\n".join(parts)


def _kind(spec: type[Spec]) -> str:
    """A layer or other: what it does, its shortest form, and its options."""
    keys = {name: f"{spec.kind}.{name}" for name in spec.model_fields}
    lines = [_row(spec, name, key if key in EXAMPLES else name) for name, key in keys.items()]
    required = {name: EXAMPLES[name] for name, field in spec.model_fields.items() if field.is_required()}
    form = _yaml({spec.kind: required})[1:-1] if required else spec.kind
    TypeAdapter(spec).validate_python({spec.kind: required})
    head = f"### `{spec.kind}`\n\n{_one_line(spec.__doc__ or '')}\n\nShortest form: `{form}`\n"
    columns = [(key, value, default, example) for key, value, default, _, example in lines]
    return f"{head}\n| option | value | default | example |\n|---|---|---|---|\n{_rows(columns)}" if lines else head


def _row(model: type[BaseModel], name: str, key: str) -> tuple[str, ...]:
    """A key: its name, values, default, meaning and example."""
    hint = get_type_hints(model, include_extras=True)[name]
    TypeAdapter(hint).validate_python(EXAMPLES[key])
    field = model.model_fields[name]
    meaning = _one_line(field.description or "")
    return f"`{name}`", _values(hint), _default(field), meaning, f"`{_yaml(EXAMPLES[key])}`"


def _values(hint: Any) -> str:
    """What a value may be, with its bounds: the words of error messages, or a link to a section of this page."""
    for family in FAMILIES:
        if hint == getattr(specs, {"data set": "DataSource"}.get(family, family.capitalize())):
            return f"{'an' if family[0] in 'ao' else 'a'} [{family}](#{PLURALS[family].replace(' ', '-')})"
    if hint == specs.Layers:
        return "a list of [layers](#layers)"
    if hint == specs.Branches:
        return "a list of lists of [layers](#layers)"
    if hint is document.Sweep:
        return "[values by key](#keys-of-sweep)"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        (key,) = (key for key, section in SECTIONS.items() if section is hint)
        return f"[its keys](#keys-of-{key.replace('.', '')})"
    if is_option(hint) and type(None) not in get_args(hint):
        return words(hint)
    *_, inner = (arg for arg in get_args(hint) if arg is not type(None))
    containers: dict[Any, str] = {list: "a list; each item: ", dict: "names and values; each value: "}
    return containers.get(getattr(hint, "__origin__", None), "") + _values(inner)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default == ():  # the description says how it follows from the data
        return ""
    if isinstance(default, Spec):
        given = _yaml(default.written())
        return f"`{given if default.options() != type(default)().options() else default.kind}`"
    return "`null`" if default is None else f"`{_yaml(default)}`"


def _yaml(value: Any) -> str:
    """The value in YAML's flow style, on one line."""
    return re.sub(r'"([A-Za-z][\w./]*)"', r"\1", json.dumps(value))


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _rows(lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
