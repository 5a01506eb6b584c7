"""custom_op: operations with kernels of one's own, and `adtrain gradcheck --plugin`, which checks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from command_line import invoke
from plugin_files import SQUARED, gradcheck, no_plugins

import adtrain as ad
from adtrain.backends.cuda import H200, compiler
from adtrain.backends.cuda.compiler import CudaCompilerError
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.bench import ops, text
from adtrain.bench.machine import protocol
from adtrain.bench.op_table import TimedOp
from adtrain.cache import open_cache
from adtrain.core.array import Placeholder
from adtrain.core.errors import OptionError, ShapeError, TraceError
from adtrain.core.staging import stage
from adtrain.custom_ops import CustomOp, _file, custom_op

pytestmark = pytest.mark.usefixtures("no_plugins")
__all__ = ["no_plugins"]

EXAMPLE = Path(__file__).parent.parent / "examples" / "trilinear" / "trilinear.py"
X, W = np.array([0.5, -2.0, 3.0]), np.array([2.0, 1.0, -1.0])

SCALED = """
#include "common.h"
void FN(scaled)(const Team *team, const T *x, const T *w, T *out, int64_t size, double scale) {
    int64_t begin, end;
    my_share(team, size, &begin, &end);
    for (int64_t i = begin; i < end; i++) out[i] = scale * x[i] * w[i];
}
"""

SCALED_CUDA = """
#include "common/common.cuh"
KERNEL scaled(const T *__restrict__ x, const T *w, T *out, int64_t size, double scale) {
    wait_for_inputs();
    for (int64_t i = grid_index(); i < size; i += grid_size()) out[i] = scale * x[i] * w[i];
}
"""


def same_type(x: Any, *_: Any, **__: Any) -> ad.ArrayType:
    return ad.ArrayType(x.shape, x.dtype)


def scaled(**changed: Any) -> CustomOp:
    """scale x w, with a derivative by x and by w."""
    given: dict[str, Any] = {
        "shape": same_type,
        "numpy": lambda x, w, scale: scale * x * w,
        "vjp": lambda ct, out, x, w, scale: (ct * w * scale, ct * x * scale),
        "numbers": lambda x, w, scale: (x.size, float(scale)),
        "c": SCALED,
    }
    return custom_op("scaled", **{**given, **changed})


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_all_cotangents_are_right(compiled: bool) -> None:
    op = scaled()
    f = ad.value_and_grad(lambda x, w: op(x, w, scale=3.0).sum(), (0, 1))
    value, (by_x, by_w) = (stage(f) if compiled else f)(ad.array(X), ad.array(W))
    assert value.item() == pytest.approx(3 * (X * W).sum())
    np.testing.assert_allclose(by_x.numpy(), 3 * W)
    np.testing.assert_allclose(by_w.numpy(), 3 * X)


@pytest.mark.compiled
def test_the_c_kernel_runs_in_compiled_code() -> None:
    op = scaled(numpy=lambda x, w, scale: 0.0 * x)  # another result
    np.testing.assert_allclose(stage(lambda x, w: op(x, w, scale=2.0))(ad.array(X), ad.array(W)).numpy(), 2 * X * W)


def test_an_argument_without_a_cotangent_counts_as_constant() -> None:
    op = scaled(vjp=lambda ct, out, x, w, scale: (ct * w, None))
    by_x, by_w = ad.grad(lambda x, w: op(x, w, scale=1.0).sum(), (0, 1))(X, W)
    assert (by_x.numpy().tolist(), by_w.numpy().tolist()) == (W.tolist(), [0, 0, 0])


def test_several_outputs_reach_the_rule_as_tuples_of_arrays() -> None:
    op = custom_op(
        "sum_and_difference",
        shape=lambda x, w: (same_type(x), same_type(x)),
        numpy=lambda x, w: (x + w, x - w),
        vjp=lambda cts, outs, x, w: (cts[0] + cts[1], cts[0] - cts[1]),
    )
    by_x, by_w = ad.grad(lambda x, w: op(x, w)[0].sum(), (0, 1))(X, W)  # the other output has no cotangent
    assert (by_x.numpy().tolist(), by_w.numpy().tolist()) == ([1, 1, 1], [1, 1, 1])


def saved_exp() -> CustomOp:
    return custom_op(
        "saved_exp",
        shape=lambda x: (same_type(x), same_type(x)),
        numpy=lambda x: (np.exp(x) ** 2, np.exp(x)),
        residuals=1,
        vjp=lambda ct, outs, x: (2.0 * ct * outs[1] * outs[1],),
    )


def test_residuals_reach_only_the_rule() -> None:
    op = saved_exp()
    assert isinstance(op(X), ad.Value)
    np.testing.assert_allclose(ad.grad(lambda x: op(x).sum())(X).numpy(), 2 * np.exp(2 * X))


def test_a_second_derivative_through_a_residual_is_refused() -> None:
    op = saved_exp()
    first = ad.grad(lambda x: op(x).sum())
    with pytest.raises(TraceError, match="goes through a residual"):
        ad.grad(lambda x: first(x).sum())(X)


@pytest.mark.parametrize(
    ("vjp", "message"),
    [
        (lambda ct, out, x, w, scale: (ct,), "returned 1, expected a tuple of 2"),
        (lambda ct, out, x, w, scale: ct, "expected a tuple of 2"),
        (lambda ct, out, x, w, scale: (ct, 3.0), "a float for argument 1"),
        (lambda ct, out, x, w, scale: (ct.sum(), None), r"returned a cotangent float64\[\], expected float64\[3\]"),
    ],
)
def test_a_rule_that_returns_something_else_is_reported(vjp: Any, message: str) -> None:
    op = scaled(vjp=vjp)
    with pytest.raises(ShapeError, match=message):
        ad.grad(lambda x: op(x, W, scale=1.0).sum())(X)


def test_a_name_is_given_once() -> None:
    def define() -> CustomOp:
        return custom_op("twice", shape=same_type, numpy=lambda x: x)

    define()
    define()  # the same line, run again
    with pytest.raises(OptionError, match=r"defined already at .*test_custom_op.py:\d+"):
        custom_op("twice", shape=same_type, numpy=lambda x: x)
    with pytest.raises(OptionError, match=r"defined already in adtrain.ops"):
        custom_op("matmul", shape=same_type, numpy=lambda x: x)


def test_an_operation_without_a_derivative_is_not_differentiated_silently() -> None:
    plain = custom_op("plain", shape=same_type, numpy=lambda x: x)
    assert plain(X).numpy().tolist() == X.tolist()
    with pytest.raises(TraceError, match=r"test_custom_op.py:\d+: custom_op plain has no vjp, and is differentiated"):
        ad.grad(lambda x: plain(x).sum())(X)
    signs = custom_op(
        "signs", shape=lambda x: ad.ArrayType(x.shape, np.dtype(bool)), numpy=lambda x: x > 0
    )  # no derivative exists
    assert ad.grad(lambda x: ad.ops.where(signs(x), x, 0.0).sum())(X).numpy().tolist() == [1, 0, 1]


def test_a_missing_source_is_reported_with_its_path() -> None:
    with pytest.raises(OptionError, match=r"tests/none.cu: there is no such file"):
        scaled(cuda="none.cu")


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"c": 3}, "custom_op wrong: found 3 for a kernel, expected its text or its path"),
        ({"c": "\n", "numbers": lambda x: 3}, "custom_op wrong: numbers returned 3, expected a tuple of integers"),
        ({"c": "\n", "numbers": lambda x: ["3"]}, r"custom_op wrong: numbers returned \['3'\], expected a tuple of"),
        ({"vmap": lambda op, mapped, x: None}, "wrong: its batching rule returned None, expected adtrain arrays"),
    ],
)
def test_a_wrong_kernel_or_rule_is_reported(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ad.AdtrainError, match=message):
        ad.jit(ad.vmap(custom_op("wrong", shape=same_type, numpy=lambda x: x, **given)))(np.ones((2, 3)))


@pytest.mark.compiled
def test_the_example_passes_its_check(tmp_path: Path) -> None:
    result = invoke("gradcheck", "--plugin", str(EXAMPLE))
    assert result.exit_code == 0, result.output
    assert "all 16 checks passed" in result.output


PLUGIN = SQUARED.format(
    language="c",
    kernel="""
