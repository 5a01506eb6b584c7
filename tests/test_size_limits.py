"""Sizes near 2^31 and above, in configs and in operations: refused in one line, or right."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from adtrain import config, nn, ops, training
from adtrain.config.specs import AUGMENTATIONS, AVERAGES, CONTAINERS, LAYERS, LOSSES, OPTIMIZERS, SCHEDULES
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError, OptionError, OutOfMemory
from adtrain.files import asset_path
from adtrain.ops import elementwise
from adtrain.training import checks

LARGEST = 2**31 - 1
REQUIRED: dict[str, dict[str, Any]] = {
    "conv2d": {"out_channels": 2, "kernel_size": 3},
    "conv_transpose2d": {"out_channels": 2, "kernel_size": 3},
    "max_pool2d": {"kernel_size": 2},
    "avg_pool2d": {"kernel_size": 2},
    "decoder_layer": {"num_heads": 1},
    "embedding": {"num_embeddings": 10, "embedding_dim": 2},
    "group_norm": {"num_groups": 1},
    "adaptive_max_pool2d": {"output_size": 1},
    "conv1d": {"out_channels": 2, "kernel_size": 1},
    "gru": {"hidden_size": 2},
    "linear": {"out_features": 2},
    "lstm": {"hidden_size": 2},
    "multihead_attention": {"num_heads": 1},
    "rnn": {"hidden_size": 2},
    "select": {"indices": [0]},
    "soft_cap": {"cap": 1.0},
    "transformer_encoder_layer": {"nhead": 1},
}


def integer_options() -> Iterator[tuple[str, str]]:
    """(layer, option) of each option that is an integer, or several."""
    for kind, layer in nn.LAYERS.items():
        hints = get_type_hints(layer)
        for name in inspect.signature(layer).parameters:
            if "int" in repr(hints[name]):
                yield kind, name


def outline(folder: Path, layer: dict[str, Any], shape: tuple[int, ...] = (1, 6, 6), batch_size: int = 2) -> None:
    """Load a config with this layer, and trace its training step."""
    path = folder / "c.yaml"
    values = {
        "name": "x",
        "data": {"path": "none", "batch_size": batch_size},
        "model": {"input": shape, "layers": [layer, "flatten", {"linear": 3}]},
        "loss": "cross_entropy",
        "optimizer": {"sgd": 0.1},
        "training": {"epochs": 1},
    }
    path.write_text(json.dumps(values))
    training.outline(config.load(path)).step_program()


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of 64 MiB are too many."""
    monkeypatch.setattr(checks, "machine_memory", lambda: 64 << 20)


