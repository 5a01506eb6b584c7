"""Augmentations in the training step and in a config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import CLASSES, load, prepare

import adtrain as ad
from adtrain import config, ops, training
from adtrain.augment import Batch
from adtrain.config import ConfigError
from adtrain.core import tree
from adtrain.core.program import Program
from adtrain.training import Experiment, Mode, TrainState, copied
from adtrain.training.step import empty_log, repeated

pytestmark = pytest.mark.unfused

ALL = "data.augment=[crop: 1, flip, affine: {rotation: 10, shift: 0.1}, noise: 0.1, cutout: 2, mixup: 0.5]"
FURTHER = (
    "data.augment=[crop: {padding: 2, padding_mode: reflect}, random_resized_crop, flip: {alternate: true}, "
    "vertical_flip, color_jitter: {brightness: 0.4, contrast: 0.4}, cutmix]"
)
ALTERNATE = "data.augment=[flip: {alternate: true}]"
PLAIN = ("training.precision=float64", "optimizer={sgd: {lr: 1.0}}")
DROPOUT = "[dropout: 0.5, linear: 3]"


def first_step(experiment: Experiment, count: int = 16) -> tuple[TrainState, Any]:
    """The state and the metrics after one step on the first `count` images."""
    examples = training.on_device(experiment.train, "cpu")
    state = copied(experiment.initial_state("cpu"))
    return experiment.train_step(state, experiment.seed("cpu"), *examples.batches(np.arange(count)))


def augmented_batch(experiment: Experiment, count: int = 16) -> Batch:
    """The augmented batch of that step, by calling each augmentation directly."""
    train, network = experiment.train, experiment.network
    pixels = ad.array(train.images[:count].astype(network.dtype))
    batch = Batch(pixels, ad.array(train.labels[:count]), network.unit)
    for change in config.build.augmentations(experiment.config):
        batch = change(batch, ops.rng_state(experiment.config.training.seed, 0))
    return batch


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", "mse", "l1", "huber", "binary_cross_entropy_with_logits"])
def test_the_training_loss_is_that_of_the_augmented_batch(tmp_path: Path, loss: str) -> None:
    layers = "[linear: 3, log_softmax]" if loss == "nll" else "[linear: 3]"
    experiment = prepare(tmp_path, *PLAIN, ALL, f"loss={loss}", layers=layers)
    batch, state = augmented_batch(experiment), experiment.initial_state("cpu")
    assert batch.mixed is not None
    share = float(batch.mixed.share)
    shares = share * np.eye(CLASSES)[batch.labels.numpy()] + (1 - share) * np.eye(CLASSES)[batch.mixed.labels.numpy()]
    outputs, _ = experiment.network.outputs(state.params, {}, batch.images, ad.nn.Mode(training=False))
    x = outputs.numpy()
    log_probs = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    distance = np.abs(x - shares)
    expected = {
        "cross_entropy": -(shares * log_probs).sum(axis=1).mean(),
        "nll": -(shares * x).sum(axis=1).mean(),
        "mse": (distance**2).mean(),
        "l1": distance.mean(),
        "huber": np.where(distance < 1, distance**2 / 2, distance - 0.5).mean(),
        "binary_cross_entropy_with_logits": (np.log1p(np.exp(x)) - shares * x).mean(),
    }
    _, metrics = first_step(experiment)
    assert float(metrics.loss) == pytest.approx(expected[loss], rel=1e-12)
    predicted = experiment.network.task.predictions(outputs).numpy().argmax(axis=1)
    assert int(metrics.sums) == (predicted == batch.labels.numpy()).sum()


def test_label_smoothing_and_mixup_combine(tmp_path: Path) -> None:
    smoothed = "loss={cross_entropy: {label_smoothing: 0.2}}"
    experiment = prepare(tmp_path, *PLAIN, "data.augment=[mixup: 0.5]", smoothed, layers="[linear: 3]")
    batch, state = augmented_batch(experiment), experiment.initial_state("cpu")
    assert batch.mixed is not None
    outputs, _ = experiment.network.outputs(state.params, {}, batch.images, ad.nn.Mode(training=False))
    share = float(batch.mixed.share)
    expected = share * float(ops.cross_entropy(outputs, batch.labels, 0.2))
    expected += (1 - share) * float(ops.cross_entropy(outputs, batch.mixed.labels, 0.2))
    assert float(first_step(experiment)[1].loss) == pytest.approx(expected, rel=1e-12)


def weights(state: TrainState) -> bytes:
    return b"".join(x.numpy().tobytes() for x in tree.leaves(state.params))


def test_augmentation_does_not_change_the_random_numbers_of_dropout(tmp_path: Path) -> None:
    plain, same = (prepare(tmp_path, f"data.augment=[{a}]", layers=DROPOUT) for a in ("", "crop: 0, flip: 0, noise: 0"))
    assert weights(first_step(plain)[0]) == weights(first_step(same)[0])


def test_random_numbers_differ_between_steps_and_repeat_between_runs(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "data.augment=[noise: 1]", layers=DROPOUT)
    runs = [weights(training.run(experiment, "cpu").state) for _ in range(2)]
    other = training.run(prepare(tmp_path, "data.augment=[noise: 1]", "training.seed=1", layers=DROPOUT), "cpu")
    assert runs[0] == runs[1] != weights(other.state)

    no_learning = prepare(tmp_path, "data.augment=[noise: 1]", "optimizer={sgd: {lr: 1.0e-30}}", layers="[linear: 3]")
    examples = training.on_device(no_learning.train, "cpu")
    state, seed, batch = no_learning.initial_state("cpu"), no_learning.seed("cpu"), examples.batches(np.arange(16))
    state, first = no_learning.train_step(state, seed, *batch)
    assert float(no_learning.train_step(state, seed, *batch)[1].loss) != float(first.loss)


@pytest.mark.parametrize("shards", [1, 2])
def test_an_alternating_flip_alternates_after_each_epoch(tmp_path: Path, shards: int) -> None:
    experiment = prepare(tmp_path, *PLAIN, ALTERNATE, "model.input=[1, 6, 6]", f"data.shards={shards}",
                         layers="[flatten, linear: 3]")  # fmt: skip
    examples, count = training.on_device(experiment.train, "cpu"), 16
    state, network = experiment.initial_state("cpu"), experiment.network
    pixels, labels = ad.array(experiment.train.images[:count].astype("f8")), ad.array(experiment.train.labels[:count])
    stored = ad.array(experiment.train.images[:count])
    losses = []
    for epoch in range(3):
        for step in (epoch * experiment.steps_per_epoch, (epoch + 1) * experiment.steps_per_epoch - 1):
            at = state._replace(optimizer={**state.optimizer, "step": ad.array(np.int64(step))})
            given = tree.map(lambda x: ad.array(x, device="cpu"), experiment.divided(tree.map(np.asarray, at)))
            batches = examples.batches(np.arange(count)), experiment.batch_arguments(count)
            _, metrics = experiment.train_step(given, experiment.seed("cpu"), *batches[0], *batches[1])
            losses.append(float(metrics.loss))
        batch = Batch(pixels, labels, network.unit, stored=stored, epoch=ad.array(np.int64(epoch)))
        flipped = config.build.augmentations(experiment.config)[0](batch, ops.rng_state(0, 0)).images
        outputs, _ = network.outputs(state.params, {}, flipped, ad.nn.Mode(training=False))
        assert losses[-2:] == pytest.approx([float(network.loss_of(outputs, labels))] * 2, rel=1e-12)
    assert losses[0] == losses[-1] != losses[2]


@pytest.mark.parametrize("augment", [ALL, FURTHER])
def test_augmented_steps_are_bit_identical_eager_staged_and_fused(tmp_path: Path, augment: str) -> None:
    convolution = "conv2d: {out_channels: 4, kernel_size: 3}, batch_norm2d, relu, max_pool2d: 2"
    layers = f"[{convolution}, flatten, dropout: 0.5, linear: 3]"
    experiment = prepare(tmp_path, "model.input=[1, 6, 6]", augment, layers=layers)
    order = np.arange(48).reshape(3, 16)
    found = []
    for mode in Mode:
        run = replace(experiment, mode=mode)
        examples = training.on_device(run.train, "cpu")
        carried = copied(run.initial_state("cpu")), empty_log(run.network.task, 3, "cpu")
        found.append(repeated(run.logged_step, 3, carried, run.seed("cpu"), *examples.batches(order)))
    for other in found[1:]:
        for a, b in zip(tree.leaves(other), tree.leaves(found[0]), strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def scopes_of_random_numbers(program: Program) -> list[str]:
    return [e.scope for e in program.equations if e.name == "random_uniform"]


def test_evaluation_is_not_augmented_and_training_draws_in_the_scope_augment(tmp_path: Path) -> None:
    experiment = replace(prepare(tmp_path, ALL, "data.validation=0.2"), mode=Mode.STAGED)
    scopes = scopes_of_random_numbers(experiment.step_program())
    assert len(scopes) == 2 + 1 + 4 + 1 + 2 + 1
    assert set(scopes) == {"augment"}
    plain = replace(experiment, augmentations=())
    state = experiment.initial_state("cpu")
    assert experiment.validation is not None
    scores = [
        training.Evaluation(e.evaluation_step, e.network.task, training.on_device(experiment.validation, "cpu")).score(
            state.params, {}
        )
        for e in (experiment, plain)
    ]
    assert scores[0] == scores[1]


def test_crops_and_flips_are_one_gather_from_the_data_set(tmp_path: Path) -> None:
    moves = "crop: {padding: 2, padding_mode: reflect}, flip: {alternate: true}, vertical_flip"
    experiment = replace(prepare(tmp_path, f"data.augment=[{moves}]"), mode=Mode.STAGED)
    gathers = [e for e in experiment.step_program().equations if e.name in ("take", "take_along_axis", "flip", "pad")]
    pixels = [e for e in gathers if e.inputs[0].type.dtype == np.uint8 and e.outputs[0].size == 16 * 36]
    assert [e.scope for e in pixels] == ["input", "augment"]  # the first one is for the sums of the pixels


def test_step_costs_have_a_row_for_augmentation(tmp_path: Path) -> None:
    rows = {row.name: row for row in training.step_costs(prepare(tmp_path, ALL)).layers}
    assert set(list(rows)[:3]) == {"input", "random", "augment"}
    assert rows["augment"].forward.flops > 0
    assert rows["augment"].backward.equations == 0


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ("[crp]", "data.augment[0]: unknown augmentation 'crp'; did you mean crop?"),
        ("flip", "found 'flip', expected a list"),
        ("[flip, crop: 1, flip: 0.2]", "data.augment[2] flip: found twice, expected each augmentation once"),
        ("[affine]", "data.augment[0] affine: found nothing to do, expected rotation, shift or scale above 0"),
        ("[crop: {pading: 3}]", "data.augment[0].crop.pading: unknown key; did you mean padding?"),
        ("[crop: -1]", "data.augment[0].crop.padding: found -1, expected an integer in [0, 2^31)"),
        ("[flip: 1.5]", "data.augment[0].flip.probability: found 1.5, expected a number in [0, 1]"),
        ("[affine: {shift: 1}]", "data.augment[0].affine.shift: found 1, expected a number in [0, 1)"),
        ("[noise: -0.1]", "data.augment[0].noise.deviation: found -0.1, expected a number in [0, 3.4e38]"),
        ("[cutout: 0]", "data.augment[0].cutout.size: found 0, expected an integer in [1, 2^31)"),
        ("[mixup: 0]", "data.augment[0].mixup.alpha: found 0, expected a number in (0, 3.4e38]"),
        ("[mixup, cutmix]", "data.augment[1] cutmix: found beside mixup, expected one augmentation that mixes images"),
        ("[flip: {probability: 0.3, alternate: true}]",
         "data.augment[0] flip: probability is 0.3, expected 0.5 with alternate"),
        ("[random_resized_crop: {ratio: [2, 1]}]",
         "data.augment[0] random_resized_crop: ratio is [2.0, 1.0], expected the lower number first"),
        ("[color_jitter]",
         "data.augment[0] color_jitter: found nothing to do, expected brightness, contrast, saturation or hue above 0"),
    ],
)  # fmt: skip
def test_the_error_of_a_wrong_augmentation_names_its_key(tmp_path: Path, augment: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, f"data.augment={augment}")
    assert str(error.value) == f"--set data.augment: {message}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.augment=[flip, crop: 6]"],
         "data.augment[1]: crop: padding is 6, expected less than the sides of an image, 6x6"),
        (["data.augment=[cutout: 7]"], "data.augment[0]: cutout: size 7 is larger than an image of 6x6"),
        (["data.augment=[mixup]", "data.batch_size=1"],
         "data.augment[0]: mixup: found batches of 1 image, expected at least 2"),
        (["data.augment=[cutmix]", "data.batch_size=1"],
         "data.augment[0]: cutmix: found batches of 1 image, expected at least 2"),
        (["data.augment=[crop: {padding: 6, padding_mode: reflect}]"],
         "data.augment[0]: crop: padding is 6, expected less than the sides of an image, 6x6"),
        (["data.augment=[color_jitter: {hue: 0.1}]"],
         "data.augment[0]: color_jitter: found images of shape (1, 6, 6), expected 3 channels for saturation and hue"),
    ],
)  # fmt: skip
def test_an_augmentation_that_does_not_fit_the_images_is_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(tmp_path, *overrides)
    assert str(error.value) == f"--set data.augment: {message}"


@pytest.mark.parametrize(
    "augment",
    [
        *("crop: 0", "random_resized_crop", "flip", "vertical_flip", "affine: 3"),
        *("color_jitter: {contrast: 1}", "cutout: 1", "cutmix"),
    ],
)
def test_geometric_augmentations_refuse_tabular_rows(augment: str) -> None:
    (change,) = config.build.augmentations(config.load("smoke", [f"data.augment=[{augment}]"]))
    with pytest.raises(ad.ShapeError, match=rf"{change.kind()}: found rows of 4 numbers, expected images \[C, H, W\]"):
        change.check((16, 4, 1, 1))


@pytest.mark.parametrize("augment", ["noise", "mixup"])
def test_noise_and_mixup_take_tabular_rows(augment: str) -> None:
    (change,) = config.build.augmentations(config.load("smoke", [f"data.augment=[{augment}]"]))
    change.check((16, 4, 1, 1))