#include "common.h"
void FN(squared)(const Team *team, const T *x, T *out, int64_t size) {
    if (team->thread == 0)
        for (int64_t i = 0; i < size; i++) out[i] = x[i] * x[i];
}
""",
)


@pytest.mark.compiled
def test_a_right_rule_and_kernel_pass_the_check(tmp_path: Path) -> None:
    assert gradcheck(tmp_path, PLUGIN).exit_code == 0


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("right", "wrong", "failed"),
    [
        ("2.0 * ct * x", "3.0 * ct * x", "squared samples 1"),
        ("out[i] = x[i] * x[i]", "out[i] = 2 * x[i]", "squared kernel float32"),
        pytest.param(  # the last element is not written
            "i < size; i++", "i < size - 1; i++", "squared kernel float64", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_wrong_rule_or_kernel_fails_the_check(tmp_path: Path, right: str, wrong: str, failed: str) -> None:
    assert right in PLUGIN
    result = gradcheck(tmp_path, PLUGIN.replace(right, wrong))
    assert result.exit_code == 1
    assert f"FAILED {failed}" in result.output


MAPPED = """
import numpy as np
import adtrain as ad
from adtrain import ops
difference = ad.custom_op(
    "difference", numpy=lambda x, y: x - y, vjp=lambda ct, out, x, y: (ct, -ct),
    shape=lambda x, y: ad.ArrayType(np.broadcast_shapes(x.shape, y.shape), x.dtype),
    samples=lambda rng: (rng.normal(size=3), rng.normal(size=3)), vmap=lambda op, mapped, x, y: op({arguments}))
