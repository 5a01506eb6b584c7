"""The exported training step: the same weights as by `adtrain train`, to rounding."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import c_programs
import numpy as np
import pytest
from training_runs import prepare

from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.export.c import source
from adtrain.training import Experiment, TrainedModel
from adtrain.training.evaluation import predictions
from adtrain.training.step import TrainState

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not c_programs.has("gcc"), reason="gcc is not installed"),
]

STEPS = 20
LAYERS = {
    "linear": "[linear: 16, relu, dropout: 0, linear: 3]",
    "convolution": "[reshape: [1, 6, 6], conv2d: {out_channels: 4, kernel_size: 3, padding: 1}, relu, max_pool2d: 2, "
    "conv2d: {out_channels: 6, kernel_size: 2, stride: 2, dilation: 2, padding: 1, groups: 2}, gelu, flatten, "
    "linear: 3]",
    "residual": "[reshape: [4, 3, 3], residual: [conv2d: {out_channels: 4, kernel_size: 3, padding: 1, bias: false}, "
    "batch_norm2d], relu, avg_pool2d: {kernel_size: 2, stride: 1}, adaptive_avg_pool2d: 1, flatten, linear: 3]",
    "norms": "[linear: {out_features: 12, bias: false}, batch_norm1d, tanh, layer_norm, silu, reshape: [4, 3], "
    "group_norm: 2, flatten, linear: 3, softplus]",
    "tokens": "[reshape: [6, 6], linear: 5, positional_embedding, layer_norm, elu, mean, sigmoid, linear: 3]",
}


def model_of(experiment: Experiment, state: TrainState) -> TrainedModel:
    return TrainedModel(
        experiment.config, experiment.network, state.params, state.statistics, ("a", "b", "c"), experiment.image_shape
    )


def c_weights(text: str) -> tuple[list[str], str]:
    """The names of the arrays of weights of a source, and functions that give their addresses."""
    names = re.findall(r"static float (layer_\w+)\[", text)
    return names, "".join(f"float *get_{n}(void);\nfloat *get_{n}(void) {{ return {n}; }}\n" for n in names)


def compiled(folder: Path, files: source.Files, options: Sequence[str] = ("-O0",)) -> ctypes.CDLL:
    (folder / "net.c").write_text(files.source + c_weights(files.source)[1])
    (folder / "net.h").write_text(files.header)
    c_programs.compile_c(["gcc"], folder, *options, "-fPIC", "-shared", "net.c", "-o", "net.so", "-lm")
    return ctypes.CDLL(str(folder / "net.so"))


def pointer(x: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


def check(experiment: Experiment, folder: Path, tolerance: float = 1e-4) -> None:
    """Compare weights, statistics and losses of STEPS steps with those of eager ones; `tolerance` is of the change."""
    before = state = experiment.initial_state("cpu", random=True)
    library = compiled(folder, source.generate(model_of(experiment, state), folder / "net.c", experiment=experiment))
    train, loss, rng = experiment.train, ctypes.c_float(), np.random.default_rng(0)
    images, labels = np.ascontiguousarray(train.images[:90]), np.ascontiguousarray(train.labels[:90])
    on_device = array(images), array(labels)
    for _ in range(STEPS):
        indices = rng.integers(0, len(images), experiment.full_batch)
        state, metrics = experiment.eager_step(state, experiment.seed("cpu"), *on_device, array(indices))
        batch = images[indices], labels[indices]
        library.net_train(*map(pointer, batch), ctypes.byref(loss))
        assert loss.value == pytest.approx(float(metrics.loss), rel=1e-3, abs=1e-6)
    for old, new in ((before.params, state.params), (before.statistics, state.statistics)):
        for path, x, y in zip(tree.paths(new), tree.leaves(new), tree.leaves(old), strict=True):
            address = getattr(library, "get_layer_" + re.sub(r"\W", "_", path))
            address.restype = ctypes.POINTER(ctypes.c_float)
            found, moved = np.ctypeslib.as_array(address(), x.shape), np.abs(x.numpy() - y.numpy()).max()
            assert moved > 0
            np.testing.assert_allclose(found, x.numpy(), rtol=0, atol=tolerance * moved + 1e-6, err_msg=path)
    predicted = np.zeros((len(images), 3), np.float32)
    library.net_predict_batch(pointer(images), ctypes.c_size_t(len(images)), pointer(predicted), None)
    ours = model_of(experiment, state)
    expected = predictions(ours.network, ours.params, ours.statistics, images, "cpu")
    np.testing.assert_allclose(predicted, expected, atol=1e-4)


@pytest.mark.skipif(not c_programs.has("arm-none-eabi-gcc"), reason="arm-none-eabi-gcc is not installed")
def test_a_cortex_m4_compiler_takes_it(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "optimizer={adamw: {lr: 0.01}}", "schedule=cosine", layers=LAYERS["norms"])
    model = model_of(experiment, experiment.initial_state("cpu", random=True))
    files = source.generate(model, tmp_path / "net.c", experiment=experiment)
    (tmp_path / "net.c").write_text(files.source)
    (tmp_path / "net.h").write_text(files.header)
    c_programs.compile_c(["arm-none-eabi-gcc", "-mcpu=cortex-m4"], tmp_path, "-O1", "-c", "net.c")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in ("residual", "tokens") else pytest.mark.exhaustive) for x in LAYERS],
)
def test_weights_after_20_steps_are_those_of_adtrain(name: str, tmp_path: Path) -> None:
    check(prepare(tmp_path, "training.steps=20", layers=LAYERS[name]), tmp_path, tolerance=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        ("optimizer={sgd: {lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.01}}", "schedule=cosine"),
        ("optimizer={adamw: {lr: 0.01}}", "training.clip_norm=0.5", "loss={cross_entropy: {label_smoothing: 0.1}}"),
        pytest.param(
            ("optimizer={rmsprop: {lr: 0.01, momentum: 0.5}}", "training.clip_value=0.1", "loss=mse"),
            marks=pytest.mark.exhaustive,
        ),
        (
            "optimizer={muon: {rest: {sgd: 0.1}}}",
            "parameter_groups=[{paths: vectors, lr_factor: 2}]",
            "training.clip_value=0.1",
            "loss=mse",
        ),
    ],
    ids=["sgd", "adamw", "rmsprop", "muon with parameter groups"],
)
def test_optimizers_schedules_clipping_and_losses_are_those_of_adtrain(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    check(prepare(tmp_path, *options), tmp_path, tolerance=1e-2)


@pytest.mark.exhaustive
def test_a_step_touches_its_own_memory_only(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, layers=LAYERS["residual"])
    model = model_of(experiment, experiment.initial_state("cpu", random=True))
    files = source.generate(model, tmp_path / "net.c", experiment=experiment)
    assert re.search(r"training one step on 16 images: [\d,]+ bytes more, [\d,]+ of the optimizer", files.header)
    (tmp_path / "net.c").write_text(files.source)
    (tmp_path / "net.h").write_text(files.header)
    (tmp_path / "main.c").write_text(
        '#include "net.h"\nint main(void) { static uint8_t x[NET_BATCH * NET_INPUTS]; static int64_t y[NET_BATCH]; '
        "for (int i = 0; i < 3; i++) net_train(x, y, NULL); return 0; }\n"
    )
    sanitize = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    c_programs.compile_c(["gcc"], tmp_path, *sanitize, "net.c", "main.c", "-o", "program", "-lm")
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("[reshape: [6, 6], lstm: 4, linear: 3]", r"layer 1: lstm has no training step in C \(lstm\)"),
        ("[linear: 8, dropout: 0.5, linear: 3]", r"layer 1: dropout has no training step in C \(random_uniform\)"),
    ],
    ids=["lstm", "dropout"],
)
def test_a_layer_without_a_training_step_is_refused_by_name(layers: str, message: str, tmp_path: Path) -> None:
    experiment = prepare(tmp_path, layers=layers)
    model = model_of(experiment, experiment.initial_state("cpu", random=True))
    with pytest.raises(AdtrainError, match=message):
        source.generate(model, Path("net.c"), experiment=experiment)


def test_runs_in_float64_or_with_augmentations_are_refused(tmp_path: Path) -> None:
    for option, message in (
        ("training.precision=float64", "writes steps in float32, the run's precision is float64"),
        ("data.augment=[flip]", "--training has no augmentations"),
    ):
        experiment = prepare(tmp_path, option)
        model = model_of(experiment, experiment.initial_state("cpu", random=True))
        with pytest.raises(AdtrainError, match=message):
            source.generate(model, Path("net.c"), experiment=experiment)
