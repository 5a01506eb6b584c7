"""Fusions of users, outside the package: docs/add-a-fusion.md as a user would follow it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program_samples import Step, for_gpu, fused_of

from adtrain import ops
from adtrain.backends.cpu.fusions import cpu_fusions
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core import kernel as registry
from adtrain.core.backend import backend
from adtrain.core.kernel import forget
from adtrain.core.program import Equation, Variable, fuse
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.extend import Fusion, register_fusion
from adtrain.ops.common import reshape_p, sum_p
from adtrain.ops.elementwise import square_p
from adtrain.passes import SIMPLIFY
from adtrain.passes.fusion import FusionPass, forget_fusion, with_copies
from adtrain.passes.groups import Groups

DOCUMENT = Path(__file__).parent.parent / "docs" / "add-a-fusion.md"


def sum_of_squares(x: Any) -> Any:
    return ops.sum(ops.square(x))


@pytest.fixture
def document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[dict[str, Any]]:
    """The names of the document's program, which has run."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(from .*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "sum_of_squares"}
    try:
        exec(compile(code, DOCUMENT.name, "exec"), names)
        assert capsys.readouterr().out == "array(14., float32)\n"
        yield names
    finally:
        forget_fusion(names["SumOfSquares"])
        forget("sum_of_squares")


def on_cpu(f: Any, *args: Any) -> Any:
    return stage(f, (*SIMPLIFY, *cpu_fusions())).program(*args)


@pytest.mark.compiled
def test_equations_of_a_users_form_run_by_the_users_kernel(document: dict[str, Any]) -> None:
    x = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    program = on_cpu(sum_of_squares, x)
    assert [e.name for e in program.equations] == ["sum_of_squares"]
    assert [e.name for e in program.equations[0].params["body"].equations] == ["square", "sum"]
    executable = backend("cpu").compile(program)
    assert executable.kernels[0][0].name.startswith("sum_of_squares")
    (found,), _ = executable.run([x])
    np.testing.assert_allclose(found, np.square(x.astype(np.float64)).sum(), rtol=1e-6)


