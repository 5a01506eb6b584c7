"""Compiled Programs as they run: the same bits every time, errors that say where, arrays of others left as they are."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_parity import check_all
from hypothesis import strategies as st
from program_samples import ALL, arguments, batch, training, training_program
from random_programs import graphs, step_of
from sweeps import check_examples, examples
from waiting import PATIENCE

import adtrain as ad
from adtrain import ops
from adtrain.backends.cpu import compiler
from adtrain.backends.cpu.codegen import items, loops
from adtrain.backends.cpu.compiled_program import CompiledProgram, _pages
from adtrain.backends.cpu.threads import TeamSize
from adtrain.core import tree
from adtrain.core.memory import CACHE_LINE, address
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.core.trace import scope
from adtrain.files import asset_path

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-3), pytest.param("float64", 1e-10, marks=pytest.mark.exhaustive)]
)
@examples(1, 3)
def test_compiled_random_programs_equal_eager_ones(
    monkeypatch: pytest.MonkeyPatch, dtype: str, tolerance: float, examples: int
) -> None:
    monkeypatch.setattr(loops, "FEW_ELEMENTS", 4)
    monkeypatch.setattr(sys.modules["adtrain.backends.cpu.fusions"], "MIN_ITEMS", 1)
    monkeypatch.setattr(items, "SLICE_BYTES", 16)
    monkeypatch.setattr(items, "MIN_SLICE_BYTES", 0)
    monkeypatch.setattr(sys.modules["adtrain.passes.recompute"], "MIN_BYTES", 0)

    def check(drawn: list[Any]) -> None:
        functions: Any = {
            str(i): (step_of(graph), [x.numpy().astype(dtype) for x in graphs.inputs_of(graph[0])])
            for i, graph in enumerate(drawn)
        }
        check_all(functions, tolerance, largest=True)

    check_examples(examples, check, st.lists(graphs.graphs(), min_size=8, max_size=8))


@pytest.mark.parametrize(
    ("optimizer", "dtype", "tolerance", "code"),
    [
        ("sgd", "float32", 5e-5, "quick_compiler"),
        pytest.param("adam", "float64", 1e-11, "quick_compiler", marks=pytest.mark.exhaustive),
    ],
)
def test_twenty_training_steps_have_the_losses_of_eager_steps(
    optimizer: str, dtype: str, tolerance: float, code: str, request: pytest.FixtureRequest
) -> None:
    """With Adam, rounding in small gradients moves weights by more than itself; float64 says that it is rounding."""
    request.getfixturevalue(code)
    step, first = training(optimizer, dtype, dropout=0.5)

    def losses(f: Any) -> tuple[list[float], list[np.ndarray]]:
        state, found = tree.map(lambda x: ad.array(x.numpy().copy()), first), []
        for i in range(20):
            state, loss = f(state, *batch(dtype, seed=i))
            found.append(loss.item())
        return found, [x.numpy() for x in tree.leaves(state)]

    compiled, state = losses(stage(step, ALL, donate=(0,)))
    np.testing.assert_allclose(compiled, losses(step)[0], rtol=tolerance)
    again, state_again = losses(stage(step, ALL, donate=(0,)))
    assert compiled == again
    for a, b in zip(state, state_again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("code", ["quick_compiler", pytest.param("optimised", marks=pytest.mark.exhaustive)])
def test_equal_products_cancel(code: str, request: pytest.FixtureRequest) -> None:
    """Also those of different equations in one loop: no compiler makes a * b - c * d two roundings."""
    request.getfixturevalue(code)

    def differences(x: Any, y: Any, u: Any, v: Any) -> Any:
        mean = lambda z: (z[0] + z[1] + z[2] + z[3]) / 4.0  # noqa: E731
        rows = ops.stack([x, x, u, u])
        return (
            x * y - u * v,
            ops.cos(y) * x - x * ops.cos(v),
            x * x - 4.0 * (x * 0.5) * (u * 0.5),
            (mean(rows * rows) - ops.square(mean(rows))),
        )

    for dtype in ("float32", "float64"):
        x, y = (np.random.default_rng(i).normal(size=1000).astype(dtype) for i in range(2))
        for found in stage(differences, ALL)(x, y, x.copy(), y.copy()):
            np.testing.assert_array_equal(found.numpy(), np.zeros(1000))


def run_on(compiled: CompiledProgram, program: Program, threads: int) -> list[bytes]:
    """The bits of the results on so many threads."""
    io, arena, _ = compiled.arguments
    scratch = _pages(len(compiled.scratch) * threads)
    compiled.arguments = [io, arena, ctypes.c_void_p(address(scratch))]
    compiled.team = TeamSize(threads)
    return [x.tobytes() for x in compiled.run(arguments(program))[0]]


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.exhaustive)])
def test_results_have_the_same_bits_on_any_number_of_threads(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "FEW_ELEMENTS", 4)
    program = training_program(optimizer, "float32", ALL)
    compiled = CompiledProgram(program)
    one, *others = (run_on(compiled, program, threads) for threads in (1, 2, 3, 5, 1, 2))
    assert all(other == one for other in others)


def test_a_timed_run_gives_a_time_for_each_equation_and_the_same_results() -> None:
    program = training_program("adam", "float32", ALL)
    compiled = CompiledProgram(program)
    results, nothing = compiled.run(arguments(program))
    timed, seconds = compiled.run(arguments(program), timed=True)
    assert len(nothing) == 0
    assert len(seconds) == len(program.equations)
    assert min(seconds) >= 0
    assert sum(seconds) > 0
    assert [x.tobytes() for x in timed] == [x.tobytes() for x in results]


def test_a_donated_array_with_other_references_is_not_overwritten() -> None:
    step = stage(lambda x, y: (x + y, y * 2.0), ALL, donate=(0,))
    x, y = ad.array(np.zeros(1000)), ad.array(np.ones(1000))
    seen = x.numpy()
    x, _ = step(x, y)
    views = []
    for i in range(1, 4):
        views.append((x.numpy()[::2], float(i)))
        x, _ = step(x, y)
    assert seen.tolist() == [0.0] * 1000
    for view, value in views:
        assert view.tolist() == [value] * 500
    assert y.numpy().tolist() == [1.0] * 1000
    assert x.numpy().tolist() == [4.0] * 1000


@pytest.mark.parametrize("size", [1000, 100_000])
def test_a_donated_array_without_other_references_is_overwritten(size: int) -> None:
    step = stage(lambda x: x + 1.0, ALL, donate=(0,))
    x = step(ad.array(np.zeros(size)))
    before = address(x.buffer)
    for _ in range(3):
        x = step(x)
    assert address(x.buffer) == before
    assert x.numpy().tolist() == [4.0] * size


def test_large_arrays_begin_at_a_cache_line_and_views_of_donated_ones_do_not_change() -> None:
    step = stage(lambda x: x + 1.0, ALL, donate=(0,))
    x = step(ad.array(np.zeros(100_001, np.float32)[1:]))
    view = x.buffer[:3]
    y = step(x)
    assert address(y.buffer) % CACHE_LINE == 0
    assert (view == 1).all()
    assert (y.numpy() == 2).all()


def test_numpy_arrays_are_never_overwritten() -> None:
    given = np.zeros(8)
    for x in (given, given[::2], given[::-1], given.reshape(2, 4).T, np.broadcast_to(given[:1], (4,))):
        step = stage(lambda x: x + 1.0, ALL, donate=(0,))
        for _ in range(2):
            assert step(x).numpy().tolist() == (x + 1).tolist()
    assert given.tolist() == [0.0] * 8


def test_an_array_donated_twice_is_two_values() -> None:
    step = stage(lambda x, y: (x + 1.0, y * 3.0), ALL, donate=(0, 1))
    x = ad.array(np.full(100, 2.0))
    a, b = step(x, x)
    assert (a.numpy()[0], b.numpy()[0]) == (3.0, 6.0)
    c, d = step(a, b)
    assert (c.numpy()[99], d.numpy()[99]) == (4.0, 18.0)
    with pytest.raises(ad.TraceError, match="was donated"):
        x.numpy()


def test_an_array_that_is_also_passed_undonated_is_not_overwritten() -> None:
    step = stage(lambda x, y: x * 0.0 + ops.flip(y), ALL, donate=(0,))
    x = ad.array(np.arange(5.0))
    assert step(x, ad.array(np.arange(5.0))).numpy().tolist() == [4, 3, 2, 1, 0]
    both = ad.array(np.arange(5.0))
    assert step(both, both).numpy().tolist() == [4, 3, 2, 1, 0]


def test_results_may_be_arguments_constants_and_one_another() -> None:
    table = ad.array(np.arange(6.0))

    def f(x: Any, y: Any) -> Any:
        z = ops.exp(x)
        return x, y, z, z, table, ops.reshape(z, (3, 2)), ops.reshape(y, (6,)), ops.reshape(table, (2, 3))

    step = stage(f, ALL, donate=(1,))
    x, y = np.linspace(0, 1, 6), np.ones((2, 3))
    for _ in range(2):
        found, expected = step(x, y), f(ad.array(x), ad.array(y))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-12)
    # Who donates one of them takes nothing from the others.
    z, same = step(x, y)[2:4]
    before = same.numpy().copy()
    stage(lambda z: z * 0.0, ALL, donate=(0,))(z)
    np.testing.assert_array_equal(same.numpy(), before)
    stage(lambda t: t * 0.0, ALL, donate=(0,))(step(x, y)[4])
    np.testing.assert_array_equal(step(x, y)[4].numpy(), np.arange(6.0))


@pytest.mark.parametrize("n", [3, 9], ids=["alone", "fused"])
@pytest.mark.parametrize("wrong", [-1, 4, 1 << 40])
def test_an_index_out_of_range_is_named_with_its_layer(n: int, wrong: int) -> None:
    def loss(logits: Any, labels: Any) -> Any:
        with scope("loss"):
            return ops.cross_entropy(logits, labels)

    def rows(table: Any, indices: Any) -> Any:
        with scope("0.embedding"):
            return ops.embedding(indices, table) * 2.0

    labels = np.arange(n) % 4
    losses, embedded = stage(ad.grad(loss), ALL), stage(rows, ALL)
    logits, table = np.ones((n, 4)), np.ones((4, 3))
    expected = losses(logits, labels).numpy(), embedded(table, labels).numpy()
    spoilt = labels.copy()
    spoilt[n // 2] = wrong
    for _ in range(2):
        with pytest.raises(ad.ShapeError, match=rf"along_axis: index {wrong} is out .* \(in loss\)"):
            losses(logits, spoilt)
        with pytest.raises(ad.ShapeError, match=rf"take: index {wrong} is out .* \(in 0\.embedding\)"):
            embedded(table, spoilt)
    np.testing.assert_array_equal(losses(logits, labels).numpy(), expected[0])
    np.testing.assert_array_equal(embedded(table, labels).numpy(), expected[1])


def test_python_threads_may_share_a_staged_function() -> None:
    layer = stage(lambda x, w: ops.tanh(ops.matmul(ops.tanh(ops.matmul(x, w)), w)), ALL)
    rng = np.random.default_rng(0)
    w, *xs = (ad.array(rng.normal(size=(150, 150)).astype("float32")) for _ in range(3))
    expected = [layer(x, w).numpy() for x in xs]

    def equal(i: int) -> bool:
        return all(np.array_equal(layer(xs[i], w).numpy(), expected[i]) for _ in range(30))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(equal, range(2))) == [True, True]


def test_a_forked_process_runs_programs_too() -> None:
    """In a process of its own: a child that waits for ever must not outlive the test."""
    code = """