@pytest.mark.parametrize(("kind", "option"), list(integer_options()))
def test_the_largest_size_of_an_option_is_refused_in_one_line_or_right(
    small_machine: None, tmp_path: Path, kind: str, option: str
) -> None:
    for value in (LARGEST, LARGEST // 2, [1, LARGEST], [LARGEST] * 3):
        for more in ({}, {"padding": LARGEST // 2}, {"padding": LARGEST}):
            if more and "padding" not in inspect.signature(nn.LAYERS[kind]).parameters:
                continue
            layer = {kind: {**REQUIRED.get(kind, {}), **more, option: value}}
            try:
                outline(tmp_path, layer)
            except AdtrainError as error:
                assert len(error.lines) == 1  # noqa: PT017
                assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("shape", [(LARGEST,), (1, LARGEST, LARGEST), (LARGEST,) * 30])
def test_the_largest_inputs_are_refused_in_one_line(
    small_machine: None, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    for layer in (
        {"linear": 3},
        {"linear": LARGEST},
        {"embedding": {"num_embeddings": LARGEST, "embedding_dim": LARGEST}},
    ):
        with pytest.raises(AdtrainError, match=r"^.*$"):
            outline(tmp_path, layer, shape)


def test_the_largest_batch_is_traced_without_memory_for_it(tmp_path: Path) -> None:
    outline(tmp_path, {"linear": 3}, batch_size=LARGEST)


def test_the_error_names_the_layer(small_machine: None, tmp_path: Path) -> None:
    with pytest.raises(AdtrainError, match=r"model.layers\[0\] conv2d: found the output 2x4294967298x4294967298"):
        outline(tmp_path, {"conv2d": {"out_channels": 2, "kernel_size": 3, "padding": LARGEST}})
    with pytest.raises(AdtrainError, match=r"3,600,000,003 of them in layer 2 \(linear\), expected at most 8,388,608"):
        outline(tmp_path, {"linear": 200_000_000})


@pytest.mark.parametrize(
    "spec",
    [
        spec
        for family in (LAYERS, LOSSES, OPTIMIZERS, SCHEDULES, AVERAGES, AUGMENTATIONS)
        for spec in family.values()
        if spec not in CONTAINERS
    ],
)
def test_every_number_in_a_config_has_bounds(spec: Any) -> None:
    schema = json.loads((asset_path("configs") / "schema.json").read_text())["$defs"][spec.__name__]
    for words in re.findall(r'\{[^{}]*"type": "(?:integer|number)"[^{}]*\}', json.dumps(schema)):
        assert '"const"' in words or ("inimum" in words and "aximum" in words), words


X = array(np.zeros((1, 1, 4, 4), np.float32))
W = array(np.zeros((1, 1, 2, 2), np.float32))
V, M, I = array(np.zeros(4, np.float32)), array(np.zeros((3, 4), np.float32)), array(np.zeros(3, np.int32))  # noqa: E741
HUGE = (2**62, 2**63 - 1, 2**63, 2**64, 10**30)
IN_32_BITS = (2**31 - 1, 2**31, 2**32)

OPERATIONS: dict[str, tuple[Callable[[int], object], tuple[int, ...]]] = {
    "zeros": (lambda n: ops.zeros((n, n)), HUGE),
    "ones of one axis": (ops.ones, HUGE),
    "full": (lambda n: ops.full((2, n), 1), HUGE),
    "arange": (ops.arange, HUGE),
    "arange of floats": (lambda n: ops.arange(0, n, 1e-9), HUGE),
    "pad": (lambda n: ops.pad(V, n), HUGE),
    "pad of two axes": (lambda n: ops.pad(M, ((n, n), (n, n))), (2**31 - 1, 2**32, *HUGE)),
    "crop": (lambda n: ops.pad(V, -n), (*IN_32_BITS, *HUGE)),
    "broadcast_to": (lambda n: ops.broadcast_to(V, (n, n, 4)), (*IN_32_BITS, *HUGE)),
    "reshape": (lambda n: ops.reshape(V, (n, -1)), (*IN_32_BITS, *HUGE)),
    "one_hot": (lambda n: ops.one_hot(I, n), HUGE),
    "topk": (lambda n: ops.topk(V, n), (*IN_32_BITS, *HUGE)),
    "sum": (lambda n: ops.sum(V, axis=n), (*IN_32_BITS, *HUGE)),
    "stack": (lambda n: ops.stack([V], axis=n), (*IN_32_BITS, *HUGE)),
    "embedding": (lambda n: ops.embedding(np.array([min(n, 2**63 - 1)]), M), (*IN_32_BITS, *HUGE)),
    "index": (lambda n: V[n], (*IN_32_BITS, *HUGE)),
    "integer + n": (lambda n: I + n, (2**31, 2**32, *HUGE)),
    "conv2d stride": (lambda n: ops.conv2d(X, W, stride=n), (2**31, *HUGE)),
    "conv2d padding": (lambda n: ops.conv2d(X, W, padding=n), (*IN_32_BITS, *HUGE)),
    "conv2d dilation": (lambda n: ops.conv2d(X, W, dilation=n), (*IN_32_BITS, *HUGE)),
    "conv2d dilation, padding": (lambda n: ops.conv2d(X, W, dilation=n, padding=n), (*IN_32_BITS, *HUGE)),
    "conv2d groups": (lambda n: ops.conv2d(X, W, groups=n), (*IN_32_BITS, *HUGE)),
    "conv_transpose2d stride": (lambda n: ops.conv_transpose2d(X, W, stride=n), (*IN_32_BITS, *HUGE)),
    "conv_transpose2d dilation": (lambda n: ops.conv_transpose2d(X, W, dilation=n), (*IN_32_BITS, *HUGE)),
    "conv_transpose2d both": (lambda n: ops.conv_transpose2d(X, W, dilation=n, padding=n // 2), (*IN_32_BITS, *HUGE)),
    "max_pool2d": (lambda n: ops.max_pool2d(X, n, padding=n // 2), (*IN_32_BITS, *HUGE)),
    "avg_pool2d": (lambda n: ops.avg_pool2d(X, n, padding=n // 2), (*IN_32_BITS, *HUGE)),
    "adaptive_avg_pool2d": (lambda n: ops.adaptive_avg_pool2d(X, n), (*IN_32_BITS, *HUGE)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_refuses_sizes_that_it_cannot_hold(name: str) -> None:
    run, sizes = OPERATIONS[name]
    for size in sizes:
        with pytest.raises(AdtrainError) as caught:
            run(size)
        assert "\n" not in str(caught.value)


def test_sizes_beyond_the_end_that_leave_little_are_right() -> None:
    numbers = array(np.arange(4, dtype=np.float32))
    for size in (*IN_32_BITS, *HUGE):
        assert numbers[size : size + 1].shape == (0,)
        assert numbers[::size].numpy().tolist() == [0]
    assert ops.conv2d(X, W, stride=LARGEST).shape == (1, 1, 1, 1)
    assert ops.arange(0, -5, -(2**62)).numpy().tolist() == [0]
    with pytest.raises(OptionError, match="arange: found start 0, stop 3, step 0"):
        ops.arange(0, 3, 0)
    with pytest.raises(OptionError, match="arange: stop is nan, expected a number"):
        ops.arange(0, float("nan"))


def test_a_lack_of_memory_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(*_: object) -> None:
        raise MemoryError("Unable to allocate 16.0 GiB")

    monkeypatch.setitem(elementwise.exp_p.__dict__, "reference", reference)
    with pytest.raises(OutOfMemory, match=r"^exp: not enough memory; Unable to allocate 16.0 GiB$"):
        ops.exp(V)
    with pytest.raises(MemoryError):
        ops.exp(V)


@pytest.mark.parametrize("value", [1e39, 1e300, -1e300, 10**90])
def test_a_number_that_float32_cannot_hold_is_refused_in_a_config(tmp_path: Path, value: float) -> None:
    for layer in ({"leaky_relu": value}, {"elu": value}, {"layer_norm": {"normalized_shape": 6, "eps": value}}):
        with pytest.raises(config.ConfigError, match=r"found .*, expected a number in .*3\.4e38\]"):
            outline(tmp_path, layer)


@pytest.mark.parametrize("value", [1e39, -1e300])
def test_an_array_rounds_to_infinity_without_a_warning(value: float) -> None:
    assert np.isinf(array([value]).numpy()).all()
    assert np.isinf(array(np.array([value]), np.float32).numpy()).all()
