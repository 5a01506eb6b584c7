"""Channels of zeros: Programs compute the same, and images are neither padded nor cut between convolutions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from program_samples import everywhere
from sweeps import check_examples, examples
from test_channels_last import (
    EXAMPLES,
    convolution,
    residual,
    small_convolutions_as_large_ones,
    training,
    with_channels_last,
)
from test_passes_random import assert_consistent

from adtrain import nn
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda.channels_last import round_channels
from adtrain.core.program import Program

__all__ = ["small_convolutions_as_large_ones"]

CHANNELS, ROUNDED = 20, 24
LAYERS = st.sampled_from(
    [
        convolution(CHANNELS),
        nn.Conv2d(CHANNELS, kernel_size=1, bias=False),
        nn.Conv2d(CHANNELS, kernel_size=3, padding=1, groups=CHANNELS),
        nn.Conv2d(CHANNELS, kernel_size=1, groups=4),
        nn.ConvTranspose2d(CHANNELS, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.GELU(),
        nn.Sigmoid(),
        nn.Softplus(),
        nn.BatchNorm2d(),
        nn.MaxPool2d(2, stride=1),
        nn.AvgPool2d(3, stride=1, padding=1),
        nn.GroupNorm(2),
        nn.LayerNorm(),
        residual(convolution(CHANNELS), nn.BatchNorm2d(), nn.ReLU()),
    ]
)


def rounded(program: Program) -> Program:
    return round_channels(program, [e for e in program.equations if e.primitive.name.startswith("conv2d")])


@examples(30, 200)
def test_random_networks_compute_the_same(examples: int) -> None:
    def check(layers: list[nn.Module]) -> None:
        network = [convolution(CHANNELS), *layers, convolution()]
        program, arguments = training(network, (3, 7, 6), "full")
        after = rounded(program)
        assert str(after) != str(program)
        assert_consistent(after, program)
        pairs = zip(NumpyProgram(after).run(arguments)[0], NumpyProgram(program).run(arguments)[0], strict=True)
        for found, expected in pairs:
            assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected) + 1e-5

    check_examples(examples, check, st.lists(LAYERS, min_size=1, max_size=4))


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2)])
def test_images_between_convolutions_are_neither_padded_nor_cut(pool: nn.Module) -> None:
    def block(stride: int) -> nn.Module:
        shortcut = nn.Sequential(nn.Conv2d(CHANNELS, kernel_size=1, stride=stride), nn.BatchNorm2d())
        deep = nn.Conv2d(CHANNELS, kernel_size=3, padding=1, groups=CHANNELS), nn.BatchNorm2d(), nn.GELU()
        body = convolution(CHANNELS, stride), nn.BatchNorm2d(), nn.ReLU(), *deep
        return nn.Residual(nn.Sequential(*body), shortcut=shortcut)

    network = [convolution(CHANNELS), nn.ReLU(), block(1), nn.ReLU(), block(2), pool, convolution()]
    program, _ = training(network, (8, 12, 12))
    copied = [e for e in everywhere(with_channels_last(program)) if e.primitive.name in ("pad", "slice")]
    images = [v.type.shape for e in copied for v in e.inputs if v.type.shape[0] in (EXAMPLES, EXAMPLES * 144)]
    assert copied
    assert images == []


def test_few_channels_are_not_rounded_up() -> None:
    program, _ = training([convolution(12), nn.ReLU(), convolution()], (8, 6, 6))
    assert rounded(program) is program
