"""Programs of thousands of equations: work grows with the number of equations, and nothing recurses by their depth."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_samples import ALL, everywhere, for_gpu

import adtrain as ad
from adtrain import nn, ops, optim
from adtrain.backends.cpu.codegen import generate, workspace
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.runtime.layout import Layout
from adtrain.core.program import LOOPS, Equation, Program, Variable
from adtrain.core.staging import stage
from adtrain.passes.groups import MAX_EQUATIONS
from adtrain.passes.plan_memory import ALIGNMENT, Arena, plan_memory


def layers(count: int) -> Program:
    """The step of a network of `count` linear and relu layers."""
    hidden = [layer for _ in range(count) for layer in (nn.Linear(64), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(4))
    params, statistics = model.init((64,), np.random.default_rng(0), np.dtype("float32"))
    optimizer = optim.SGD(lr=0.1)

    def step(params: Any, state: Any, x: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            return ops.cross_entropy(model.forward(params, statistics, x, nn.Mode(training=True))[0], labels)

        value, grads = ad.value_and_grad(loss)(params)
        with ad.core.trace.phase("update"):
            return *optimizer.update(params, grads, state, ad.array(np.float32(0.1))), value

    x, labels = np.zeros((128, 64), np.float32), np.zeros(128, np.int64)
    return stage(step, donate=(0, 1)).program(params, optimizer.init(params), x, labels)


def chain(count: int, shape: tuple[int, ...] = (128, 128)) -> Program:
    """The value and gradient of x -> sin(x) * w, applied `count` times."""

    def f(w: Any, x: Any) -> Any:
        for _ in range(count):
            x = ops.sin(x) * w
        return ops.sum(x)

    x = np.zeros(shape, np.float32)
    return stage(ad.value_and_grad(f)).program(x, x)


def independent(count: int) -> Program:
    """Equations that read and write different memory."""
    arrays = [np.zeros((64, 64 + i % 7), np.float32) for i in range(count)]
    return stage(lambda *arrays: [ops.sin(x) for x in arrays]).program(*arrays)


def fused_for_cpu(program: Program) -> Program:
    for improve in ALL:
        program = improve(program)
    return program


def compiled_for_cpu(program: Program) -> str:
    """All that the CPU backend does before it calls the compiler; the C text."""
    program = fused_for_cpu(program)
    return generate(program, plan_memory(program, workspace)).text


def compiled_for_gpu(program: Program) -> None:
    """All that the CUDA backend does before it calls NVRTC."""
    program, lowering = for_gpu(program), Lowering(H200)
    for e in program.equations:
        lowering.launches(e)
    Layout(program, lowering)


def calls(work: Callable[[], Any]) -> int:
    """The number of calls of Python and built-in functions."""
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture
def counted_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make comparisons calls, so that `calls` counts those of a search in a list."""
    for kind in (Variable, Equation):
        monkeypatch.setattr(kind, "__eq__", lambda a, b: a is b)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("counted_comparisons")
@pytest.mark.parametrize(
    ("network", "count", "work"),
    [
        (layers, 8, compiled_for_gpu),
        (chain, 20, compiled_for_cpu),
        (independent, 40, compiled_for_gpu),
        pytest.param(layers, 8, compiled_for_cpu, marks=pytest.mark.exhaustive),
    ],
)
def test_four_times_the_equations_take_at_most_five_times_the_work(network: Any, count: int, work: Any) -> None:
    def traced_and_compiled(count: int) -> int:
        return calls(lambda: work(network(count)))

    traced_and_compiled(1)  # fills caches
    few, many = traced_and_compiled(count), traced_and_compiled(4 * count)
    assert many <= 5 * few


@pytest.mark.usefixtures("counted_comparisons")
def test_planning_memory_for_four_times_the_values_takes_at_most_five_times_the_work() -> None:
    for program in (lambda n: chain(4 * n), lambda n: fused_for_cpu(layers(n))):
        work = [calls(partial(plan_memory, program(n))) for n in (20, 80)]
        assert work[1] <= 5 * work[0]


def test_a_function_of_more_dependent_equations_than_python_recurses_is_compiled() -> None:
    program = chain(300)
    assert len(program.equations) > 1.5 * sys.getrecursionlimit()
    compiled_for_cpu(program)
    for_gpu(program)


def test_fused_loops_have_a_limited_number_of_equations_and_pointers() -> None:
    program = for_gpu(chain(200, (1 << 16,)))
    loops = [e.params["body"].equations for e in everywhere(program) if e.form == LOOPS]
    assert max(map(len, loops)) == MAX_EQUATIONS
    launches = [launch for e in program.equations for launch in Lowering(H200).launches(e)]
    assert all(isinstance(launch, LaunchPlan) and len(launch.operands) < 512 for launch in launches)


def test_layers_of_equal_shape_share_their_loops() -> None:
    few, many = (compiled_for_cpu(layers(count)).count("#pragma omp simd") for count in (6, 12))
    assert few == many


def test_a_chain_that_is_divided_into_several_loops_has_the_elements_of_eager_code() -> None:
    def f(x: Any) -> Any:
        for _ in range(2 * MAX_EQUATIONS):
            x = ops.sin(x)
        return x

    x = ad.array(np.linspace(-3, 3, 1000))
    staged = stage(f, ALL)
    loops = [e for e in everywhere(staged.program(x)) if e.form == LOOPS]
    assert len(loops) > 1
    assert max(len(e.params["body"].equations) for e in loops) <= MAX_EQUATIONS
    np.testing.assert_allclose(staged(x).numpy(), f(x).numpy(), rtol=1e-12)


requests = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 12), st.integers(0, 12)), max_size=40)


@given(requests)
def test_values_have_the_lowest_offset_that_is_free_during_their_lifetimes(requests: Any) -> None:
    arena = Arena()
    for key, (size, start, length) in enumerate(requests):
        arena.add(key, size, start, start + length)
    offsets = arena.offsets()
    placed: list[Any] = []
    for request in sorted(arena.requests, key=lambda r: -r.size):
        alive = [p for p in placed if p.start <= request.end and p.end >= request.start]
        free = (
            offset
            for offset in range(0, 1 << 20, ALIGNMENT)
            if all(offset + request.size <= offsets[p.key] or offsets[p.key] + p.size <= offset for p in alive)
        )
        assert offsets[request.key] == (next(free) if request.size else 0)
        placed.append(request)
