"""Kernels of long rows, such as a loss over many classes: compiled for the CPU, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from cuda_samples import Shaped
from hypothesis import strategies as st
from program_samples import for_gpu
from sweeps import check_examples, examples
from test_sum_accuracy import BOUND

import adtrain as ad
from adtrain import ops, passes
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda import H200, fusions
from adtrain.backends.cuda.codegen import long_rows as codegen
from adtrain.backends.cuda.forms.row_fused import LONG_ROWS, MAX_LENGTH, MAX_WIDTH
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.core import tree
from adtrain.core.array import from_numpy
from adtrain.core.kernel import Target
from adtrain.core.program import Equation, Program, body_of
from adtrain.core.staging import evaluate, stage
from adtrain.core.trace import bind
from adtrain.core.views import per_member
from adtrain.ops.channels_last import from_bfloat16_p, to_bfloat16_p
from adtrain.passes.plan_memory import plan_memory

__all__ = ["host"]

TARGET = Target((9, 0), 4, 12 << 10)
"""A GPU on which four rows are enough, and two arrays of 1025 elements do not fit into shared memory."""


def long_rows(program: Program) -> list[Equation]:
    return [e for e in program.equations if e.form == LONG_ROWS]


def computed(f: Callable[..., Any], given: Sequence[np.ndarray], host: Host) -> list[np.ndarray]:
    """The results of a function whose `long_rows` kernels run on the host. It must have one."""
    program = for_gpu(stage(f).program(*(from_numpy(x, "cpu") for x in given)), TARGET)
    assert long_rows(program), str(program)
    known: dict[Any, Any] = {v: x.numpy() for v, x in program.constants.items()}
    known |= dict(zip(program.inputs, given, strict=True))
    for e in program.equations:
        own = [known[v] for v in e.inputs]
        results: Sequence[Any]
        if e.form == LONG_ROWS:
            results = host.computed(e, None, own)
        else:
            results = NumpyProgram(Program(e.inputs, {}, (e,), e.outputs)).run(own)[0]
        known |= dict(zip(e.outputs, map(np.asarray, results), strict=True))
    return [known[v] for v in program.outputs]


def check(f: Callable[..., Any], given: Sequence[np.ndarray], host: Host, tolerance: float) -> None:
    """Compare with the same function on float64 arrays, of which NumPy computes each operation."""
    exact = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in given]
    expected = [np.asarray(x.numpy()) for x in tree.leaves(f(*map(ad.array, exact)))]
    for found, wanted in zip(computed(f, given, host), expected, strict=True):
        if wanted.dtype.kind == "f":
            error = np.linalg.norm(found.astype(np.float64) - wanted)
            assert error <= tolerance * np.linalg.norm(wanted), (found.shape, error, np.linalg.norm(wanted))
        else:
            np.testing.assert_array_equal(found, wanted)


TOLERANCE = {"float32": 5e-6, "float64": 1e-13}
"""Of the norm of the difference over the norm."""


@examples(3, 25)
def test_losses_over_many_classes_and_all_gradients_match_float64(
    examples: int, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusions, "LAUNCH_BYTES", 0)  # small arrays are worth a launch, too

    def check_loss(
        rows: int, classes: int, features: int, dtype: str, smoothing: float, ignored: bool, weighted: bool, mean: str
    ) -> None:
        rng = np.random.default_rng(classes)

        def step(x: Any, w: Any, factors: Any, labels: Any) -> Any:
            def loss(x: Any, w: Any) -> Any:
                logits = ops.matmul(x, w, transpose_b=True)
                options: dict[str, Any] = {"reduction": mean, **({"weight": factors} if weighted else {})}
                found = ops.cross_entropy(logits, labels, smoothing, ignore_index=3 if ignored else None, **options)
                return ops.sum(found * found), (found, ops.argmax(logits, axis=1))

            return ad.value_and_grad(loss, (0, 1), has_aux=True)(x, w)

        labels = rng.integers(0, classes, rows).astype("int32")
        labels[rows // 2] = 3
        given = [
            rng.normal(size=(rows, features)).astype(dtype) * 3,
            rng.normal(size=(classes, features)).astype(dtype),
            rng.uniform(0.5, 2, classes).astype(dtype),
            labels,
        ]
        check(step, given, host, TOLERANCE[dtype])

    check_examples(
        examples,
        check_loss,
        *(st.integers(4, 9), st.integers(MAX_WIDTH + 1, 3 * MAX_WIDTH), st.integers(2, 20)),
        *(st.sampled_from(["float32", "float64"]), st.sampled_from([0.0, 0.1]), st.booleans(), st.booleans()),
        st.sampled_from(["mean", "sum", "none"]),
    )


LAYERS: dict[str, Any] = {
    "norm": lambda x, w: ops.layer_norm(x, x.shape[-1], w, w),
    "softmax": lambda x, w: x + ops.softmax(x, -1),
    "row": lambda x, w: x / (1.0 + ops.square(ops.max(x, -1, keepdims=True) - ops.min(x, -1, keepdims=True))),
    "columns": lambda x, w: ops.exp(x * 0.1) * w,
    "mean": lambda x, w: x - ops.mean(ops.square(x), -1, keepdims=True),
    "log": lambda x, w: x * ops.log_softmax(x, -1),
    "labels": lambda x, w: x + ops.one_hot(ops.argmax(x, -1), x.shape[-1], x.dtype),
}


@examples(3, 25)
def test_any_equations_of_long_rows_match_float64(examples: int, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusions, "LAUNCH_BYTES", 0)

    def check_layers(rows: int, length: int, layers: Sequence[str]) -> None:
        def f(x: Any, w: Any) -> Any:
            for name in layers:
                x = LAYERS[name](x, w)
            return x, ops.sum(x, -1)

        def step(x: Any, w: Any) -> Any:
            return f(x, w), ad.grad(lambda x: sum(ops.sum(ops.square(y)) for y in f(x, w)))(x)

        rng = np.random.default_rng(length)
        check(step, [rng.normal(size=(rows, length)), rng.normal(size=length)], host, 1e-9)

    layers = st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3)
    check_examples(examples, check_layers, st.integers(4, 7), st.integers(MAX_WIDTH + 1, 3 * MAX_WIDTH), layers)


@pytest.mark.parametrize("equal", [True, False])
def test_the_error_of_a_sum_of_the_longest_rows_is_bounded(equal: bool, host: Host) -> None:
    def f(x: Any) -> Any:
        return ops.sum(x * x * 2.0, 1), ops.sum(ops.softmax(x, 1) * x, 1)

    shape = (4, MAX_LENGTH)
    x = np.full(shape, 0.1, np.float32) if equal else np.random.default_rng(0).random(shape, np.float32)
    check(f, [x], host, BOUND)


def test_a_row_with_an_infinity_or_nan_gives_what_numpy_gives(host: Host) -> None:
    def f(x: Any) -> Any:
        return ops.log_softmax(x, -1), ops.softmax(x, -1), ops.argmax(x, axis=-1), ops.sum(x, -1), ops.max(x, -1)

    x = np.random.default_rng(0).normal(size=(5, 1200))
    x[0, 7], x[1, 8], x[2, [900, 1100]], x[3] = np.nan, -np.inf, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        expected = [y.numpy() for y in f(ad.array(x))]
        for found, wanted in zip(computed(f, [x], host), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_the_first_of_equal_maxima_is_found_in_any_order_of_threads(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.zeros((6, 2000))
    x[np.arange(6), [0, 1999, 3, 500, 1024, 7]] = 1
    x[3, 1400] = 1

    def f(x: Any) -> Any:
        return ops.argmax(x, axis=-1), ops.sum(x, -1)

    for order in (0, 1, 2):
        monkeypatch.setattr(host, "thread_order", order)
        assert computed(f, [x], host)[0].tolist() == [0, 1999, 3, 500, 1024, 7]


def test_log_softmax_its_gradient_and_the_class_take_three_rounds_and_three_reductions() -> None:
    def f(x: Any, labels: Any) -> Any:
        return ad.grad(lambda x: ops.cross_entropy(x, labels))(x), ops.argmax(x, axis=1)

    x = from_numpy(np.zeros((6, 1304), np.float32), "cpu"), from_numpy(np.zeros(6, np.int64), "cpu")
    (equation,) = long_rows(for_gpu(stage(f).program(*x), TARGET))
    text = "\n".join(codegen.long_rows(body_of(equation), TARGET)[0].lines)
    assert text.count("for (int first") == 3
    assert text.count("over_block<") == 3  # the maximum, the sum of exponentials, the class


def test_rows_of_bfloat16_are_read_and_written_in_bfloat16(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusions, "LAUNCH_BYTES", 0)
    rng = np.random.default_rng(0)
    x = to_bfloat16_p.reference(rng.normal(size=(6, 1304)).astype("float32"))
    labels = rng.integers(0, 1304, 6)
    arrays = from_numpy(x, "cpu"), from_numpy(labels, "cpu")

    def f(bits: Any, labels: Any) -> Any:
        x = bind(from_bfloat16_p, bits)
        value, gradient = ad.value_and_grad(lambda x: ops.cross_entropy(x, labels))(x)
        return value, bind(to_bfloat16_p, gradient), ops.argmax(x, axis=1)

    (kernel,) = long_rows(for_gpu(stage(f).program(*arrays), TARGET))
    assert {v.type.dtype.name for v in (*kernel.inputs, *kernel.outputs) if v.size == x.size} == {"uint16"}
    value, gradient, most = computed(f, [x, labels], host)
    expected = [y.numpy() for y in f(*arrays)]
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    found, wanted = (from_bfloat16_p.reference(bits) for bits in (gradient, expected[1]))
    np.testing.assert_allclose(found, wanted, rtol=2.0**-7)
    np.testing.assert_array_equal(most, expected[2])


@pytest.mark.parametrize("order", [0, 1])
def test_a_gradient_that_overwrites_the_logits_is_the_same(
    order: int, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a row reads the logit of its label, which other threads overwrite."""
    monkeypatch.setattr(host, "thread_order", order)
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(6, 5300)).astype("float32"), rng.integers(0, 5300, 6)  # not all fits in shared memory

    def f(x: Any, labels: Any) -> Any:
        return ad.value_and_grad(lambda x: ops.sum(ops.cross_entropy(x, labels)))(x)

    program = for_gpu(stage(f).program(from_numpy(x, "cpu"), from_numpy(labels, "cpu")), TARGET)
    (kernel,) = long_rows(program)
    arrays = [
        x if v.size == x.size else labels if v.type.dtype == labels.dtype else np.ones(v.type.shape, v.type.dtype)
        for v in kernel.inputs
    ]
    logits = next(v for v in kernel.inputs if v.size == x.size)
    gradient = next(v for v in kernel.outputs if v.size == x.size)
    expected = host.computed(kernel, None, arrays)
    pair = {kernel.outputs.index(gradient): kernel.inputs.index(logits)}
    found = host.computed(kernel, None, [a.copy() for a in arrays], overwritten=pair)
    assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]