"""


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ("*(a if m else ops.expand_dims(a, 0) for a, m in zip((x, y), mapped))", True),
        ("y, x", False),
        ("*(x, y) if all(mapped) else (y, x)", False),
    ],
)
def test_the_rule_for_vmap_is_checked_with_all_arguments_mapped_and_with_one(
    tmp_path: Path, arguments: str, passed: bool
) -> None:
    result = gradcheck(tmp_path, MAPPED.format(arguments=arguments))
    assert result.exit_code == (0 if passed else 1), result.output
    assert ("FAILED difference vmap" in result.output) == (not passed)


RELATED = """
import numpy as np
import adtrain as ad
centred = ad.custom_op(
    "centred", numpy=lambda x: x - x.mean(-1, keepdims=True), shape=lambda x: ad.ArrayType(x.shape, x.dtype),
    samples=lambda rng: (rng.normal(size=(3, 4)),), axes={axes!r})
"""


@pytest.mark.parametrize(("axes", "passed"), [("*.->*.", True), ("r.->r.", True), ("*->*", False), (".c->.c", False)])
def test_the_axes_of_an_operation_are_checked(tmp_path: Path, axes: str, passed: bool) -> None:
    result = gradcheck(tmp_path, RELATED.format(axes=axes))
    assert result.exit_code == (0 if passed else 1), result.output
    assert ("FAILED centred axes" in result.output) == (not passed)


@pytest.mark.parametrize(("axes", "runs"), [("*r.->*r.", 1), ("r.->r.", 1), (None, 3), ("..->..", 3)])
def test_members_run_at_once_where_the_axes_of_an_operation_allow_it(axes: str | None, runs: int) -> None:
    shapes: list[tuple[int, ...]] = []

    def sums(x: np.ndarray) -> np.ndarray:
        shapes.append(x.shape)
        return x.cumsum(-1)

    op = custom_op("test_axes_of_members", shape=lambda x: ad.ArrayType(x.shape, x.dtype), numpy=sums, axes=axes)
    x = np.random.default_rng(0).normal(size=(3, 2, 4))
    np.testing.assert_array_equal(ad.vmap(op)(ad.array(x)).numpy(), x.cumsum(-1))
    assert len(shapes) == runs


@pytest.mark.parametrize("axis", [1, -1])
def test_an_axis_of_an_operation_counts_beside_the_members(axis: int) -> None:
    op = custom_op(
        "test_axis_of_members",
        shape=lambda x, axis: ad.ArrayType(x.shape, x.dtype),
        numpy=lambda x, axis: x.cumsum(axis),
        axes="*.->*.",
    )
    x = np.random.default_rng(0).normal(size=(3, 2, 4))
    np.testing.assert_array_equal(ad.vmap(lambda x: op(x, axis=axis))(ad.array(x)).numpy(), x.cumsum(-1))


def test_axes_that_do_not_fit_an_operation_are_reported() -> None:
    with pytest.raises(ad.OptionError, match="custom_op test_axes_kind: axes is 3, expected a text such as"):
        custom_op("test_axes_kind", shape=lambda x: x, numpy=lambda x: x, axes=cast(Any, 3))
    op = custom_op("test_axes_fit", shape=lambda x: ad.ArrayType(x.shape, x.dtype), numpy=lambda x: x, axes="nc->n")
    with pytest.raises(ad.ShapeError, match=r"test_axes_fit: axes 'nc->n' do not fit the shapes \(2,\) -> \(2,\)"):
        ad.vmap(op)(ad.array(np.zeros((3, 2))))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("import numpy", "import numpy as", "mine.py:2: invalid syntax"),
        ("import numpy as np", "1 / 0", "mine.py:2: ZeroDivisionError: division by zero"),
        ("samples=lambda rng: (rng.normal(size=7),),", "", "mine.py:12: custom_op squared has no samples"),
        ("numpy=lambda x: x * x", "numpy=lambda x: x[:2]", "squared: NumPy gave float64[2], the shape rule float64[7]"),
    ],
)
def test_a_broken_plugin_is_reported_in_one_line(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    assert right in PLUGIN
    result = gradcheck(tmp_path, PLUGIN.replace(right, wrong))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.compiled
@pytest.mark.parametrize("index", ["-1", "size", "size + 500"])
def test_a_kernel_that_writes_outside_its_output_is_reported_in_one_line(tmp_path: Path, index: str) -> None:
    result = gradcheck(tmp_path, PLUGIN.replace("out[i] = x[i]", f"out[{index}] = out[i] = x[i]"))
    assert result.exit_code == 2, result.output
    mine = tmp_path / "mine.py"
    assert result.output.endswith(f"{mine}:12: kernel squared of {mine} wrote outside its output\n")
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.compiled
def test_an_error_of_the_compiler_is_reported_with_the_line_of_the_plugin(tmp_path: Path) -> None:
    line = 1 + PLUGIN.partition("x[i] * x[i]")[0].count("\n")
    result = gradcheck(tmp_path, PLUGIN.replace("x[i] * x[i]", "x[i] * missing"))
    assert result.exit_code == 2, result.output
    assert f"your kernel does not compile: {tmp_path}/mine.py:{line}:" in result.output
    assert "missing" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_shape_rule_that_returns_no_type_is_reported() -> None:
    op = custom_op("untyped", shape=lambda x: (3,), numpy=lambda x: x)
    with pytest.raises(ad.ShapeError, match=r"custom_op untyped: shape returned \(3,\), expected ad\.ArrayType\(shape"):
        op(X)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (lambda x, w, scale: (x.size, int(scale)), r"double \*, int64_t, int64_t\);"),
        (lambda x, w, scale: (np.float32(x.size), scale), r"double \*, double, double\);"),
        (lambda x, w, scale: (x.size,), r"double \*, int64_t\);"),
    ],
)
def test_numbers_of_other_types_than_the_kernel_declares_are_reported(numbers: Any, expected: str) -> None:
    op = scaled(numbers=numbers)
    message = rf"test_custom_op.py:\d+:\d+: error: conflicting types for 'scaled_float64'; expected void .*{expected}"
    with pytest.raises(ad.AdtrainError, match=message):
        stage(lambda x, w: op(x, w, scale=2.0))(ad.array(X), ad.array(W))


@pytest.mark.needs_nvrtc
@pytest.mark.parametrize("parameter", ["float scale", "int64_t scale", "double scale, double more"])
def test_a_cuda_kernel_whose_parameters_are_not_those_of_its_launch_does_not_compile(parameter: str) -> None:
    op = scaled(cuda=SCALED_CUDA.replace("double scale", parameter))
    types = [Placeholder(X.shape, X.dtype, "gpu") for _ in range(2)]
    (equation,) = stage(lambda x, w: op(x, w, scale=2.0)).program(*types).equations
    (launch,) = Lowering(H200).launches(equation)
    message = r"test_custom_op.py\(\d+\): error: .*; expected void scaled\(const double \*, .*, int64_t, double\);"
    assert isinstance(launch, LaunchPlan)
    with pytest.raises(CudaCompilerError, match=message):
        compiler.compile_source(launch.source, "90a")


@pytest.mark.compiled
def test_numbers_of_an_integer_in_one_call_and_a_float_in_another_are_reported() -> None:
    op = scaled(numbers=lambda x, w, scale: (x.size, scale))
    with pytest.raises(ad.AdtrainError, match=r"found calls of .*, double\); and of .*, int64_t\);"):
        stage(lambda x, w: op(x, w, scale=2.0) + op(x, w, scale=2))(ad.array(X), ad.array(W))


@pytest.mark.compiled
def test_a_kernel_of_another_name_is_reported_and_not_replaced_by_numpy(tmp_path: Path) -> None:
    result = gradcheck(tmp_path, PLUGIN.replace("FN(squared)", "FN(square)"))
    assert result.exit_code == 2, result.output
    assert "your kernel does not link: squared_float32 is not defined; expected void FN(NAME)(...)" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_kernel_is_not_reported_as_checked_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    result = gradcheck(tmp_path, PLUGIN)
    assert result.exit_code == 2, result.output
    assert f"{tmp_path}/mine.py:12: the kernel of squared needs a C compiler to be checked" in result.output


@pytest.mark.needs_nvrtc
def test_an_error_of_nvrtc_is_reported_with_the_line_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "own.cuh").write_text("#define MISSING missing\n")
    (tmp_path / "mine.cu").write_text('#include "common/common.cuh"\n#include "own.cuh"\nKERNEL f() { MISSING(); }\n')
    source = compiler.file_source(str(tmp_path / "mine.cu"), (np.dtype("float32"),), ())
    with pytest.raises(CudaCompilerError, match=r"mine\.cu does not compile \(sm_90a\): .*mine\.cu\(3\): error"):
        compiler.compile_source(source, "90a")
    before = compiler.fingerprint(source, "90a")
    (tmp_path / "own.cuh").write_text("#define MISSING void\n")
    assert compiler.fingerprint(source, "90a") != before


FUNCTION = """
import adtrain as ad
from adtrain import ops

