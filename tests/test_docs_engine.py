"""docs/engine.md: its program is short, differentiates, computes what NumPy computes, and learns."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "engine.md").read_text()
CODE = "".join(re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))


@pytest.fixture
def engine() -> Any:
    module = ModuleType("engine")
    exec(compile(CODE, "docs/engine.md", "exec"), module.__dict__)
    return module


def test_the_engine_has_at_most_300_lines() -> None:
    assert CODE.count("\n") <= 300


def test_the_files_that_the_engine_names_exist() -> None:
    named = re.findall(r"`((?:core|ops|passes|backends|nn|optim|training|data|kernels)/[\w/.]*)`", TEXT)
    assert len(named) > 15
    assert [x for x in named if not ((ROOT / "adtrain" / x).exists() or (ROOT / x).exists())] == []


def small_step(engine: Any) -> tuple[list[np.ndarray], Any]:
    """Arguments of a training step of a small network, and its Program."""
    rng = np.random.default_rng(0)
    params = [rng.normal(size=shape) for shape in ((20, 40), (1, 40), (40, 10), (1, 10))]
    given = [*params, *(np.ones(p.shape) for p in params), rng.random((9, 20)), np.eye(10)[rng.integers(0, 10, 9)]]
    return given, engine.stage(engine.step, *(x.shape for x in given))


def test_the_compiled_step_computes_what_numpy_computes(engine: Any) -> None:
    given, program = small_step(engine)
    expected = [x.data for x in engine.step(*map(engine.Array, given))]
    for found, x in zip(engine.CompiledProgram(program)(*given), expected, strict=True):
        np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-6)


def test_the_fusion_leaves_fewer_equations_and_values_in_memory(engine: Any) -> None:
    _, program = small_step(engine)
    fused = engine.fuse(program)
    assert len(fused.equations) < 0.6 * len(program.equations)
    outputs = [v for e in fused.equations for v in e.outputs]
    assert len(set(outputs)) == len(outputs) < len(program.equations)


def test_derivatives_of_any_order_are_those_of_a_closed_form(engine: Any) -> None:
    def gradient_of(f: Any) -> Any:
        return lambda params: engine.value_and_grad(f)(params)[1][0]

    def f(params: Any) -> Any:
        (x,) = params
        return engine.bind(engine.exp_p, x * x)

    x = 0.7
    first, second = gradient_of(f), gradient_of(gradient_of(f))
    assert first([engine.Array(x)]).data == pytest.approx(2 * x * np.exp(x * x))
    assert second([engine.Array(x)]).data == pytest.approx((2 + 4 * x * x) * np.exp(x * x))


def part_of_mnist(folder: Path, train: int, test: int) -> None:
    """The first images and labels of MNIST, as files of its format."""
    for name, count in (("train", train), ("t10k", test)):
        for kind, header, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            file = f"{name}-{kind}-ubyte.gz"
            content = gzip.decompress((ROOT / "datasets" / "mnist" / file).read_bytes())
            (folder / file).write_bytes(gzip.compress(content[: header + count * size], 1))


def test_the_engine_learns_digits(engine: Any, tmp_path: Path) -> None:
    part_of_mnist(tmp_path, 1280, 200)
    assert engine.main(tmp_path, epochs=2) > 0.7


@pytest.mark.exhaustive
def test_the_engine_reaches_97_percent_in_two_epochs(engine: Any) -> None:
    assert engine.main(ROOT / "datasets" / "mnist") > 0.97
