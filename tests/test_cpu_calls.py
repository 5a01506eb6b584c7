"""Compilers keep every call of generated C, with the options that users get."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from typing import Any

import c_compilers
import numpy as np
import pytest
from compiled_parity import check_all
from hypothesis import strategies as st
from program_samples import ALL
from random_programs import graphs, step_of
from sweeps import check_examples
from test_export_training import LAYERS, model_of
from training_runs import prepare

import adtrain as ad
from adtrain import ops
from adtrain.backends.cpu.codegen import generate, items, loops, workspace
from adtrain.backends.cpu.compiler import FLAGS, NATIVE, PROGRAM
from adtrain.core.memory import poisoned
from adtrain.core.staging import stage
from adtrain.export.c import source
from adtrain.files import asset_path
from adtrain.passes.plan_memory import plan_memory

KINDS = ("gcc", "clang")
TEMPLATE = Path(ad.__file__).with_name("templates") / "network.c.j2"
KEEP_CALLS = re.findall(r"^#if defined.*?^#endif\n", TEMPLATE.read_text(), re.DOTALL | re.MULTILINE)[0]
"""The pragma of exported C."""
COMPILERS = c_compilers.installed(*KINDS)
"""Also with a version in the name, which take one exported step and all random programs."""
OPTIONS = [*FLAGS, NATIVE.get(platform.machine(), "-O3"), *PROGRAM, f"-I{asset_path('kernels') / 'cpu'}"]
ALSO = pytest.mark.exhaustive
FIRST_QUICK = [pytest.param(c, marks=ALSO if i else ()) for i, c in enumerate(COMPILERS)]
"""All compilers, of which plain pytest takes the first one."""

pytestmark = pytest.mark.skipif(not COMPILERS, reason="neither gcc nor clang is installed")


def outer(name: str, end: Any) -> Any:
    """The gradient of a mean over pairs, by vectors of which one is clipped."""

    def f(x: Any, y: Any) -> Any:
        return ops.mean(ops.square(end(ops.clip(ops.cumsum(x, 0), -0.5, 0.5)[:, None], y[None])))

    f.__name__ = name
    return ad.grad(f, (0, 1))


OUTER = [
    outer("difference", lambda a, b: a - b),
    outer("kernel", lambda a, b: ops.exp(-ops.square(a - b))),
    outer("slope", lambda a, b: ops.leaky_relu(a + b)),
    outer("selected", lambda a, b: ops.where(ops.less(a, b), a, b * 0.5)),
]
"""gcc 12.2 deletes an equation of these, unless it is told that NULL may be accessed."""


def c_of(functions: list[Any], arguments: list[list[Any]]) -> str:
    """The C of one Program that computes all the functions."""
    program = stage(lambda given: [f(*xs) for f, xs in zip(functions, given, strict=True)], ALL).program(arguments)
    return generate(program, plan_memory(program, workspace)).text


def vectors(rows: int, dtype: str) -> list[Any]:
    return [ad.array(np.random.default_rng(i).normal(size=rows).astype(dtype)) for i in range(2)]


def outer_program() -> str:
    given = [vectors(10, dtype) for dtype in ("float32", "float64")]
    return c_of(OUTER * len(given), [xs for xs in given for _ in OUTER])


def check_calls(text: str, compiler: str, folder: Path, options: list[str] = OPTIONS) -> None:
    functions = c_compilers.separate_functions(text)
    assert [name for name in functions if name.startswith("equation_")]
    one_each = [] if c_compilers.is_clang(compiler) else ["-fno-ipa-icf"]  # else functions of equal code become one
    assert c_compilers.unused(functions, c_compilers.assembly(text, folder, [compiler, *options, *one_each])) == []


@pytest.mark.parametrize("compiler", COMPILERS[:1])
def test_every_equation_of_outer_sums_is_called(compiler: str, tmp_path: Path) -> None:
    check_calls(outer_program(), compiler, tmp_path)


def test_a_missing_call_is_found(tmp_path: Path) -> None:
    text = "void other(int *); static void kept(int *x) { other(x); }\nvoid run(int *x) { kept(x); }\n"
    assembly = c_compilers.assembly(text, tmp_path, [COMPILERS[0], "-O0"])
    assert c_compilers.unused(["kept", "missing"], assembly) == ["missing"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_equation_of_random_programs_is_called(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "FEW_ELEMENTS", 4)
    monkeypatch.setattr(sys.modules["adtrain.backends.cpu.fusions"], "MIN_ITEMS", 1)
    monkeypatch.setattr(items, "SLICE_BYTES", 16)
    monkeypatch.setattr(items, "MIN_SLICE_BYTES", 0)
    monkeypatch.setattr(sys.modules["adtrain.passes.recompute"], "MIN_BYTES", 0)
    check_calls(outer_program(), compiler, tmp_path)

    def check(drawn: list[Any]) -> None:
        for dtype in ("float32", "float64"):
            given = [[ad.array(x.numpy().astype(dtype)) for x in graphs.inputs_of(graph[0])] for graph in drawn]
            check_calls(c_of([step_of(graph) for graph in drawn], given), compiler, tmp_path)

    check_examples(1, check, st.lists(graphs.graphs(), min_size=8, max_size=8))


@pytest.mark.compiled
@pytest.mark.usefixtures("optimised")
def test_outer_sums_in_poisoned_memory_equal_eager_code() -> None:
    given = [x.numpy() for x in vectors(10, "float64")]
    with poisoned():
        check_all({f"f{i}": (f, given) for i, f in enumerate(OUTER)}, 1e-11)


@pytest.mark.exhaustive
@pytest.mark.compiled
@pytest.mark.parametrize("compiler", [c for c in COMPILERS if not c_compilers.is_clang(c)])
def test_random_programs_in_poisoned_memory_equal_eager_ones(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(loops, "FEW_ELEMENTS", 4)
    monkeypatch.setattr(sys.modules["adtrain.backends.cpu.fusions"], "MIN_ITEMS", 1)
    monkeypatch.setattr(items, "SLICE_BYTES", 16)
    monkeypatch.setattr(items, "MIN_SLICE_BYTES", 0)
    monkeypatch.setattr(sys.modules["adtrain.passes.recompute"], "MIN_BYTES", 0)

    def check(drawn: list[Any]) -> None:
        functions: Any = {
            str(i): (step_of(g), [x.numpy() for x in graphs.inputs_of(g[0])]) for i, g in enumerate(drawn)
        }
        with poisoned():
            check_all(functions, 1e-10, largest=True)

    check_examples(1, check, st.lists(graphs.graphs(), min_size=8, max_size=8))


@pytest.mark.parametrize("compiler", FIRST_QUICK)
def test_the_pragma_of_exported_c_keeps_calls_with_any_options(compiler: str, tmp_path: Path) -> None:
    text = KEEP_CALLS + outer_program()
    check_calls(text, compiler, tmp_path, ["-O2", "-fopenmp", "-fPIC", "-std=gnu11", OPTIONS[-1]])


def training_step(folder: Path, layers: str) -> str:
    experiment = prepare(folder, "optimizer={adamw: {lr: 0.01}}", layers=layers)
    model = model_of(experiment, experiment.initial_state("cpu", random=True))
    files = source.generate(model, folder / "net.c", experiment=experiment)
    (folder / "net.h").write_text(files.header)
    assert KEEP_CALLS in files.source
    return files.source


@pytest.mark.parametrize(
    ("layers", "compiler", "level"),
    [
        pytest.param(layers, compiler, level, marks=() if (layers, i, level) == ("linear", 0, "-O2") else ALSO)
        for layers in LAYERS
        for i, compiler in enumerate(COMPILERS)
        for level in (("-O2", "-O3") if layers == "linear" else ("-O3",))  # which has all passes of -O2
        if compiler in KINDS or (layers, level) == ("linear", "-O2")
    ],
)
def test_every_function_of_an_exported_training_step_is_called(
    layers: str, compiler: str, level: str, tmp_path: Path
) -> None:
    text = training_step(tmp_path, LAYERS[layers])
    generated = c_compilers.functions_between(text, "/* The training step. */", "void net_train(")
    assert len(generated) > 3
    assert c_compilers.unused(generated, c_compilers.assembly(text, tmp_path, [compiler, level, "-fno-inline"])) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for instructions of x86-64")
@pytest.mark.parametrize("compiler", FIRST_QUICK)
def test_products_of_an_exported_training_step_are_contracted_and_its_loops_are_not(
    compiler: str, tmp_path: Path
) -> None:
    text = training_step(tmp_path, LAYERS["linear"])
    options = ["-O3", "-march=haswell", "-fno-inline"]
    fused = {
        name: "vfm" in lines
        for name, lines in c_compilers.instructions_of(
            c_compilers.assembly(text, tmp_path, [compiler, *options])
        ).items()
    }
    loops = [name for name in fused if name.startswith("train_elementwise_")]
    assert loops
    assert not [name for name in loops if fused[name]]
    assert fused["matmul"] or c_compilers.is_clang(compiler)