@ad.register.op("softsign", samples=lambda rng, n=5: (rng.normal(size=n), rng.normal(size=n)))
def softsign(x, scale):
    return scale * x / (1 + ops.abs(x))
"""


@pytest.mark.compiled
def test_a_registered_function_is_checked_like_a_custom_operation(tmp_path: Path) -> None:
    assert "all 8 checks passed" in gradcheck(tmp_path, FUNCTION).output
    constant = FUNCTION.replace("1 + ops.abs(x)", "ops.stop_gradient(1 + ops.abs(x))")
    assert "FAILED softsign samples 1" in gradcheck(tmp_path, constant).output


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            FUNCTION.replace('"softsign"', '"relu"'),
            "mine.py:5: op relu: the name is taken by adtrain.ops; choose another",
        ),
        (FUNCTION.replace('"softsign"', '"soft-sign"'), "mine.py:5: op 'soft-sign': expected an identifier"),
        (FUNCTION + FUNCTION, "mine.py:12: op softsign: the name is taken at "),
        (FUNCTION.replace(", samples=lambda rng, n=5: (rng.normal(size=n), rng.normal(size=n))", ""), "'samples'"),
    ],
)
def test_a_wrong_registration_of_a_function_is_reported_in_one_line(tmp_path: Path, source: str, message: str) -> None:
    result = gradcheck(tmp_path, source)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_bench_times_the_operations_of_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[TimedOp] = []

    def of(benches: list[TimedOp], *_: object) -> ops.Ops:
        timed.extend(benches)
        return ops.Ops(protocol=protocol("cpu", None), ops=[])

    monkeypatch.setattr(ops, "result", of)
    monkeypatch.setattr(text, "render", lambda *_: [])
    (tmp_path / "mine.py").write_text(FUNCTION + PLUGIN)
    for more in ((), ("--op", "squared"), ("--op", "tanh")):
        result = invoke("bench", "--device", "cpu", "--plugin", str(tmp_path / "mine.py"), *more)
        assert result.exit_code == 0, result.output
    assert [each.op for each in timed] == ["softsign", "squared", "squared", "tanh"]
    softsign, squared, *_ = timed
    assert list(ops.phases(softsign, ops.sample(softsign, 64))) == ["forward", "backward x", "backward scale"]
    assert [x.shape for x in ops.sample(softsign, 64)] == [(64,), (64,)]
    assert (list(ops.phases(squared, ops.sample(squared, 7))), squared.sizes["cpu"]) == (
        ["forward", "backward x"],
        (7,),
    )
    with pytest.raises(OptionError, match="the samples of squared have one size; give them a second parameter"):
        ops.sample(squared, 8)


def test_a_file_without_operations_and_a_missing_file_are_reported(tmp_path: Path) -> None:
    assert "registers no operation with ad.custom_op or ad.register.op" in gradcheck(tmp_path, "x = 1\n").output
    result = invoke("gradcheck", "--plugin", str(tmp_path / "none.py"))
    assert result.exit_code == 2
    assert "found nothing, expected a Python file" in result.output


def test_a_stored_source_with_other_content_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = "void FN(some_op)(const Team *team, const T *x, T *out, int64_t size) {}\n"
    good = Path(_file("some_op", "c", text, __file__))
    content = good.read_bytes()
    good.unlink()
    open_cache("sources").store(good.name.partition(".")[0], ".c", b"other code")
    assert Path(_file("some_op", "c", text, __file__)).read_bytes() == content
