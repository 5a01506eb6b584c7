"""The source text of kernels made of parts: which parts share code, and where a loop is left out. No GPU is needed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from program_samples import ON_GPU

from adtrain import config, training
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.codegen.loops import PART_BLOCKS, loops
from adtrain.backends.cuda.codegen.part import MAX_DIFFERENT, Part, kernel
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.program import HORIZONTAL, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType

THREADS = 256


def part(lengths: tuple[int, ...], blocks: int = 1) -> Part:
    x, y = (Variable(ArrayType((4,), np.dtype("float32")), "cpu") for _ in range(2))
    return Part(["y0[block] = x0[n0];"], [x], [y], blocks=blocks, lengths=lengths)


def text_of(*parts: Part) -> str:
    return kernel("horizontal", parts, THREADS).source.text


def test_parts_that_differ_in_lengths_and_blocks_share_their_code() -> None:
    text = text_of(part((96,)), part((160,), blocks=3), part((64,)))
    assert text.count("y0[block] = x0[n0];") == 1
    assert "const int member = (blockIdx.x >= 1) + (blockIdx.x >= 4);" in text
    assert "const int block = blockIdx.x - (member == 0 ? 0 : member == 1 ? 1 : 4);" in text
    assert "const int n0 = member == 0 ? 96 : member == 1 ? 160 : 64;" in text
    assert "__builtin_assume(n0 % 32 == 0);" in text


def test_a_length_that_is_the_same_in_all_parts_stays_a_constant() -> None:
    assert "const int n0 = 96;" in text_of(part((96,)), part((96,)))
    assert "assume" not in text_of(part((96,)), part((96,)))


def test_many_parts_share_code_only_if_their_lengths_are_equal() -> None:
    lengths = [96, *range(MAX_DIFFERENT), 96]
    assert text_of(*(part((n,)) for n in lengths)).count("y0[block] = x0[n0];") == MAX_DIFFERENT + 1
    assert text_of(*(part((n,)) for n in lengths[2:])).count("y0[block] = x0[n0];") == 1


def test_a_length_that_exceeds_an_int_has_64_bits() -> None:
    assert f"const int64_t n0 = {2**31};" in text_of(part((2**31,)))


def test_weight_gradients_of_different_layers_share_their_code() -> None:
    program = training.outline(config.load("mlp")).step_program(passes=ON_GPU)
    horizontals = [e for e in program.equations if e.form == HORIZONTAL]
    launches = [plan for e in horizontals for plan in Lowering(H200).launches(e) if isinstance(plan, LaunchPlan)]
    calls = [re.findall(r"small_gemm_block<SmallTile<32, 32.*\)", plan.source.text) for plan in launches]
    assert max(map(len, calls)) == 1


@pytest.mark.parametrize(("rounds", "width"), [(1, 4), (2, 4), (1, 1), (2, 1)])
def test_only_threads_with_several_rounds_have_a_loop(rounds: int, width: int) -> None:
    at_once = PART_BLOCKS * H200.multiprocessors * THREADS * width
    shape = (at_once * rounds,) if width > 1 else (at_once * rounds // 3, 3)
    given = np.ones(shape, "float32"), np.ones(shape[:1] + (1,) * (len(shape) - 1), "float32")
    (equation,) = stage(lambda x, y: x * y, ON_GPU).program(*given).equations
    lines = [line.strip() for line in loops(equation).part(THREADS, H200).lines]
    assert any(line.startswith("for (auto g" if width > 1 else "for (auto i = first;") for line in lines) == (
        rounds > 1
    )
    assert any(line.startswith("if (const auto") for line in lines) == (rounds == 1)