import os, numpy as np
from adtrain import ops
from adtrain.core.staging import stage
product = stage(lambda x: ops.sum(ops.matmul(x, x)))
x = np.ones((200, 200), np.float32)
product(x)
child = os.fork()
if child == 0:
    os._exit(0 if product(x).item() == 8e6 else 1)
assert os.waitpid(child, 0)[1] == 0 and product(x).item() == 8e6
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True) as process:
        try:
            assert process.wait(PATIENCE) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_with_too_many_axes_for_a_kernel_a_program_runs_on_numpy() -> None:
    x = np.random.default_rng(0).normal(size=(2,) * 9)
    functions: list[Any] = [
        lambda x: ops.sum(x, (0, 2, 4, 6, 8)),
        lambda x: ops.exp(ops.transpose(x)),
        lambda x: ops.max(x * 2.0, (1, 3, 5, 7)) + ops.softmax(x[..., 0, 0, 0, 0], 4),
    ]
    for f in functions:
        np.testing.assert_allclose(stage(f, ALL)(x).numpy(), f(ad.array(x)).numpy(), rtol=1e-12)


def test_a_program_without_equations_arguments_or_results_runs() -> None:
    x = ad.array(np.arange(3.0))
    assert stage(lambda x: x, ALL)(x).numpy().tolist() == [0, 1, 2]
    assert stage(lambda: ops.full((2,), 7.0, np.float32), ALL)().numpy().tolist() == [7, 7]
    assert stage(lambda x: (), ALL)(x) == ()


