"""Augmentations equal plain loops over the random numbers that they draw."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from math import ceil, floor
from statistics import NormalDist

import numpy as np
import pytest
from compiled_parity import TOLERANCE, both
from hypothesis import given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops
from adtrain.augment import (
    AUGMENTATIONS,
    Affine,
    Augmentation,
    Batch,
    ColorJitter,
    Crop,
    Cutmix,
    Cutout,
    Flip,
    Mixup,
    Motion,
    Move,
    Noise,
    RandomResizedCrop,
    VerticalFlip,
    affine_transform,
    larger_shares,
    leading_moves,
    moved,
)
from adtrain.core.array import Placeholder, Value
from adtrain.core.staging import stage
from adtrain.ops.create import normal
from adtrain.passes import ALL

EVERY = (
    *(Crop(2), RandomResizedCrop(), Flip(), VerticalFlip(), Affine(20.0, 0.2, 0.3)),
    *(ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1), Noise(0.5), Cutout(3), Mixup(0.4), Cutmix()),
)
"""One of each kind."""
FURTHER = (Crop(2, padding_mode="reflect"), Flip(alternate=True))
"""With other options."""
RNG = ops.rng_state(3, 5)
UNIT = np.array([2.0, 0.5, 1.0]).reshape(-1, 1, 1)

shapes = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(2, 9), st.integers(2, 9))


def images_of(shape: Sequence[int], dtype: str = "float64") -> np.ndarray:
    """Distinct positive numbers."""
    return np.random.default_rng(0).permutation(np.arange(1, np.prod(shape) + 1)).reshape(shape).astype(dtype)


def batch_of(images: np.ndarray) -> Batch:
    return Batch(ad.array(images), ad.array(np.arange(len(images))), np.resize(UNIT, (images.shape[1], 1, 1)))


def augmented(change: Augmentation, images: np.ndarray, rng: Value = RNG) -> np.ndarray:
    return change(batch_of(images), rng).images.numpy()


def pixel(image: np.ndarray, row: int, column: int) -> np.ndarray:
    """All channels of one pixel of an image (C, H, W); 0 outside."""
    inside = 0 <= row < image.shape[1] and 0 <= column < image.shape[2]
    return image[:, row, column] if inside else np.zeros(len(image))


@given(shapes, st.integers(0, 4), st.integers(0, 10))
def test_crop_is_a_window_of_the_padded_image(shape: tuple[int, ...], padding: int, step: int) -> None:
    images, rng, crop = images_of(shape), ops.rng_state(1, step), Crop(padding)
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    corners = [c.numpy().ravel() for c in crop.corners(rng, ad.array(images))]
    found = augmented(crop, images, rng)
    for n, (row, column) in enumerate(zip(*corners, strict=True)):
        assert 0 <= min(row, column) <= max(row, column) <= 2 * padding
        np.testing.assert_array_equal(found[n], padded[n, :, row : row + shape[2], column : column + shape[3]])


@given(shapes, st.data(), st.integers(0, 10))
def test_crop_reflects_the_image_at_its_border(shape: tuple[int, ...], draw: st.DataObject, step: int) -> None:
    padding = draw.draw(st.integers(0, min(shape[2:]) - 1))
    images, rng, crop = images_of(shape), ops.rng_state(1, step), Crop(padding, padding_mode="reflect")
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)), mode="reflect")
    corners = [c.numpy().ravel() for c in crop.corners(rng, ad.array(images))]
    found = augmented(crop, images, rng)
    for n, (row, column) in enumerate(zip(*corners, strict=True)):
        np.testing.assert_array_equal(found[n], padded[n, :, row : row + shape[2], column : column + shape[3]])


@given(shapes, st.floats(0, 1), st.integers(0, 10))
def test_flip_mirrors_the_chosen_images(shape: tuple[int, ...], probability: float, step: int) -> None:
    images, rng, flip = images_of(shape), ops.rng_state(1, step), Flip(probability)
    chosen = flip.chosen(rng, batch_of(images)).numpy().reshape(-1, 1, 1, 1)
    np.testing.assert_array_equal(augmented(flip, images, rng), np.where(chosen, images[..., ::-1], images))


MOVES = Crop(1), Crop(1, padding_mode="reflect"), Flip(), Flip(alternate=True), VerticalFlip(0.4)


@given(st.permutations(MOVES), st.integers(1, 5), st.sampled_from(["uint8", "float32"]), st.integers(0, 10))
def test_moves_that_are_composed_equal_those_one_after_the_other(
    moves: list[Move], count: int, dtype: str, step: int
) -> None:
    data = ad.array((images_of((9, 2, 4, 5)) % 251).astype(dtype))
    rng, indices = ops.rng_state(1, step), ad.array(np.random.default_rng(step).integers(0, 9, 7))
    stored = ops.embedding(indices, data)
    batch = Batch(ops.astype(stored, "float32"), indices, UNIT[:2], stored=stored, epoch=ad.array(np.int64(step)))
    found, expected = moved(batch, moves[:count], rng, data, indices), batch
    for move in moves[:count]:
        expected = move(expected, rng)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.numpy().astype("float32"), expected.images.numpy())


def test_moves_at_the_beginning_are_composed() -> None:
    reflecting, alternating = FURTHER
    assert leading_moves([Crop(2)]) == []  # one gather, from padded images
    assert leading_moves([Crop(2), Flip(), Noise(), VerticalFlip()]) == [Crop(2), Flip()]
    assert leading_moves([reflecting]) == [reflecting]
    assert leading_moves([Noise(), alternating]) == []


@given(shapes, st.floats(0, 1), st.integers(0, 10))
def test_vertical_flip_turns_images_upside_down(shape: tuple[int, ...], probability: float, step: int) -> None:
    images, rng, flip = images_of(shape), ops.rng_state(1, step), VerticalFlip(probability)
    chosen = flip.uniform(rng, "chosen", (shape[0], 1, 1, 1), ad.array(images)).numpy() < probability
    np.testing.assert_array_equal(augmented(flip, images, rng), np.where(chosen, images[:, :, ::-1], images))


def flipped(images: np.ndarray, epoch: int, step: int = 0, seed: int = 3) -> list[bool]:
    """Which images an alternating flip mirrors in an epoch."""
    batch = batch_of(images.astype(np.float64))._replace(stored=ad.array(images), epoch=ad.array(np.int64(epoch)))
    chosen = Flip(alternate=True).chosen(ops.rng_state(seed, step), batch).numpy().ravel()
    return [bool(x) for x in chosen]


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_an_alternating_flip_mirrors_each_image_in_every_second_epoch(dtype: str) -> None:
    images = (np.random.default_rng(0).random((400, 3, 4, 5)) * (255 if dtype == "uint8" else 1)).astype(dtype)
    first, second, third = (flipped(images, epoch) for epoch in range(3))
    assert first == third == [not x for x in second]
    assert np.mean(first) == pytest.approx(0.5, abs=0.1)
    agreeing = np.equal(first, flipped(images, 0, seed=4)).mean()  # another seed gives other halves
    assert agreeing == pytest.approx(0.5, abs=0.1)
    order = np.random.default_rng(1).permutation(400)[:70]  # neither step nor batch matters
    assert flipped(images[order], 1, step=9) == [second[i] for i in order]


@given(st.integers(2, 12), st.integers(2, 12), st.floats(0.01, 1), st.floats(0.1, 10), st.floats(1, 5))
def test_the_parts_of_random_resized_crops_have_the_wanted_areas_and_ratios(
    height: int, width: int, least: float, narrow: float, spread: float
) -> None:
    crop = RandomResizedCrop((least, 1.0), (narrow, narrow * spread))
    found = (x.numpy().ravel() for x in crop.windows(RNG, ad.array(np.zeros((20, 1, height, width)))))
    middle_width = min(width, max(1, round(height * narrow * spread)))
    middle_height = min(height, max(1, round(width / narrow)))
    middle = (height - middle_height) // 2, (width - middle_width) // 2, middle_height, middle_width
    for top, left, h, w in zip(*found, strict=True):
        assert 0 <= top <= top + h <= height
        assert 0 <= left <= left + w <= width
        assert min(h, w) >= 1
        if (top, left, h, w) != middle:  # rounded sides are those of an area and a ratio in the intervals
            assert (h + 0.5) * (w + 0.5) >= least * height * width
            assert (w - 0.5) / (h + 0.5) <= narrow * spread
            assert (w + 0.5) / (h - 0.5) >= narrow


def test_a_part_that_never_fits_is_the_largest_one_in_the_middle() -> None:
    wide = RandomResizedCrop((1.0, 1.0), (1.0, 1.5)).windows(RNG, ad.array(np.zeros((4, 1, 4, 12))))
    assert [x.numpy().ravel().tolist() for x in wide] == [[0] * 4, [3] * 4, [4] * 4, [6] * 4]
    high = RandomResizedCrop((1.0, 1.0), (0.5, 1.0)).windows(RNG, ad.array(np.zeros((4, 1, 12, 4))))
    assert [x.numpy().ravel().tolist() for x in high] == [[2] * 4, [0] * 4, [8] * 4, [4] * 4]


def test_areas_and_ratios_of_random_resized_crops_are_uniform() -> None:
    images = Placeholder((4000, 1, 1000, 1000), np.dtype(np.float64), "cpu")
    windows = RandomResizedCrop((0.25, 0.5), (0.5, 2.0)).windows(RNG, images)
    top, left, height, width = (x.numpy().ravel() for x in windows)
    logs = np.log(width / height) / np.log(2)
    for uniform in (4 * height * width / 1e6 - 1, (logs + 1) / 2, top / (1000 - height), left / (1000 - width)):
        distance = np.abs(np.sort(uniform) - np.linspace(0, 1, 4000)).max()
        assert distance < 1.95 / 4000**0.5  # Kolmogorov-Smirnov test at 99.9%


@pytest.mark.needs_torch
@given(shapes, st.integers(0, 10))
def test_random_resized_crops_are_resized_as_by_pytorch(shape: tuple[int, ...], step: int) -> None:
    import torch

    images, rng, crop = images_of(shape), ops.rng_state(1, step), RandomResizedCrop()
    windows = [x.numpy().ravel().astype(int) for x in crop.windows(rng, ad.array(images))]
    found = augmented(crop, images, rng)
    for n, (top, left, height, width) in enumerate(zip(*windows, strict=True)):
        part = torch.tensor(images[n : n + 1, :, top : top + height, left : left + width])
        expected = torch.nn.functional.interpolate(part, shape[2:], mode="bilinear", align_corners=False)
        np.testing.assert_allclose(found[n], expected[0].numpy(), rtol=1e-12)


def test_crop_positions_are_uniform_and_flips_have_their_probability() -> None:
    batch = batch_of(np.zeros((9000, 1, 2, 2)))
    row, column = (c.numpy().ravel() for c in Crop(1).corners(RNG, batch.images))
    counts = np.bincount(row * 3 + column, minlength=9)
    assert ((counts - 1000) ** 2 / 1000).sum() < 26.1  # 99.9% quantile of chi square for 8 degrees of freedom
    assert Flip(0.25).chosen(RNG, batch).numpy().mean() == pytest.approx(0.25, abs=0.02)


def motion_of(*numbers: float | np.ndarray, count: int = 1) -> Motion:
    return Motion(*(ad.array(np.broadcast_to(np.float64(x), (count,)).reshape(-1, 1, 1)) for x in numbers))


@given(shapes, st.floats(0, 360), st.floats(0, 0.99), st.floats(0.01, 0.99), st.integers(0, 10))
def test_affine_interpolates_each_pixel_at_its_source_position(
    shape: tuple[int, ...], rotation: float, shift: float, scale: float, step: int
) -> None:
    images, rng, affine = images_of(shape), ops.rng_state(1, step), Affine(rotation, shift, scale)
    motion = [m.numpy().ravel() for m in affine.motion(rng, ad.array(images))]
    expected = np.zeros(shape)
    middle = (np.array(shape[2:]) - 1) / 2
    for n, (angle, factor, down, right) in enumerate(zip(*motion, strict=True)):
        assert abs(angle) <= np.radians(rotation)
        assert abs(factor - 1) <= scale
        assert abs(down) <= shift * shape[2]
        assert abs(right) <= shift * shape[3]
        turn_back = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        for i, j in np.ndindex(shape[2:]):
            row, column = turn_back @ (np.array([i - down, j - right]) - middle) / factor + middle
            for r in (floor(row), floor(row) + 1):
                for c in (floor(column), floor(column) + 1):
                    weight = max(0, 1 - abs(row - r)) * max(0, 1 - abs(column - c))
                    expected[n, :, i, j] += weight * pixel(images[n], r, c)
    np.testing.assert_allclose(augmented(affine, images, rng), expected, rtol=0, atol=1e-9 * images.max())


@given(shapes, st.integers(-10, 10), st.integers(-10, 10))
def test_shifts_by_whole_pixels_are_exact(shape: tuple[int, ...], down: int, right: int) -> None:
    images = images_of(shape, "float32")
    motion = motion_of(0.0, 1.0, down, right, count=shape[0])
    found = affine_transform(ad.array(images), Motion(*(m.astype(np.float32) for m in motion))).numpy()
    expected = np.zeros_like(images)
    for i, j in np.ndindex(shape[2:]):
        for n in range(shape[0]):
            expected[n, :, i, j] = pixel(images[n], i - down, j - right)
    np.testing.assert_array_equal(found, expected)


def test_a_positive_angle_rotates_counter_clockwise() -> None:
    images = images_of((1, 2, 5, 5))
    found = affine_transform(ad.array(images), motion_of(np.pi / 2, 1.0, 0.0, 0.0)).numpy()
    np.testing.assert_allclose(found, np.rot90(images, axes=(2, 3)), atol=1e-9)


@pytest.mark.parametrize(
    "change",
    [
        *(Crop(0), Crop(0, padding_mode="reflect"), RandomResizedCrop((1.0, 1.0), (6 / 5, 6 / 5)), Flip(0.0)),
        *(VerticalFlip(0.0), Affine(rotation=1e-300), Noise(0.0)),
    ],
    ids=lambda change: change.kind(),
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_augmentation_of_strength_zero_is_the_identity(change: Augmentation, dtype: str) -> None:
    images = images_of((4, 2, 5, 6), dtype)
    np.testing.assert_array_equal(augmented(change, images), images)


def test_flipping_twice_is_the_identity() -> None:
    images = images_of((4, 2, 5, 6))
    np.testing.assert_array_equal(augmented(Flip(1.0), augmented(Flip(1.0), images)), images)


@given(st.integers(0, 2**24 - 1))
def test_normal_equals_the_quantile_function(number: int) -> None:
    uniform = number * 2.0**-24
    expected = NormalDist().inv_cdf(uniform + 2.0**-25)
    for dtype, tolerance in (("float64", 2e-7), ("float32", 2e-6)):
        found = float(normal(ad.array(np.array(uniform, dtype))))
        assert found == pytest.approx(expected, rel=tolerance)


def test_noise_is_in_units_of_each_channel() -> None:
    images = np.zeros((3, 3, 40, 50), np.float32)
    noise = Noise(0.25)(batch_of(images), RNG).images.numpy()
    drawn = normal(Noise().uniform(RNG, "normal", images.shape, ad.array(images))).numpy()
    np.testing.assert_allclose(noise, 0.25 * UNIT * drawn, rtol=1e-6)
    scaled = noise / (0.25 * UNIT)
    np.testing.assert_allclose(scaled.mean(axis=(0, 2, 3)), 0, atol=4 / 6000**0.5)
    np.testing.assert_allclose(scaled.std(axis=(0, 2, 3)), 1, atol=3 / 6000**0.5)


jitters = st.builds(
    ColorJitter,
    brightness=st.floats(0.01, 2),
    contrast=st.floats(0, 2),
    saturation=st.floats(0, 2),
    hue=st.floats(0, 0.5),
)


@given(jitters, st.integers(0, 10))
def test_color_jitter_changes_brightness_contrast_saturation_and_hue_as_torchvision(
    jitter: ColorJitter, step: int
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 4, 5), dtype=np.uint8)
    images[0, :, 0] = images[0, :1, 0]  # a row of grey pixels
    batch, rng = batch_of(images.astype(np.float64))._replace(stored=ad.array(images)), ops.rng_state(1, step)
    found = jitter(batch, rng).images.numpy()

    def factor(name: str) -> np.ndarray:
        return jitter.factor(rng, name, getattr(jitter, name), batch.images).numpy()

    def grey(x: np.ndarray) -> np.ndarray:
        return (x * np.array([0.2989, 0.587, 0.114]).reshape(3, 1, 1)).sum(axis=1, keepdims=True)

    def blended(x: np.ndarray, y: np.ndarray | float, share: np.ndarray) -> np.ndarray:
        return np.clip(share * x + (1 - share) * y, 0, 255)

    expected = blended(images, 0.0, factor("brightness"))
    if jitter.contrast:
        expected = blended(expected, grey(expected).mean(axis=(1, 2, 3), keepdims=True), factor("contrast"))
    if jitter.saturation:
        expected = blended(expected, grey(expected), factor("saturation"))
    if jitter.hue:
        turn = jitter.turn(rng, batch.images).numpy().ravel()
        assert np.abs(turn).max() <= jitter.hue
        for n, i, j in np.ndindex(3, 4, 5):
            hue, saturation, value = colorsys.rgb_to_hsv(*expected[n, :, i, j] / 255)
            expected[n, :, i, j] = np.multiply(colorsys.hsv_to_rgb(float(hue + turn[n]) % 1, saturation, value), 255)
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_color_jitter_does_not_bound_images_that_are_not_bytes() -> None:
    images = images_of((2, 1, 4, 5)) * 1000
    found = augmented(ColorJitter(brightness=0.5), images)
    factors = found / images
    assert np.ptp(factors, axis=(1, 2, 3)).max() < 1e-12
    assert 0.5 <= factors.min() <= factors.max() <= 1.5


def test_color_jitter_refuses_options_and_images_without_colours() -> None:
    with pytest.raises(ad.OptionError, match=r"color_jitter: found nothing to do, expected brightness, "):
        ColorJitter()
    with pytest.raises(
        ad.ShapeError, match=r"color_jitter: found images of shape \(1, 4, 4\), expected 3 channels for"
    ):
        ColorJitter(hue=0.1).check((8, 1, 4, 4))
    ColorJitter(brightness=0.1, contrast=0.1).check((8, 1, 4, 4))


@given(shapes, st.integers(1, 9), st.integers(0, 10))
def test_cutout_is_a_black_square_around_a_pixel(shape: tuple[int, ...], size: int, step: int) -> None:
    images, rng, cutout = images_of(shape), ops.rng_state(1, step), Cutout(size)
    middles = [m.numpy().ravel() for m in cutout.middles(rng, ad.array(images))]
    expected = images.copy()
    for n, (row, column) in enumerate(zip(*middles, strict=True)):
        assert 0 <= ceil(row) < shape[2]
        assert 0 <= ceil(column) < shape[3]
        (top, left) = (ceil(middle) - size // 2 for middle in (row, column))
        expected[n, :, max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 0
    np.testing.assert_array_equal(augmented(cutout, images, rng), expected)


@given(shapes, st.floats(0.01, 10), st.integers(0, 10))
def test_mixup_mixes_each_image_and_label_with_the_next(shape: tuple[int, ...], alpha: float, step: int) -> None:
    images, rng, mixup = images_of(shape), ops.rng_state(1, step), Mixup(alpha)
    found = mixup(batch_of(images), rng)
    assert found.mixed is not None
    share = float(found.mixed.share)
    assert 0.5 <= share <= 1
    np.testing.assert_allclose(
        found.images.numpy(), share * images + (1 - share) * np.roll(images, -1, axis=0), rtol=1e-12
    )
    np.testing.assert_array_equal(found.labels.numpy(), np.arange(shape[0]))
    np.testing.assert_array_equal(found.mixed.labels.numpy(), np.roll(np.arange(shape[0]), -1))
    uniform = float(mixup.uniform(rng, "share", (), ad.array(images)))
    table = larger_shares(alpha)
    assert share == pytest.approx(np.interp(uniform * (len(table) - 1), np.arange(len(table)), table), rel=1e-12)


@given(shapes, st.floats(0.01, 10), st.integers(0, 10))
def test_cutmix_replaces_a_rectangle_by_that_of_the_next_image(shape: tuple[int, ...], alpha: float, step: int) -> None:
    images, rng, cutmix = images_of(shape), ops.rng_state(1, step), Cutmix(alpha)
    found = cutmix(batch_of(images), rng)
    top, bottom, left, right = (int(x.numpy()) for x in cutmix.box(rng, ad.array(images)))
    assert 0 <= top <= bottom <= shape[2]
    assert 0 <= left <= right <= shape[3]
    expected = images.copy()
    expected[:, :, top:bottom, left:right] = np.roll(images, -1, axis=0)[:, :, top:bottom, left:right]
    np.testing.assert_array_equal(found.images.numpy(), expected)
    assert found.mixed is not None
    area = (bottom - top) * (right - left)
    assert float(found.mixed.share) == pytest.approx(1 - area / (shape[2] * shape[3]), rel=1e-12)
    np.testing.assert_array_equal(found.labels.numpy(), np.arange(shape[0]))
    np.testing.assert_array_equal(found.mixed.labels.numpy(), np.roll(np.arange(shape[0]), -1))


def test_the_sides_of_cutmix_follow_the_beta_distribution() -> None:
    """Sides are those of a square image times the root of a uniform number, as Beta(1, 1) is uniform."""
    length, images = 1 << 12, ad.array(np.zeros((2, 1, 1 << 12, 1)))
    reach = []
    for step in range(200):
        rng, cutmix = ops.rng_state(5, step), Cutmix()
        top, bottom, *_ = (float(x.numpy()) for x in cutmix.box(rng, images))
        middle = np.floor(float(cutmix.uniform(rng, "row", (), images).numpy()) * length)
        reach.append(max(middle - top, bottom - middle))  # that of the side which is not cut off, if there is one
    fractions = np.sort((np.array(reach) * 2 / length) ** 2)
    assert np.abs(fractions - np.linspace(0, 1, len(fractions))).max() < 1.95 / len(fractions) ** 0.5


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 4.0, 300.0])
def test_mixup_shares_follow_the_beta_distribution(alpha: float) -> None:
    count = 20_000
    table = larger_shares(alpha)
    drawn = np.interp(np.random.default_rng(0).random(count) * (len(table) - 1), np.arange(len(table)), table)
    beta = np.random.default_rng(1).beta(alpha, alpha, count)
    samples = np.sort(drawn), np.sort(np.maximum(beta, 1 - beta))
    points = np.concatenate(samples)
    cdfs = [np.searchsorted(sample, points, side="right") / count for sample in samples]
    assert np.abs(cdfs[0] - cdfs[1]).max() < 1.95 * (2 / count) ** 0.5  # Kolmogorov-Smirnov test at 99.9%

    fine = np.interp(np.linspace(0, len(table) - 1, 1 << 20), np.arange(len(table)), table)
    assert 4 * ((fine - 0.5) ** 2).mean() == pytest.approx(1 / (2 * alpha + 1), rel=2e-3)  # the variance of b


@pytest.mark.parametrize("change", [*EVERY, FURTHER[0]], ids=lambda change: change.kind())
def test_random_numbers_depend_on_seed_and_step_only(change: Augmentation) -> None:
    images = images_of((16, 3, 8, 7), "float32")

    def drawn(seed: int, step: int) -> bytes:
        return augmented(change, images, ops.rng_state(seed, step)).tobytes()

    assert drawn(1, 2) == drawn(1, 2)
    assert len({drawn(1, 2), drawn(1, 3), drawn(2, 2)}) == 3


def augmented_by_every(batch: Batch, rng: Value) -> tuple[Value, ...]:
    for change in (*EVERY, *FURTHER):
        batch = change(batch, rng)
    assert batch.mixed is not None
    return batch.images, batch.labels, *batch.mixed


def test_staged_augmentations_equal_eager_ones_bit_for_bit() -> None:
    def f(images: Value, labels: Value, rng: Value) -> tuple[Value, ...]:
        return augmented_by_every(Batch(images, labels, UNIT), rng)

    images, labels, *_ = batch_of(images_of((9, 3, 8, 7), "float32"))
    staged = stage(f, ALL)
    for step in range(3):
        rng = ops.rng_state(0, step)
        for found, expected in zip(staged(images, labels, rng), f(images, labels, rng), strict=True):
            np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.exhaustive)])
def test_compiled_augmentations_agree_with_eager_ones(dtype: str) -> None:
    images, labels = images_of((9, 3, 8, 7), dtype), np.arange(9)
    functions = {
        repr(change): (
            lambda images, labels, rng, change=change: change(Batch(images, labels, UNIT), rng).images,
            (images / images.max(), labels, RNG),
        )
        for change in (*EVERY, *FURTHER)
    }
    moves = Crop, Flip, VerticalFlip, Cutout, Cutmix
    for change, found in zip((*EVERY, *FURTHER), both(functions).values(), strict=True):
        assert not isinstance(found, Exception), change
        found.check(0 if isinstance(change, moves) else TOLERANCE[dtype])


def test_every_augmentation_is_tested() -> None:
    assert [change.kind() for change in EVERY] == list(AUGMENTATIONS)
