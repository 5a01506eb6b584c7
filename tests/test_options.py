"""Options are bounded once, by their annotations: a config and a call in Python accept and refuse the same values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
from config_files import load, small
from pydantic import Field, TypeAdapter, ValidationError

import adtrain as ad
from adtrain import augment, nn, optim
from adtrain.config import ConfigError
from adtrain.config.records import option_type
from adtrain.config.specs import CONTAINERS, FAMILIES
from adtrain.core.errors import OptionError
from adtrain.core.options import InConfig, fits, is_option, split, words, words_in_python
from adtrain.option_types import AtLeastOne, Bounds, Positive

VALUES: list[Any] = [
    0, 1, 2, -1, -64, 65, 360, 361, 1000, 1001, 2**31 - 1, 2**31, 2**63, 10**400, True, False, None, "", "a", "same",
    0.0, 0.5, 1.0, -0.5, 1.5, 3.4e38, 3.5e38, -3.5e38, math.nan, math.inf, -math.inf,
    (), (1,), (0, 1), (1, 2), (1, 2, 3), (-1, 4), (0.5, 0.5), (0.5, 1.0), (math.nan, 0.5), ("a", 1), (True, 1),
]  # fmt: skip


def annotated_options() -> list[Any]:
    """The annotations of the options of all layers, losses and others, where a config has the values of Python."""
    found: dict[str, Any] = {}
    for family, kinds in FAMILIES.items():
        for kind, spec in kinds.items():
            if spec not in CONTAINERS and hasattr(spec, "target"):
                hints = get_type_hints(spec.target, include_extras=True)
                found |= {f"{family} {kind} {name}": hints[name] for name in spec.model_fields if name in hints}
    in_both = {name: hint for name, hint in found.items() if is_option(hint) and not _differs(hint)}
    assert len(in_both) > 80
    return [pytest.param(hint, id=name) for name, hint in in_both.items()]


def _differs(hint: Any) -> bool:
    """Whether a config has other values than Python."""
    return any(isinstance(mark, InConfig) for each in (hint, *get_args(hint)) for mark in split(each)[1])


@pytest.mark.parametrize("hint", annotated_options())
def test_a_config_and_python_accept_the_same_values(hint: Any) -> None:
    in_config = TypeAdapter(option_type(hint))
    for value in VALUES:
        expected = None if fits(value, hint) else words(hint).removesuffix(" or null")
        assert message(in_config, value) == expected, value


def message(in_config: TypeAdapter[Any], value: Any) -> str | None:
    """The message of pydantic's error for a value; None if there is none."""
    try:
        in_config.validate_python(value)
    except ValidationError as error:
        return str(error.errors()[0]["msg"])
    return None


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (Annotated[float, Bounds(ge=0, lt=1)], "a number in [0, 1)"),
        (Annotated[float, Bounds(gt=0)], "a number in (0, 3.4e38]"),
        (Annotated[float, Field(gt=0, le=2.5)], "a number in (0, 2.5]"),
        (Annotated[AtLeastOne, Bounds(lt=8)], "a number in [1, 8)"),
        (int, "an integer in [-2^63, 2^63)"),
        (tuple[Positive, Positive], "a tuple of 2 numbers in (0, 3.4e38]"),
        (bool | None, "True or False or None"),
    ],
)
def test_words_come_from_the_annotation(hint: Any, text: str) -> None:
    assert words_in_python(hint) == text