def test_a_wrong_expression_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PRIMITIVES["tanh"].expression
    functions: Any = {"tanh": (ops.tanh, [np.ones(3)]), "exp": (ops.exp, [np.ones(3)])}
    check_all(functions, 1e-11)
    try:
        object.__setattr__(PRIMITIVES["tanh"], "expression", "tanh(a) * (T)1.000001")
        with pytest.raises(AssertionError, match=r"^tanh: AssertionError: [^:]*Mismatched elements"):
            check_all(functions, 1e-11)
    finally:
        object.__setattr__(PRIMITIVES["tanh"], "expression", right)


def test_a_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(asset_path("kernels"), tmp_path / "kernels")
    source = tmp_path / "kernels" / "cpu" / "cumsum.c"
    right = "total[j] += row[j]"
    assert right in source.read_text()
    source.write_text(source.read_text().replace(right, right.replace("+=", "-=")))
    functions: Any = {"running": (lambda x: ops.cumsum(x, 0), [np.ones((3, 4))]), "sum": (ops.sum, [np.ones((3, 4))])}
    check_all(functions, 1e-11)
    monkeypatch.setattr(compiler, "asset_path", lambda folder: tmp_path / folder)
    with pytest.raises(AssertionError, match=r"^running: AssertionError: [^:]*Mismatched elements"):
        check_all(functions, 1e-11)
