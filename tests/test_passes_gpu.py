"""Passes for GPUs: which equations share a launch."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from program_samples import ON_GPU, bfloat16_gradients, bodies, everywhere, for_gpu, names

import adtrain as ad
from adtrain import config, ops, passes
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.horizontal import MAX_K, MAX_POINTERS, WAVES
from adtrain.backends.cuda.forms.weight_gradients import fuse_recurrent_gradients
from adtrain.core.kernel import Target
from adtrain.core.program import Equation, Program, Variable, label
from adtrain.core.staging import stage
from adtrain.lowering.cuda.gemm.narrow import narrow_products
from adtrain.training.preparation import outline

SGD = "optimizer={sgd: {lr: 0.1, momentum: 0.9}}"


def step(name: str, *overrides: str) -> Program:
    """The step of a config, as a GPU runs it."""
    return outline(config.load(name, overrides)).step_program(passes=ON_GPU)


def launches(program: Program) -> list[Equation]:
    return [e for e in program.equations if e.name != "reshape"]


def members_of(equation: Equation) -> list[str]:
    return [e.name for e in equation.params["body"].equations]


@pytest.mark.parametrize("overrides", [(), (SGD,), ("optimizer={sgd: {lr: 0.1}}",)], ids=["adam", "momentum", "sgd"])
def test_a_step_of_three_linear_layers_is_six_launches(overrides: tuple[str, ...]) -> None:
    program = step("mlp", *overrides)
    gather, first, second, head, back, last = launches(program)
    assert gather.name == "gather"
    assert "product" in members_of(first)
    assert members_of(first).count("one_block") >= 1  # the labels, and the schedule
    assert label(second) == "matmul+add+relu"
    assert head.name == "row_fused"
    assert members_of(head).count("matmul") == 2  # the logits, and the gradient of their input
    assert label(back) == "matmul+less+where"
    assert members_of(last).count("product") == 3
    assert {"product", "one_block"} <= set(members_of(last))
    updated = [v for v in program.outputs if v.type.shape and v.size > 1]
    assert set(updated) <= passes.plan_memory(program).in_place.keys()


@pytest.mark.parametrize(("name", "most"), [("lenet5", 18), ("cnn", 14)])
def test_a_step_of_a_convolutional_network_has_few_launches(name: str, most: int) -> None:
    program = step(name)
    assert len(launches(program)) <= most
    assert [e.name for e in launches(program)].count("row_fused") == 1


def test_bias_activation_and_mask_are_the_epilogue_of_a_convolution() -> None:
    program = step("cnn")
    fused = [label(e) for e in launches(program) if e.name == "convolution"]
    assert fused == ["conv2d+add+relu", "max_pool2d_put+conv2d_input_grad+less+where"]
    assert not any(e.name in ("conv2d", "conv2d_input_grad", "loops") for e in launches(program))


def test_a_reader_by_image_rows_is_no_epilogue_of_a_convolution() -> None:
    def f(x: Any, w: Any, rows: Any) -> Any:
        return ops.relu(ops.conv2d(x, w, padding=1) + rows)

    x, w, rows = (ad.core.array.array(np.ones(shape, np.float32)) for shape in ((1, 2, 5, 6), (3, 2, 3, 3), (5, 1)))
    program = stage(f, ON_GPU).program(x, w, rows)
    assert [e.name for e in program.equations] == ["conv2d", "loops"]


@pytest.mark.parametrize("overrides", [(), ("data.augment=[mixup]",), ("data.augment=[affine: 10, noise, cutout]",)])
def test_a_body_has_the_inputs_of_its_equation(overrides: tuple[str, ...]) -> None:
    fused = [e for e in everywhere(step("mlp", *overrides)) if e.form]
    assert fused
    for e in fused:
        assert e.params["body"].inputs == e.inputs
        assert e.params["body"].outputs == e.outputs


def test_each_device_has_its_own_passes() -> None:
    def moved(program: Program, device: str) -> Program:
        computed = [v for e in program.equations for v in e.outputs]
        of = {v: Variable(v.type, device) for v in (*program.inputs, *computed)}
        equations = [
            Equation(e.primitive, tuple(of[v] for v in e.inputs), e.params, tuple(of[v] for v in e.outputs))
            for e in program.equations
        ]
        inputs, outputs = (tuple(of[v] for v in vs) for vs in (program.inputs, program.outputs))
        return Program(inputs, {}, tuple(equations), outputs)

    program = stage(lambda x: ops.softmax(ops.softmax(x, 1) * x, 1)).program(np.ones((9, 3)))
    assert names(passes.fuse(program)) == ["batchwise"]
    assert names(for_gpu(moved(program, "gpu"))) == ["one_block"]
    batched = stage(lambda x: ops.relu(ops.matmul(x, x))).program(np.ones((5, 64, 64)))
    assert names(passes.fuse(batched)) == ["product"]
    assert names(for_gpu(moved(batched, "gpu"))) == ["product"]


def loss_between_products(rows: int, features: int) -> Program:
    def f(x: Any, w: Any, labels: Any) -> Any:
        with ad.core.trace.scope("loss"):
            value, ct = ad.value_and_grad(ops.cross_entropy)(ops.matmul(x, w), labels)
        return value, ops.matmul(ct, w, transpose_b=True)

    given = np.ones((rows, features)), np.ones((features, 10)), np.arange(rows) % 10
    return stage(f, ON_GPU).program(*given)


def test_small_equations_between_wide_products_are_one_block() -> None:
    first, *others = launches(loss_between_products(64, 1000))
    assert first.name == "horizontal"  # equations on labels share the first product's launch
    assert sorted(e.name for e in others) == ["matmul", "one_block"]


def test_narrow_products_and_the_equations_between_are_row_fused() -> None:
    for rows in (64, 7499, 7500):
        (body,) = bodies(loss_between_products(rows, 32), "row_fused")
        assert body.count("matmul") == 2
        assert {"log_softmax", "take_along_axis"} <= set(body)


def test_a_value_that_is_read_whole_is_not_row_fused() -> None:
    def f(x: Any, w: Any) -> Any:
        y = ops.softmax(ops.matmul(x, w), 1)
        return y, ops.matmul(y, ops.softmax(y, 1), transpose_b=True)

    program = stage(f, ON_GPU).program(np.ones((64, 16)), np.ones((16, 10)))
    assert [body.count("matmul") for body in bodies(program, "row_fused")] == [1]


def test_a_large_equation_is_not_in_a_one_block_equation() -> None:
    def f(x: Any) -> Any:
        return ops.softmax(ops.softmax(x, 1), 0)

    assert names(stage(f, ON_GPU).program(np.ones((100, 50)))) == ["one_block"]
    assert names(stage(f, ON_GPU).program(np.ones((1000, 500)))) == ["softmax", "softmax"]


def test_a_one_block_equation_outputs_values_that_others_read_through_a_reshape() -> None:
    def f(x: Any, w: Any) -> Any:
        flat = ops.reshape(ops.softmax(x, 1), (30,))
        return flat, ops.matmul(ops.reshape(flat, (1, 30)), w), ops.cumsum(ops.reshape(flat, (3, 10)) * 2.0, 1)

    given = np.arange(30.0).reshape(5, 6), np.ones((30, 4))
    program = stage(f, ON_GPU).program(*given)
    assert bodies(program, "one_block") == [["softmax", "reshape", "mul"]]
    for x, y in zip(stage(f, ON_GPU)(*given), f(*given), strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy())


def test_the_mask_before_a_flatten_is_the_epilogue_of_the_flat_gradients_product() -> None:
    def f(ct: Any, w: Any, x: Any) -> Any:
        return ops.where(ops.less(0.0, x), ops.reshape(ops.matmul(ct, w), (9, 8, 5, 5)), 0.0)

    rng = np.random.default_rng(0)
    given = rng.normal(size=(9, 30)), rng.normal(size=(30, 200)), rng.normal(size=(9, 8, 5, 5))
    program = stage(f, ON_GPU).program(*given)
    assert [label(e) for e in launches(program)] == ["matmul+less+where"]
    np.testing.assert_array_equal(stage(f, ON_GPU)(*given).numpy(), f(*given).numpy())


ROWS = np.arange(3000) % 7


def test_a_loop_gathers_the_rows_that_it_uses() -> None:
    def f(table: Any, rows: Any) -> Any:
        return ops.embedding(rows, table) * 2.0 + 1.0

    program = stage(f, ON_GPU).program(np.ones((7, 50)), ROWS)
    assert bodies(program, "gather") == [["take", "loops"]]
    assert names(program) == ["gather"]


@pytest.mark.parametrize("shared", [True, False], ids=["needed by others", "along another axis"])
def test_gathers_with_other_readers_or_along_another_axis_are_not_fused(shared: bool) -> None:
    def f(table: Any, rows: Any) -> Any:
        found = ops.embedding(rows, table) if shared else ops.take(table, rows, 1)
        return (found * 2.0, found) if shared else (found * 2.0,)

    program = stage(f, ON_GPU).program(np.ones((7, 50)), ROWS)
    assert "gather" not in names(program)


def gradients(k: int, count: int = 2, target: Target = H200) -> Program:
    """Independent products of k x 64 matrices, whose results are updates."""

    def f(*xs: Any) -> list[Any]:
        return [ops.matmul(x, x, transpose_a=True) * 0.1 + 1.0 for x in xs]

    return for_gpu(stage(f).program(*[np.ones((k, 64), np.float32) for _ in range(count)]), target)


def test_products_that_no_equation_reads_share_a_launch_unless_k_is_long() -> None:
    assert bodies(gradients(MAX_K), "horizontal") == [["product", "product"]]
    assert names(gradients(MAX_K + 1)) == ["product", "product"]


def test_a_shared_launch_has_at_most_a_few_waves_of_blocks() -> None:
    small = H200._replace(multiprocessors=1)
    assert bodies(gradients(8, 5, small), "horizontal") == [["product"] * WAVES, ["product"] * 2]


def test_products_of_different_dtypes_do_not_share_a_launch() -> None:
    def f(x: Any, y: Any) -> Any:
        return ops.matmul(x, x), ops.matmul(y, y)

    assert names(stage(f, ON_GPU).program(np.ones((9, 9), np.float32), np.ones((9, 9)))) == ["matmul", "matmul"]


def test_a_shared_launch_does_not_exceed_the_limit_of_arguments() -> None:
    def f(xs: Any) -> Any:
        return [x * 2.0 for x in xs]

    program = stage(f, ON_GPU).program([np.ones((4, 5)) for _ in range(600)])
    assert len(program.equations) == 3
    assert all(len(e.inputs) + len(e.outputs) <= MAX_POINTERS for e in program.equations)


def recurrent_gradients(op: str, precision: str, count: int, *xs: Any) -> Any:
    """The gradients of the first `count` arguments."""

    def loss(*xs: Any) -> Any:
        return ops.sum(ops.sin(getattr(ops, op)(*xs)[0]))

    return ops.matmul_precision(precision)(ad.grad(loss, range(count)))(*xs)


@pytest.mark.parametrize(
    ("op", "hidden", "precision", "count"),
    [
        ("lstm", 384, "full", 5),
        ("lstm", 384, "full", 3),
        ("lstm", 384, "tf32", 5),
        ("lstm", 128, "full", 5),
        ("gru", 512, "full", 5),
        ("gru", 512, "full", 4),
        ("gru", 512, "full", 3),
    ],
)
def test_a_large_recurrent_gradient_computes_those_of_weight_and_biases(
    op: str, hidden: int, precision: str, count: int
) -> None:
    """In any precision. Small networks are faster in clusters."""
    rng = np.random.default_rng(0)
    sums = {"lstm": 4, "gru": 3}[op] * hidden
    shapes = (3, 2, 5), (sums, 5), (sums, hidden), (sums,), (sums,)
    arrays = [rng.standard_normal(shape, np.float32) / 8 for shape in shapes]
    gradients = partial(recurrent_gradients, op, precision, count)
    traced = stage(gradients, passes.SIMPLIFY).program(*map(ad.array, arrays))
    fused = fuse_recurrent_gradients(traced, H200)
    joined = hidden > 128
    assert [name for name in names(fused) if "_grad" in name] == [f"{op}_weight_grad" if joined else f"{op}_grad"]
    assert names(traced).count("matmul") - names(fused).count("matmul") == joined
    assert "sum" not in names(fused) or not joined
    for found, expected in zip(evaluated(fused, arrays), evaluated(traced, arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def precisions(*overrides: str) -> dict[str, set[str]]:
    """The precisions of each primitive in the step of `cnn` at batch 1024."""
    program = step("cnn", "data.batch_size=1024", *overrides)
    found: dict[str, set[str]] = {}
    for e in everywhere(program):
        if precision := e.kernel_params.get("precision"):
            found.setdefault(e.name, set()).add(precision)
    return found


def test_products_round_only_where_that_saves_more_than_a_launch() -> None:
    found = precisions("training.precision=tf32")
    assert found["matmul"] == {"tf32", "full"}  # the large linear layer, and the one that is part of the loss head
    assert found["conv2d_weight_grad_sum"] == {"full"}  # direct convolution: rounding takes time
    assert found["conv2d_weight_grad_pooled_sum"] == {"tf32"}
    assert set().union(*precisions().values()) == {"full"}


@pytest.mark.parametrize("name", ["cnn", pytest.param("vit", marks=pytest.mark.exhaustive)])
def test_a_rounded_step_has_no_more_launches_than_one_in_float32(name: str) -> None:
    full, rounded = (launches(step(name, f"training.precision={x}")) for x in ("float32", "tf32"))
    assert len(rounded) == len(full)


@pytest.mark.parametrize("columns", [640, 636])
def test_products_in_bfloat16_store_activations_and_gradients_in_bfloat16(columns: int) -> None:
    """The results are those of products of rounded operands, up to a rounding of what is stored.

    Rows of 640 are operands, which are rounded anyway; only the gradient of the bias sums rounded numbers. Rows of 636
    are padded, except those along K. The slice without padding is stored as bfloat16.
    """
    rng = np.random.default_rng(0)
    shapes = (1024, 512), (512, 768), (768, columns), (768,)
    arrays = [rng.standard_normal(shape, np.float32) / 8 for shape in shapes]

    traced = stage(bfloat16_gradients, passes.SIMPLIFY).program(*map(ad.array, arrays))
    fused = for_gpu(traced)
    results = dict.fromkeys(fused.outputs)
    stored = {e.outputs[0].type for e in launches(fused) if e.outputs[0] not in results}
    if columns == 640:
        assert {str(t.dtype) for t in stored if len(t.shape) == 2} == {"uint16"}
    assert {"pad", "slice"} <= set(names(fused)) or columns == 640
    for found, expected in zip(evaluated(fused, arrays), evaluated(traced, arrays), strict=True):
        assert np.linalg.norm(found - expected) <= (1e-3 if columns == 640 else 2.0**-8) * np.linalg.norm(expected)


def evaluated(program: Program, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The results, computed by the NumPy references."""
    known = dict(zip(program.inputs, arrays, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    for e in program.equations:
        found = e.primitive.reference(*(known[v] for v in e.inputs), **e.params)
        known.update(zip(e.outputs, (found,) if len(e.outputs) == 1 else found, strict=True))
    return [known[v] for v in program.outputs]


@pytest.mark.parametrize("precision", ["full", "tf32"])
def test_threads_compute_narrow_products_of_many_rows_with_what_reads_them(precision: str) -> None:
    def f(x: Any, w: Any, y: Any) -> Any:
        with ops.matmul_precision(precision):
            error = ops.matmul(x, w, transpose_b=True) - y
            return error, ops.where(x > 0, ops.matmul(error, w), 0.0)

    given = [np.ones(shape, np.float32) for shape in ((1 << 15, 64), (3, 64), (1 << 15, 3))]
    assert names(for_gpu(stage(f, ()).program(*given))) == ["thread_items"]


def test_narrow_weight_gradients_of_one_launch_take_one_block_on_each_multiprocessor() -> None:
    kernel = narrow_products(H200, [(768, 8), (8, 768), (3072, 8), (8, 2304), (768, 8), (8, 768)], 8192, (True, True))
    assert kernel is not None
    assert kernel.launches[0].blocks == H200.multiprocessors
    assert narrow_products(H200, [(768, 8), (768, 16)], 8192, (True, True)) is None