def test_the_loss_over_a_vocabulary_reads_the_logits_once_and_stores_their_gradient_only() -> None:
    rows, classes = 8192, 50304

    def step(x: Any, w: Any, labels: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            logits = ops.matmul(x, w, transpose_b=True)
            return ops.cross_entropy(logits, labels), logits

        with ops.matmul_precision("bfloat16"):
            (value, logits), gradients = ad.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return value, gradients, ops.sum(ops.equal(ops.argmax(logits, axis=1), labels))

    given = Shaped(rows, 768), Shaped(classes, 768), Shaped(rows, dtype="int64")
    program = for_gpu(stage(step).program(*given))
    (loss,) = long_rows(program)
    large = [v for e in program.equations for v in e.outputs if v.size >= rows * classes]
    assert [v.type.dtype.name for v in large] == ["uint16", "uint16"]  # logits and gradient in bfloat16
    assert program.readers[large[0]] == [loss]
    places = plan_memory(program).places
    assert places[large[0]] == places[large[1]]  # the gradient has the memory of the logits


def test_the_bytes_of_a_member_do_not_depend_on_the_number_of_members(host: Host) -> None:
    target = TARGET._replace(by_member=True)
    own = Host(host.folder, host.compiled, target)
    x, labels = np.random.default_rng(0).normal(size=(3, 5, 1300)), np.arange(5)

    def member(x: Any) -> Any:
        return ad.value_and_grad(lambda x: ops.cross_entropy(x, labels))(x)[1]

    def gradients(x: np.ndarray) -> np.ndarray:
        improve = (passes.by_member, *passes.SIMPLIFY, *gpu_fusions(target))
        program = stage(per_member(member), improve).program(ad.array(x))
        known: dict[Any, Any] = {program.inputs[0]: x} | {v: c.numpy() for v, c in program.constants.items()}
        (kernel,) = long_rows(program)
        for e in program.equations[: program.equations.index(kernel)]:
            known |= zip(e.outputs, evaluate(body_of(e), [ad.array(known[v]) for v in e.inputs]), strict=True)
        arrays = [np.asarray(known[v]) for v in kernel.inputs]
        return own.computed(kernel, None, arrays)[kernel.outputs.index(program.outputs[0])]

    together = gradients(x)
    np.testing.assert_allclose(together, [member(ad.array(each)).numpy() for each in x], rtol=1e-9, atol=1e-15)
    assert together[2:].tobytes() == gradients(x[2:]).tobytes()


def test_few_rows_and_very_long_ones_are_left_to_other_kernels() -> None:
    def f(x: Any) -> Any:
        return ops.log_softmax(x, -1), ops.argmax(x, axis=-1)

    for shape in ((H200.multiprocessors - 1, 5000), (H200.multiprocessors, 2 * MAX_LENGTH)):
        assert not long_rows(for_gpu(stage(f).program(Shaped(*shape))))
    assert long_rows(for_gpu(stage(f).program(Shaped(H200.multiprocessors, 5000))))
