from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from threading import Barrier, Thread
from time import sleep

import numpy as np
import pytest
from config_files import FULL, load, problems, small

import adtrain as ad
from adtrain import config, nn, optim
from adtrain.config.specs import Family, Spec


def test_config_builds_the_model_it_describes(tmp_path: Path) -> None:
    model = config.build.model(load(tmp_path, FULL))
    assert model == nn.Sequential(
        nn.Conv2d(32, kernel_size=3), nn.ReLU(), nn.Conv2d(64, kernel_size=3, padding=1), nn.BatchNorm2d(), nn.ReLU(),
        nn.Residual(nn.Sequential(nn.Conv2d(64, kernel_size=3, padding=1), nn.ReLU())),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(10),
    )  # fmt: skip
    assert model.output_shape((1, 28, 28)) == (10,)


def test_branches_and_shortcuts_build_containers(tmp_path: Path) -> None:
    layers = (
        "concat: [[relu], [tanh]]", "residual: {body: [linear: 3], shortcut: [linear: 3]}", "add: [[relu], [silu]]",
        "multiply: [[relu], [silu]]",
    )  # fmt: skip
    model = config.build.model(load(tmp_path, small("flatten", *layers)))

    def sequential(module: nn.Module) -> nn.Sequential:
        return nn.Sequential(module)

    assert model.layers[1:] == (
        nn.Concat(sequential(nn.ReLU()), sequential(nn.Tanh())),
        nn.Residual(sequential(nn.Linear(3)), shortcut=sequential(nn.Linear(3))),
        nn.Add(sequential(nn.ReLU()), sequential(nn.SiLU())),
        nn.Multiply(sequential(nn.ReLU()), sequential(nn.SiLU())),
    )


@pytest.mark.parametrize("name", [name for name in config.packaged() if config.load(name).data.dataset])
def test_packaged_configs_on_mnist_have_ten_outputs(name: str) -> None:
    cfg = config.load(name)
    assert config.build.model(cfg).output_shape(cfg.model.input_shape) == (10,)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["conv2d: {out_channels: 2, kernel_size: 5}", "conv2d: {out_channels: 3, kernel_size: 5}"],
         "7:7: model.layers[1] conv2d: kernel 5x5 is larger than the padded input 2x2"),
        (["max_pool2d: 7"], "6:7: model.layers[0] max_pool2d: kernel 7x7 is larger than the padded input 6x6"),
        (["conv2d: {out_channels: 2, kernel_size: 3, in_channels: 3}"],
         "6:7: model.layers[0] conv2d: in_channels is 3, expected 1 for the input (1, 6, 6)"),
        (["flatten", "linear: {out_features: 10, in_features: 35}"],
         "7:7: model.layers[1] linear: in_features is 35, expected 36 for the input (36,)"),
        (["flatten", "conv2d: {out_channels: 3, kernel_size: 1}"],
         "7:7: model.layers[1] conv2d: expected an input of shape (channels, height, width), found (36,)"),
        (["flatten", "residual: [linear: 35]"],
         "7:7: model.layers[1] residual: the body gives (35,), its input is (36,): add a shortcut that gives (35,)"),
        (["residual: [relu, {residual: {body: [relu], shortcut: [max_pool2d: 7]}}]"],
         "6:61: model.layers[0].residual.body[1].residual.shortcut[0] max_pool2d: "
         "kernel 7x7 is larger than the padded input 6x6"),
        (["flatten", "concat: [[relu], [linear: {out_features: 2, in_features: 2}]]"],
         "7:25: model.layers[1].concat.branches[1][0] linear: in_features is 2, expected 36 for the input (36,)"),
        (["flatten", "add: [[linear: 2], [linear: 3]]"],
         "7:7: model.layers[1] add: the branches must agree, branch 0 gives (2,), branch 1 (3,)"),
        (["multiply: [[{conv2d: {out_channels: 2, kernel_size: 3}}], [{conv2d: {out_channels: 3, kernel_size: 3}}]]"],
         "6:7: model.layers[0] multiply: the branches must agree or have axes of length 1, branch 0 gives (2, 4, 4), "
         "branch 1 (3, 4, 4)"),
        (["adaptive_max_pool2d: 4"],
         "6:7: model.layers[0] adaptive_max_pool2d: the output size 4x4 does not divide the input 6x6"),
        (["prelu: 3"],
         "6:7: model.layers[0] prelu: num_parameters is 3, expected 1 or the number of channels of (1, 6, 6)"),
        (["conv1d: {out_channels: 3, kernel_size: 2}"],
         "6:7: model.layers[0] conv1d: expected an input of shape (channels, length), found (1, 6, 6)"),
        (["conv2d: {out_channels: 3, kernel_size: 3, padding: same, stride: 2}"],
         "6:7: model.layers[0] conv2d: padding 'same' needs stride 1, found stride 2"),
        (["linear: 10"], "6:7: model.layers[0] linear: found output (1, 6, 10), expected (classes,) for the loss "
         "cross_entropy: add flatten and linear"),
    ],
)  # fmt: skip
def test_the_error_of_a_layer_that_does_not_fit_names_found_and_expected_sizes(
    tmp_path: Path, layers: list[str], message: str
) -> None:
    assert problems(tmp_path, small(*layers)) == [f"c.yaml:{message}"]


