from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from training_runs import load, prepare, write_data

from adtrain import config, training
from adtrain.config import ConfigError
from adtrain.core import tree
from adtrain.core.types import ArrayType
from adtrain.data import Rows, Split

pytestmark = pytest.mark.unfused


def test_a_folder_of_validation_images_takes_no_fraction_as_well(tmp_path: Path) -> None:
    for part in ("train", "val", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            Image.new("L", (4, 3)).save(tmp_path / "data" / part / name / "1.png")
    text = (
        "data: {{path: {}, batch_size: 2, validation: {}}}\n"
        "model: {{layers: [flatten, {{linear: 2}}]}}\nloss: cross_entropy\noptimizer: {{sgd: {{lr: 0.1}}}}\n"
        "training: {{epochs: 1}}\n"
    )
    experiment = training.prepare(config.parse(text.format(tmp_path / "data", 0.0).encode(), Path("x.yaml")))
    assert experiment.validation is not None
    assert (len(experiment.train), len(experiment.validation)) == (2, 2)
    with pytest.raises(ConfigError, match=r"data\.validation: found 0\.5, but .* has a folder of validation images"):
        training.prepare(config.parse(text.format(tmp_path / "data", 0.5).encode(), Path("x.yaml")))


@pytest.mark.parametrize(
    ("overrides", "layers", "message"),
    [
        ([], "[linear: 2]", "model.layers[0]: found 2 outputs, expected at least 3: "),
        (
            ["model.input=[35]"],
            "[linear: 3]",
            "model.input: found [35], expected [1, 6, 6], the shape of the images, [6, 6] for rows of pixels, "
            "or [36] for flat input",
        ),
        (["model.input=[6, 6, 1]"], "[flatten, linear: 3]", "model.input: found [6, 6, 1], expected "),
        (
            ["loss=mse", "model.input=[1, 6, 6]"],
            "[conv2d: 3]",
            "model.layers[0]: found the output [3, 4, 4], expected [3], one per class",
        ),
        ([], "[relu]", "model.layers: found no parameters, expected at least one layer with parameters"),
        (
            ["data={dataset: mnits, batch_size: 1}"],
            "[linear: 3]",
            "data.dataset: unknown data set 'mnits'; did you mean mnist?",
        ),
        (
            ["data.batch_size=89"],
            "[batch_norm1d, linear: 3]",
            "data.batch_size: found 89, which leaves 1 of 90 images for the last batch, expected another size: "
            "layer 0 (batch_norm1d) needs 2 images per batch",
        ),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(
    tmp_path: Path, overrides: list[str], layers: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(tmp_path, *overrides, layers=layers.replace("conv2d: 3", "conv2d: {out_channels: 3, kernel_size: 3}"))
    where = re.escape(f"{tmp_path}/tiny.yaml:") + r"\d+:\d+|--set \S+"
    assert re.match(rf"(?:{where}: |--set ){re.escape(message)}", str(error.value))
    assert "\n" not in str(error.value)


def test_more_outputs_than_classes_are_allowed(tmp_path: Path) -> None:
    assert training.run(prepare(tmp_path, "training.steps=1", layers="[linear: 5]")).steps == 1


def test_more_classes_than_outputs_are_refused_before_training(tmp_path: Path) -> None:
    cfg = load(tmp_path)
    write_data(tmp_path / "data", classes=12)
    with pytest.raises(ConfigError) as error:
        training.prepare(cfg)
    assert str(error.value) == (
        f"{tmp_path}/tiny.yaml:8:7: model.layers[2]: found 3 outputs, expected at least 12: "
        f"{tmp_path}/data has 12 classes"
    )


def test_the_data_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load(tmp_path, "data.path=data")
    monkeypatch.chdir(tmp_path)
    assert training.prepare(cfg).config.data.path == str(tmp_path / "data")


def test_arrays_have_the_dtype_of_the_configs_precision(tmp_path: Path) -> None:
    single, double = (prepare(tmp_path, f"training.precision={name}") for name in ("float32", "float64"))
    for a, b in zip(
        tree.leaves(single.initial_state("cpu").params), tree.leaves(double.initial_state("cpu").params), strict=True
    ):
        assert (a.dtype, b.dtype) == (np.float32, np.float64)
        np.testing.assert_array_equal(a.numpy(), b.numpy().astype(np.float32))
    batch = training.on_device(double.train, "cpu").batches(np.arange(4))
    state, metrics = double.train_step(double.initial_state("cpu"), double.seed("cpu"), *batch)
    assert metrics.loss.dtype == np.float64
    assert {x.dtype for x in tree.leaves(state.params)} == {np.dtype(np.float64)}


def test_an_epoch_cut_short_by_steps_is_counted(tmp_path: Path) -> None:
    for steps, epochs in ((1, 1), (6, 1), (7, 2), (1000, 3)):
        assert prepare(tmp_path, f"training.steps={steps}").epochs == epochs


@pytest.mark.parametrize(
    "optimizer", ["adam: {lr: 0.1}", "sgd: {lr: 0.1, momentum: 0.9}", "rmsprop: {lr: 0.1, momentum: 0.9}"]
)
def test_arrays_of_a_state_and_its_copy_share_no_memory(tmp_path: Path, optimizer: str) -> None:
    layers = "[batch_norm1d, linear: 4, linear: 4, linear: 3]"
    state = prepare(tmp_path, f"optimizer={{{optimizer}}}", layers=layers).initial_state("cpu")
    buffers = [x.buffer for x in tree.leaves((state, training.copied(state)))]
    assert all(x.flags.c_contiguous for x in buffers)
    assert not any(np.shares_memory(a, b) for a, b in combinations(buffers, 2))


def test_a_split_on_the_cpu_is_not_copied(tmp_path: Path) -> None:
    indices = np.array([[5, 0], [71, 9]])
    whole, part = prepare(tmp_path).train, prepare(tmp_path, "data.validation=0.2").train
    assert isinstance(whole.images, np.ndarray)
    assert isinstance(part.images, Rows)
    strided = Split(whole.images.transpose(0, 1, 3, 2)[::-1], whole.labels[::-1])
    for split, memory in ((whole, whole.images), (part, part.images.base), (strided, None)):
        images, labels, order = (x.numpy() for x in training.on_device(split, "cpu").batches(indices))
        assert images.flags.c_contiguous
        assert memory is None or np.shares_memory(images, memory)
        np.testing.assert_array_equal(images[order], np.asarray(split.images)[indices])
        np.testing.assert_array_equal(labels[order], split.labels[indices])


def test_validation_images_are_not_in_the_training_split(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "data.validation=0.2")
    assert experiment.validation is not None
    assert len(experiment.data.train) + len(experiment.validation) == 90


@pytest.mark.parametrize("name", ["smoke", "lenet5"])
def test_an_outline_of_a_packaged_config_has_the_same_program_as_the_experiment(name: str) -> None:
    cfg = config.load(name, ["data.validation=0.1"])
    program = training.outline(cfg).step_program()
    assert str(program) == str(training.prepare(cfg).step_program())
    assert program.inputs[-3].type == ArrayType((54_000, 1, 28, 28), np.dtype("uint8"))


def test_an_outline_reads_no_data(tmp_path: Path) -> None:
    cfg = load(tmp_path, "data.path=nowhere")
    program = training.outline(cfg).step_program()
    types = [str(v.type) for v in (*program.inputs[-3:], program.outputs[0])]
    assert types == ["uint8[16, 1, 1, 36]", "int64[16]", "int64[100, 16]", "float32[16, 36]"]
    wrong = load(tmp_path, "data={dataset: mnist, batch_size: 16}")
    with pytest.raises(ConfigError, match=r"model.input: found \[36\], expected \[1, 28, 28\]"):
        training.outline(wrong)
