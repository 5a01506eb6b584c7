"""Blocks that wait for other blocks of their grid run at the same time as these. Checked in the text of the kernels and
in their launches: no compiler and no GPU are needed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
from cuda_samples import MEDIUM, Large, Shaped, all_candidates, precise, traced
from program_samples import for_gpu
from test_cuda_sources import EXCHANGES, kernel_functions

from adtrain import ops
from adtrain.backends.cuda import H200, compiler
from adtrain.backends.cuda.compiler import Source, file_source, of_kernel
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering

POLLING = re.compile(r"\bld\.(?:acquire|relaxed|volatile)|\batomicCAS\b")
"""Loads of memory that other blocks change."""
FUNCTION = re.compile(r"\b(?P<name>\w+)\s*\((?:[^;{}()]|\([^;{}()]*\))*\)\s*(?:const\s*)?\{")
NO_FUNCTION = {"if", "for", "while", "switch"}


def functions(text: str) -> Iterator[tuple[str, str]]:
    """The names and bodies of the functions in C++ text."""
    for found in FUNCTION.finditer(text):
        depth, at = 1, found.end()
        while depth:
            at += 1
            depth += {"{": 1, "}": -1}.get(text[at - 1], 0)
        if found["name"] not in NO_FUNCTION:
            yield found["name"], text[found.end() : at]


def waits(source: Source, kernel: str) -> bool:
    """Whether a kernel calls a function that polls memory."""
    text = "\n".join([*(header for _, header in compiler.included(source)), source.text])
    if not POLLING.search(text):
        return False
    bodies = list(functions(re.sub(r"//.*", "", text)))
    waiting: set[str] = set()
    while (
        more := {name for name, body in bodies if POLLING.search(body) or waiting & {*re.findall(r"\w+", body)}}
        - waiting
    ):
        waiting |= more
    return kernel in waiting


@cache
def waiting_kernels() -> set[str]:
    return {name for file, name in kernel_functions() if waits(of_kernel(file_source(file, (), ()), name), name)}


def attention(causal: bool, precision: str) -> Large:
    return Large(precise(lambda q, k, v: ops.attention(q, k, v, causal=causal), precision), [Shaped(8, 512, 64)] * 3)


SAMPLES: Mapping[str, Large] = {
    **{f"attention, {causal}, {p}": attention(causal, p) for causal in (False, True) for p in ("full", "bfloat16")},
    **{name: MEDIUM[name] for name in ("lstm over the grid", "gru over the grid")},
}


def sampled_launches(name: str) -> Iterator[LaunchPlan]:
    """The launches of every candidate for the values and gradients of a sample."""
    lowering, program = Lowering(H200), traced(SAMPLES[name])
    for equation in (*program.equations, *for_gpu(program).equations):
        for _, launches in all_candidates(lowering, equation):
            yield from launches


def test_the_samples_include_every_kernel_whose_blocks_wait_for_each_other() -> None:
    launched = {launch.name for name in SAMPLES for launch in sampled_launches(name)}
    assert len(waiting_kernels()) >= 4
    assert waiting_kernels() <= launched


@pytest.mark.parametrize("name", SAMPLES)
def test_a_launch_whose_blocks_wait_for_each_other_is_cooperative(name: str) -> None:
    waiting = waiting_kernels()
    found = [launch for launch in sampled_launches(name) if launch.name in waiting]
    assert found
    for launch in found:
        alone = "-DWEIGHT_GRAD_SPLITS=1" in launch.source.options  # a block for each tile, which waits for none
        assert launch.cooperative or alone, launch.name


def test_a_kernel_waits_if_a_function_that_it_calls_polls_memory() -> None:
    header = 'static void turn(int *x) { do asm("ld.acquire"); while (*x); }\ntemplate <int N> void step() { turn(0); }'
    text = f"{header}\nKERNEL waiting(int n) {{\n    if (n > 0) {{ step<1>(); }}\n}}\nKERNEL other(int n) {{ }}\n"
    source = Source("a.cu", text)
    assert waits(source, "waiting")
    assert not waits(source, "other")


def test_exchanges_between_ranks_wait() -> None:
    """They wait for blocks of other GPUs. `test_cuda_peer_exchanges.py` checks that all of them fit on a GPU."""
    for file, name in EXCHANGES:
        assert waits(file_source(file, (), ()), name)