@pytest.mark.compiled
def test_a_users_kernel_needs_no_kernels_of_the_equations_in_the_body(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.ones((4, 5), np.float32)
    program = on_cpu(sum_of_squares, x)
    monkeypatch.delitem(registry._C_KERNELS, "sum")
    executable = backend("cpu").compile(program)
    assert executable.kernels[0][0].name.startswith("sum_of_squares")
    (found,), _ = executable.run([x])
    assert found == 20


def test_a_gpu_launches_the_users_kernel(document: dict[str, Any]) -> None:
    x = np.ones((40, 50), np.float32)
    (equation,) = for_gpu(stage(sum_of_squares, ()).program(x)).equations
    (launch,) = Lowering(H200).launches(equation)
    assert isinstance(launch, LaunchPlan)
    assert (launch.name, launch.numbers, launch.size.blocks) == ("sum_of_squares", (2000,), (1, 1, 1))


def test_a_value_that_others_read_is_not_fused_away(document: dict[str, Any]) -> None:
    def f(x: Any) -> Any:
        squares = ops.square(x)
        return ops.sum(squares), squares

    assert "sum_of_squares" not in [e.name for e in on_cpu(f, np.ones(9, np.float32)).equations]


def test_programs_are_not_stored_while_a_user_has_fusions(document: dict[str, Any]) -> None:
    assert backend("cpu").lowering_key() is None


def test_without_the_users_fusion_nothing_of_it_is_left() -> None:
    names = [e.name for e in on_cpu(sum_of_squares, np.ones(9, np.float32)).equations]
    assert "sum_of_squares" not in names
    assert backend("cpu").lowering_key() is not None


def test_a_kernel_gets_the_parameters_of_the_equations_in_a_body() -> None:
    steps: list[Step] = [(sum_p, (0,), {"axes": (1,)}), (reshape_p, (1,), {"shape": (4, 1)}), (square_p, (2,), {})]
    x = ArrayType((4, 5), np.dtype(np.float32))
    one = fused_of("sum_of_squares", [x], steps, [3])
    assert one.kernel_params == {"axes": (1,)}  # not the shape, which a view needs
    two = fused_of("sum_of_squares", [x], [*steps, (sum_p, (3,), {"axes": (0,)})], [4])
    assert two.kernel_params == {"axes": ((1,), (0,))}
    assert fuse("outer", [one], one.outputs).kernel_params == one.kernel_params


class Twice(Fusion):
    form = "twice"


def test_a_wrong_backend_and_a_second_fusion_of_a_form_are_refused() -> None:
    with pytest.raises(ValueError, match="register_fusion: found backend 'gpu', expected 'cpu' or 'cuda'"):
        register_fusion(Twice, "gpu")
    register_fusion(Twice, "cpu")
    try:
        with pytest.raises(ValueError, match="register_fusion: 'cpu' already has a fusion of the form 'twice'"):
            register_fusion(Twice, "cpu")
    finally:
        forget_fusion(Twice)


def test_each_reader_of_a_copied_equation_has_one_of_its_own() -> None:
    def f(x: Any) -> Any:
        y = ops.exp(x)
        return ops.sum(y), ops.max(y), ops.square(y)

    program = stage(f, ()).program(np.ones(5, np.float32))
    copied = with_copies(program, lambda e, reader: e.name == "exp" and reader.name in ("sum", "max"))
    assert sorted(e.name for e in copied.equations) == ["exp", "exp", "exp", "max", "square", "sum"]
    of_all = with_copies(program, lambda e, reader: e.name == "exp")
    assert sorted(e.name for e in of_all.equations) == ["exp", "exp", "exp", "max", "square", "sum"]
    assert {v: e.name for e in of_all.equations for v in e.outputs}.keys() >= set(of_all.outputs)


class Named(Fusion):
    """Joins operations of certain names."""

    names: frozenset[str]

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        return {groups.equations[i].name for i in (producer, reader)} <= self.names


class Narrow(Named):
    form = "narrow"
    names = frozenset({"exp", "sum"})


class Wide(Named):
    form = "wide"
    names = frozenset({"sum", "square", "sin"})


class Slower(Wide):
    """Its kernel takes the time of more launches."""

    def overhead(self, equations: Sequence[Equation]) -> float:
        return 2.5


def chosen(forms: tuple[type[Fusion], ...], length: int) -> list[list[str]]:
    """The operations of each kernel for the sine of the square of a sum of ``length`` exponentials."""
    program = stage(lambda x: ops.sin(ops.square(ops.sum(ops.exp(x)))), ()).program(np.ones(length, np.float32))
    improved = FusionPass(forms, launch_bytes=1 << 10)(program)
    return [[e.name, *(x.name for x in e.params["body"].equations)] if e.form else [e.name] for e in improved.equations]


FIRST_TWO = [["narrow", "exp", "sum"], ["wide", "square", "sin"]]
LAST_THREE = [["exp"], ["wide", "sum", "square", "sin"]]


@pytest.mark.parametrize("forms", [(Narrow, Wide), (Wide, Narrow)])
def test_the_form_that_saves_more_bytes_keeps_the_equations(forms: tuple[type[Fusion], ...]) -> None:
    """The form that loses an equation fuses the others."""
    assert chosen(forms, 1000) == FIRST_TWO


def test_the_first_of_two_forms_that_save_as_much_keeps_the_equations() -> None:
    assert chosen((Narrow, Wide), 1) == FIRST_TWO
    assert chosen((Wide, Narrow), 1) == LAST_THREE


def test_the_overhead_of_a_form_counts_when_forms_compete() -> None:
    assert chosen((Wide, Narrow), 1) == LAST_THREE
    assert chosen((Slower, Narrow), 1) == FIRST_TWO


class Beside(Fusion):
    """Puts independent operations side by side, and refuses to."""

    form = "beside"

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        return [range(len(groups.equations))]

    def saves(self, equations: Sequence[Equation]) -> bool:
        return False


def test_equations_whose_kernel_saves_nothing_are_not_put_side_by_side() -> None:
    program = stage(lambda x: (ops.exp(x), ops.sin(x)), ()).program(np.ones(9, np.float32))
    assert [e.name for e in FusionPass((Beside,))(program).equations] == ["exp", "sin"]