WRONG = [
    # class, option, its value in a config, the same in Python, what is expected in a config
    (nn.Linear, "out_features", "0", 0, "an integer in [1, 2^31)"),
    (nn.Linear, "out_features", "-3", -3, "an integer in [1, 2^31)"),
    (nn.Linear, "out_features", "2.5", 2.5, "an integer in [1, 2^31)"),
    (nn.Linear, "out_features", "'8'", "8", "an integer in [1, 2^31)"),
    (nn.Linear, "out_features", "[8]", (8,), "an integer in [1, 2^31)"),
    (nn.Linear, "out_features", "3000000000", 3000000000, "an integer in [1, 2^31)"),
    (nn.Linear, "bias", "1", 1, "true or false"),
    (nn.Linear, "weight_init", "he", "he", "one of kaiming_uniform, kaiming_normal, xavier_uniform, xavier_normal, "
     "orthogonal, trunc_normal, normal, identity, dirac, partial_dirac"),
    (nn.Conv2d, "kernel_size", "[3, 3, 3]", (3, 3, 3), "an integer in [1, 2^31) or a list of 2 of them"),
    (nn.Conv2d, "padding", "full", "full", "an integer in [0, 2^31) or a list of 2 of them or 'same'"),
    (nn.Conv2d, "padding", "-1", -1, "an integer in [0, 2^31) or a list of 2 of them or 'same'"),
    (nn.Dropout, "p", "1", 1, "a number in [0, 1)"),
    (nn.Dropout, "p", ".nan", math.nan, "a number in [0, 1)"),
    (nn.Dropout, "p", "true", True, "a number in [0, 1)"),
    (nn.BatchNorm2d, "eps", ".inf", math.inf, "a number in [0, 3.4e38]"),
    (nn.BatchNorm2d, "momentum", "high", "high", "a number in [0, 1)"),
    (nn.LSTM, "num_layers", "1001", 1001, "an integer in [1, 1000]"),
    (nn.Softmax, "dim", "0", 0, "the number of an axis in [-64, 64], other than 0, the axis of the batch"),
    (nn.Reshape, "shape", "[0, 4]", (0, 4), "a list of positive integers, of which one may be -1"),
    (nn.Select, "indices", "[]", (), "a list of 1 or more integers in [0, 2^31)"),
    (optim.SGD, "lr", "0", 0, "a number in (0, 3.4e38]"),
    (optim.SGD, "lr", "1e39", 1e39, "a number in (0, 3.4e38]"),
    (optim.SGD, "momentum", "1", 1, "a number in [0, 1)"),
    (optim.Adam, "betas", "[0.9]", (0.9,), "a list of 2 numbers in [0, 1)"),
    (optim.Adam, "betas", "[0.9, 1]", (0.9, 1), "a list of 2 numbers in [0, 1)"),
    (optim.AdamW, "weight_decay", "-0.1", -0.1, "a number in [0, 3.4e38]"),
    (optim.RMSprop, "alpha", "-.inf", -math.inf, "a number in [0, 1)"),
    (optim.schedules.Exponential, "gamma", "-1", -1, "a number in [0, 3.4e38]"),
    (optim.schedules.OneCycle, "pct_start", "1.5", 1.5, "a number in [0, 1)"),
    (optim.schedules.OneCycle, "div_factor", "0.5", 0.5, "a number in [1, 3.4e38]"),
    (augment.Crop, "padding", "1.5", 1.5, "an integer in [0, 2^31)"),
    (augment.Crop, "padding_mode", "wrap", "wrap", "one of constant, reflect"),
    (augment.RandomResizedCrop, "scale", "[0, 1]", (0, 1), "a list of 2 numbers in (0, 1]"),
    (augment.RandomResizedCrop, "ratio", "[1]", (1,), "a list of 2 numbers in (0, 3.4e38]"),
    (augment.VerticalFlip, "probability", "-1", -1, "a number in [0, 1]"),
    (augment.ColorJitter, "hue", "0.6", 0.6, "a number in [0, 0.5]"),
    (augment.Cutmix, "alpha", "0", 0, "a number in (0, 3.4e38]"),
    (augment.Flip, "probability", "2", 2, "a number in [0, 1]"),
    (augment.Affine, "rotation", "361", 361, "a number in [0, 360]"),
    (augment.Cutout, "size", "0", 0, "an integer in [1, 2^31)"),
    (augment.Mixup, "alpha", "null", None, "a number in (0, 3.4e38]"),
    (augment.Noise, "deviation", "{a: 1}", {"a": 1}, "a number in [0, 3.4e38]"),
]  # fmt: skip
REQUIRED: dict[type, dict[str, Any]] = {
    nn.Linear: {"out_features": 8},
    nn.Conv2d: {"out_channels": 8, "kernel_size": 3},
    nn.LSTM: {"hidden_size": 8},
    optim.SGD: {"lr": 0.1},
    optim.schedules.OneCycle: {"total_steps": 10},
}


@pytest.mark.parametrize(("made", "option", "text", "value", "expected"), WRONG)
def test_a_wrong_option_is_one_line_with_its_place_and_range(
    tmp_path: Path, made: Any, option: str, text: str, value: Any, expected: str
) -> None:
    kind, required = made.kind(), REQUIRED.get(made, {})
    with pytest.raises(OptionError) as caught:
        made(**required | {option: value})
    in_python = expected.replace("a list of", "a tuple of").replace("true or false", "True or False")
    assert str(caught.value) == f"{kind}: {option} is {value!r}, expected {in_python}"

    required = {name: x for name, x in required.items() if name != "total_steps"}
    options = ", ".join(f"{name}: {x}" for name, x in (required | {option: text}).items())
    spec = f"{kind}: {{{options}}}"
    config_text, path = small(spec, "flatten", "linear: 10"), "model.layers[0]"
    if issubclass(made, optim.Optimizer):
        config_text, path = small("flatten", "linear: 10").replace("adam", f"{{{spec}}}"), "optimizer"
    elif issubclass(made, optim.Schedule):
        config_text, path = small("flatten", "linear: 10") + f"schedule: {{{spec}}}\n", "schedule"
    elif issubclass(made, augment.Augmentation):
        data = f"batch_size: 8, augment: [{spec}]"
        config_text, path = small("flatten", "linear: 10").replace("batch_size: 8", data), "data.augment[0]"
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, config_text)
    (line,) = str(refused.value).splitlines()
    assert f"c.yaml:{1 + config_text[: config_text.index(spec)].count(chr(10))}:" in line
    assert f": {path}.{kind}.{option}: found " in line
    assert line.endswith(f", expected {expected}")


def test_a_class_of_a_plugin_is_checked_by_its_annotations_in_python() -> None:
    @ad.register.loss("bounded_loss")
    class BoundedLoss:
        share: Annotated[float, Field(gt=0, lt=1)] = 0.5

        def __call__(self, outputs: ad.Value, labels: ad.Value) -> ad.Value:
            return ad.ops.mean(outputs)

    @ad.register.optimizer("bounded_optimizer")
    class BoundedOptimizer(optim.SGD):
        rate: Positive = 1.0

    make: Any = BoundedLoss
    make_optimizer: Any = BoundedOptimizer
    try:
        assert make(share=0.25).share == 0.25
        for wrong in (1, "a", math.nan):
            with pytest.raises(OptionError, match=r"^bounded_loss: share is .*, expected a number in \(0, 1\)$"):
                make(share=wrong)
        with pytest.raises(OptionError, match=r"^bounded_optimizer: rate is 0, expected a number in \(0, 3\.4e38\]$"):
            make_optimizer(0.1, rate=0)
    finally:
        del FAMILIES["loss"]["bounded_loss"], FAMILIES["optimizer"]["bounded_optimizer"]


def test_a_traced_option_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ad.TraceError, match="make the argument static"):
        ad.jit(lambda x, p: ad.ops.dropout(x, p, ad.ops.rng_state(0)))(ad.array([1.0]), 0.5)