def test_problems_of_layers_optimizer_and_schedule_are_reported_together(tmp_path: Path) -> None:
    same = "conv2d: {out_channels: 3, kernel_size: 3, padding: same, stride: 2}"
    text = small(same, f"residual: [{same}]", "flatten", "linear: 10")
    text = text.replace("optimizer: adam", "optimizer: {sgd: {lr: 0.1, nesterov: true}}")
    text += "schedule: {cosine: {warmup_epochs: 0.5, warmup_steps: 3}}\n"
    assert problems(tmp_path, text) == [
        "c.yaml:6:7: model.layers[0] conv2d: padding 'same' needs stride 1, found stride 2",
        "c.yaml:7:18: model.layers[1].residual.body[0] conv2d: padding 'same' needs stride 1, found stride 2",
        "c.yaml:11:1: optimizer sgd: nesterov needs a momentum above 0",
        "c.yaml:13:1: schedule cosine: found warmup_epochs 0.5 and warmup_steps 3, expected one of them",
    ]


def test_shapes_are_checked_without_allocating(tmp_path: Path) -> None:
    cfg = load(tmp_path, small("flatten", "linear: 2147483647", "linear: 2147483647", "linear: 10"))
    assert config.build.model(cfg).output_shape((1, 6, 6)) == (10,)


def test_loss_is_built_with_its_options(tmp_path: Path) -> None:
    logits, targets = np.array([[2.0, 0.0]]), np.array([0])
    loss = config.build.loss(load(tmp_path, FULL))
    log_p = logits - np.log(np.exp(logits).sum())
    assert loss(ad.array(logits), ad.array(targets)).item() == pytest.approx(-(0.95 * log_p[0, 0] + 0.05 * log_p[0, 1]))


def test_a_loss_is_built_with_weights_of_classes(tmp_path: Path) -> None:
    weights = [0.0] * 9 + [1.0]
    cfg = load(tmp_path, small("flatten", "linear: 10"), f"loss={{cross_entropy: {{weight: {weights}}}}}")
    loss = config.build.loss(cfg)(ad.array(np.zeros((2, 10))), ad.array(np.array([3, 9])))
    assert loss.item() == pytest.approx(math.log(10))


@pytest.mark.parametrize("option", ["cross_entropy: {weight", "binary_cross_entropy_with_logits: {pos_weight"])
def test_the_error_of_weights_names_the_number_of_classes(tmp_path: Path, option: str) -> None:
    text = small("flatten", "linear: 10").replace("loss: cross_entropy", f"loss: {{{option}: [1, 2]}}}}")
    kind, name = option.split(": {")
    assert problems(tmp_path, text) == [
        f"c.yaml:8:1: loss {kind}: {name} has 2 numbers, expected 10: one for each class"
    ]


def test_optimizer_is_built_with_its_options(tmp_path: Path) -> None:
    text = small("flatten", "linear: 10")
    assert config.build.optimizer(load(tmp_path, text)) == optim.Adam()
    sgd = load(tmp_path, text, "optimizer={sgd: {lr: 0.1, momentum: 0.9, nesterov: true}}")
    assert config.build.optimizer(sgd) == optim.SGD(lr=0.1, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant: {}", {0: 1, 39: 1}),
        ("step: 1", {0: 1, 9: 1, 10: 0.1, 20: 0.01}),
        ("step: {step_size: 0.5, gamma: 0.5}", {4: 1, 5: 0.5, 10: 0.25}),
        ("multistep: [1, 2.5]", {9: 1, 10: 0.1, 24: 0.1, 25: 0.01}),
        ("exponential: 0.5", {0: 1, 10: 0.5, 20: 0.25, 5: math.sqrt(0.5)}),
        ("cosine: {}", {0: 1, 20: 0.5, 40: 0}),
        ("cosine: 0.2", {0: 1, 20: 0.6, 40: 0.2}),
        ("cosine: {warmup_epochs: 2}", {0: 1 / 21, 19: 20 / 21, 20: 1, 30: 0.5, 40: 0}),
        ("constant: {warmup_steps: 3}", {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 30: 1}),
        ("one_cycle: {div_factor: 10}", {0: 0.1, 11: 1, 39: 1e-5}),
    ],
)
def test_schedule_options_in_epochs_become_steps(tmp_path: Path, schedule: str, factors: dict[int, float]) -> None:
    cfg = load(tmp_path, small("flatten", "linear: 10"), f"schedule={schedule}")
    built = config.build.schedule(cfg, steps_per_epoch=10, total_steps=40)
    for step, factor in factors.items():
        assert built(ad.array(step)).item() == pytest.approx(factor, abs=1e-12), step


def test_threads_that_use_a_spec_for_the_first_time_get_the_same_class() -> None:
    made, start, found = iter(range(4)), Barrier(4), list[type[Spec]]()

    def make() -> type[Spec]:
        sleep(0.01)  # the others begin meanwhile
        return type(f"Spec{next(made)}", (Spec,), {})

    def use() -> None:
        start.wait()
        found.append(family["kind"])

    family = Family(lambda: {"kind": partial(make)})
    threads = [Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == found[:1] * 4
