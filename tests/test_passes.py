"""Passes on small examples: what each removes, and what it fuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from program_samples import ALL, bodies, everywhere, names, training_program

import adtrain as ad
from adtrain import ops, passes
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.core.program import LOOPS, Program, fuse, label
from adtrain.core.staging import stage
from adtrain.core.trace import phase
from adtrain.passes.fusion import by_element
from adtrain.passes.products import add_before_products, merge_added_products
from adtrain.passes.recompute import recompute

X = np.linspace(0.5, 2, 6).reshape(2, 3)


def test_dead_code_is_removed() -> None:
    def f(x: Any) -> Any:
        ops.sin(ops.cos(x))
        return ops.exp(ops.tanh(x))

    assert names(stage(f).program(X)) == ["cos", "sin", "tanh", "exp"]
    assert names(stage(f, [passes.remove_dead_code]).program(X)) == ["tanh", "exp"]


def test_equal_equations_are_computed_once() -> None:
    def f(x: Any) -> Any:
        return ops.sin(x * 2.0) + ops.sin(x * 2.0) * ops.sum(x, 0) + ops.sum(x, 1, keepdims=True)

    program = stage(f, [passes.merge_common_subexpressions]).program(X)
    assert sorted(names(program)).count("sin") == 1
    assert names(program).count("sum") == 2  # sums over different axes
    assert len(program.constants) == 1


def test_gradients_of_batch_norm_by_images_weight_and_bias_share_two_sums() -> None:
    def gradients(x: Any, w: Any, b: Any, ct: Any) -> Any:
        _, pullback = ad.vjp(lambda x, w, b: ops.batch_norm(x, np.zeros(3), np.ones(3), w, b)[0], x, w, b)
        return pullback(ct)

    images, ct = np.random.default_rng(0).normal(size=(2, 4, 3, 5, 5))
    args = images, np.arange(1.0, 4), np.ones(3), ct
    assert names(stage(gradients, passes.SIMPLIFY).program(*args)).count("sum") == 2


def test_positive_and_negative_zero_are_not_merged() -> None:
    def f(x: Any) -> Any:
        return x * ops.full((2, 3), 0.0, np.float64), x * ops.full((2, 3), -0.0, np.float64)

    for a, b in zip(stage(f, passes.SIMPLIFY)(X), f(X), strict=True):
        np.testing.assert_array_equal(np.signbit(a.numpy()), np.signbit(b.numpy()))


def test_products_read_and_write_transposed_matrices_in_place() -> None:
    a, b, c = (np.random.default_rng(i).normal(size=shape) for i, shape in enumerate([(3, 4, 5), (3, 4, 6), (3, 6, 5)]))

    def f(a: Any, b: Any, c: Any) -> Any:
        product = ops.transpose(ops.transpose(a, (0, 2, 1)) @ b, (0, 2, 1))  # (3, 6, 5)
        return product + c, product @ ops.transpose(c, (0, 2, 1))

    program = stage(f, ALL).program(a, b, c)
    assert "transpose" not in {e.primitive.name for e in everywhere(program)}
    expected = (x := np.swapaxes(np.swapaxes(a, 1, 2) @ b, 1, 2)) + c, x @ np.swapaxes(c, 1, 2)
    for found, wanted in zip(NumpyProgram(program).run([a, b, c])[0], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-13)


@pytest.mark.parametrize("transpose", [False, True])
def test_added_products_of_few_terms_become_one_product(transpose: bool) -> None:
    def f(bias: Any, *factors: Any) -> Any:
        products = [ops.matmul(a, b, transpose_a=transpose) for a, b in zip(factors[::2], factors[1::2], strict=True)]
        return products[0] + (bias + products[1]) + products[2]

    rng = np.random.default_rng(0)
    shapes = [shape for k in (1, 2, 3) for shape in ((k, 40) if transpose else (40, k), (k, 30))]
    args = [rng.normal(size=shape) for shape in ((40, 30), *shapes)]
    program = stage(f, [merge_added_products]).program(*args)
    assert names(program).count("matmul") == 1
    (found,) = NumpyProgram(program).run(args)[0]
    np.testing.assert_allclose(found, f(*args).numpy(), rtol=1e-13, atol=1e-14)


def test_products_of_many_terms_or_with_other_readers_are_not_merged() -> None:
    def of_many_terms(a: Any, b: Any) -> Any:
        return a @ b + b @ a

    def read_twice(a: Any, b: Any) -> Any:
        product = ops.matmul(a[:, :1], b[:1])
        return ops.matmul(a[:, 1:2], b[1:2]) + product, product

    args = np.ones((30, 30)), np.ones((30, 30))
    for f in (of_many_terms, read_twice):
        assert names(stage(f, [merge_added_products]).program(*args)).count("matmul") == 2


def test_two_evaluations_of_a_network_share_the_backward_pass() -> None:
    def loss(v: Any, w: Any, x: Any) -> Any:
        def u(x: Any) -> Any:
            return ops.matmul(ops.tanh(ops.matmul(ops.tanh(ops.matmul(x, v)), w)), w)

        slope = ad.jvp(u, (x,), (ops.ones_like(x),))[1]
        return ops.sum(ops.square(u(x))) + ops.sum(ops.square(slope))

    rng = np.random.default_rng(0)
    args = [rng.normal(size=shape) for shape in ((4, 5), (5, 5), (7, 4))]
    gradient = ad.grad(loss, (0, 1))
    separate = stage(gradient, passes.SIMPLIFY).program(*args)
    program = stage(gradient, [*passes.SIMPLIFY, add_before_products]).program(*args)
    assert names(separate).count("matmul") > names(program).count("matmul")
    for found, expected in zip(NumpyProgram(program).run(args)[0], NumpyProgram(separate).run(args)[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_a_sum_may_have_more_terms_than_python_can_recurse() -> None:
    def f(x: Any) -> Any:
        total = ops.sin(x)
        for i in range(1, 1200):
            total = total + ops.sin(x * float(i))
        return total

    program = stage(f).program(X)
    assert str(add_before_products(program)) == str(program)


def test_sums_to_a_number_reshapes_and_broadcasts_are_added_as_they_are() -> None:
    def f(a: Any, b: Any) -> Any:
        return ops.sum(a * a) + ops.sum(b * b), a.reshape(6) + b.reshape(6), a[0] + ops.ones((4, 3)) + b[0]

    program = stage(f, passes.SIMPLIFY).program(np.ones((2, 3)), np.zeros((2, 3)))
    assert str(add_before_products(program)) == str(program)


def test_a_transpose_of_other_axes_or_of_a_product_that_is_read_elsewhere_stays() -> None:
    def other_axes(a: Any) -> Any:
        return ops.transpose(a, (2, 1, 0)) @ a

    def read_twice(a: Any) -> Any:
        product = a @ a
        return product, ops.transpose(product, (0, 2, 1))

    for f in (other_axes, read_twice):
        assert "transpose" in names(stage(f, ALL).program(np.ones((3, 3, 3))))


def test_equations_on_constants_are_folded() -> None:
    table = np.arange(3.0)

    def f(x: Any) -> Any:
        return x + ops.exp(ops.sin(table) * 2.0)

    program = stage(f, passes.SIMPLIFY).program(X)
    assert names(program) == ["add"]
    np.testing.assert_array_equal(stage(f, passes.SIMPLIFY)(X).numpy(), f(X).numpy())


def test_large_results_are_not_folded() -> None:
    program = stage(lambda x: x + ops.exp(np.zeros((100, 100))).sum(), passes.SIMPLIFY).program(X)
    assert "exp" in names(program)


def test_consecutive_reshapes_are_one_and_identity_reshapes_are_removed() -> None:
    def f(x: Any) -> Any:
        return ops.exp(ops.reshape(ops.reshape(x, (6,)), (2, 3))), ops.reshape(ops.reshape(x, (1, 6)), (3, 2))

    assert names(stage(f).program(X)).count("reshape") == 4
    program = stage(f, [passes.simplify_reshapes, passes.remove_dead_code]).program(X)
    assert names(program) == ["exp", "reshape"]
    assert program.equations[1].inputs == program.inputs


def test_elementwise_equations_of_one_shape_are_one_loop_without_stored_broadcasts() -> None:
    def f(x: Any, row: Any) -> Any:
        centred = x - ops.broadcast_to(row, (2, 3))
        return ops.tanh(centred) * ops.broadcast_to(row, (2, 3)), ops.exp(row)

    program = stage(f, [passes.fuse_loops]).program(X, X[0])
    assert names(program) == ["loops", "exp"]
    assert label(program.equations[0]) == "sub+tanh+mul"
    assert set(program.equations[0].inputs) == set(program.inputs)
    assert len(program.equations[0].outputs) == 1


def test_a_broadcast_is_stored_only_for_readers_that_need_it_in_memory() -> None:
    def f(row: Any) -> Any:
        wide = ops.broadcast_to(row, (2, 3))
        return ops.exp(wide), ops.cumsum(wide)

    assert sorted(names(stage(f, [passes.fuse_loops]).program(X[0]))) == ["broadcast_to", "cumsum", "loops"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_in_a_training_step_no_loop_reads_a_stored_broadcast(optimizer: str) -> None:
    program = training_program(optimizer, improve=ALL)
    stored = [e for body in (program, *fused_bodies(program)) for e in body.equations]
    spread = {v for e in stored if e.name in ("broadcast_to", "full") for v in e.outputs}
    assert spread
    assert [e for e in stored if by_element(e) if not spread.isdisjoint(e.inputs)] == []


def fused_bodies(program: Program) -> list[Program]:
    """The bodies of fused equations, except loop nests."""
    return [e.params["body"] for e in program.equations if e.form not in ("", LOOPS)]


def test_loops_of_different_phases_are_not_fused() -> None:
    def f(x: Any) -> Any:
        y = ops.exp(x)
        with phase("update"):
            return y * 2.0

    assert names(stage(f, [passes.fuse_loops]).program(X)) == ["exp", "mul"]


def test_a_group_whose_result_returns_through_another_equation_is_not_merged() -> None:
    def f(x: Any) -> Any:
        y = ops.exp(x)
        return y * ops.broadcast_to(ops.sum(y, 0), (2, 3))

    program = stage(f, [passes.fuse_loops]).program(X)
    assert names(program) == ["exp", "sum", "loops"]
    np.testing.assert_array_equal(stage(f, ALL)(X).numpy(), f(X).numpy())


def test_bias_and_activation_are_the_epilogue_of_the_product() -> None:
    def f(x: Any, w: Any, b: Any) -> Any:
        return ops.relu(ops.matmul(x, w, transpose_b=True) + b)

    program = stage(f, ALL).program(X, np.ones((4, 3)), np.ones(4))
    assert names(program) == ["product"]
    assert label(program.equations[0]) == "matmul+add+relu"


def test_all_loops_of_a_phase_that_read_a_product_are_its_epilogue() -> None:
    def f(x: Any, w: Any, a: Any) -> Any:
        y = x @ w
        z = y + a, ops.relu(y)
        with phase("update"):
            return *z, y * 2.0

    program = stage(f, ALL).program(X, X.T.copy(), np.ones((2, 2)))
    assert [label(e) for e in program.equations] == ["matmul+add+relu", "mul"]


def test_the_derivative_of_gelu_is_computed_with_it_and_kept_instead_of_its_argument() -> None:
    def step(w: Any, b: Any) -> Any:
        return ad.grad(lambda b: ops.sum(ops.square(ops.gelu(ops.matmul(X, w) + b))))(b)

    first, *_ = stage(step, ALL).program(np.ones((3, 4)), np.ones(4)).equations
    assert label(first) == "matmul+add+gelu+gelu_derivative"
    stored = first.params["body"].outputs
    (fused,) = [e for e in first.params["body"].equations if e.form == LOOPS]
    assert fused.outputs == stored
    assert [e.name for e in fused.params["body"].equations][-2:] == ["gelu", "gelu_derivative"]
    assert len(stored) == 2


def test_a_product_read_as_a_whole_has_no_epilogue() -> None:
    square = np.ones((3, 3))
    rows = stage(lambda x: x + ops.broadcast_to(ops.matmul(x[:1], x), (3, 3)), ALL).program(square)
    assert "product" not in names(rows)
    both = stage(lambda x: ops.exp(ops.matmul(x, x)) + ops.matmul(ops.tanh(x), x), ALL).program(square)
    assert sorted(names(both)) == ["matmul", "product", "tanh"]


def test_a_weight_is_updated_in_the_product_that_computes_its_gradient() -> None:
    def step(w: Any, x: Any) -> Any:
        gradient = ad.grad(lambda w: ops.sum(ops.square(ops.matmul(x, w))))(w)
        with phase("update"):
            return w - 0.1 * gradient

    program = stage(step, ALL, donate=(0,)).program(np.ones((3, 4)), X)
    assert [label(e) for e in program.equations if e.name == "product"][-1] == "matmul+update"
    assert program.inputs[0] in program.equations[-1].inputs
    assert program.equations[-1].outputs == program.outputs


def test_softmax_cross_entropy_and_their_gradient_are_one_equation() -> None:
    def f(logits: Any, labels: Any) -> Any:
        with ad.core.trace.scope("loss"):
            return ad.value_and_grad(ops.cross_entropy)(logits, labels)

    program = stage(f, ALL).program(np.ones((9, 5)), np.arange(9) % 5)
    (fused,) = (e for e in program.equations if e.name == "batchwise")
    kinds = label(fused).split("+")
    assert {"log_softmax", "take_along_axis", "sum", "scatter_along_axis", "exp", "mul", "sub"} <= set(kinds)
    others = [e for e in program.equations if e is not fused]
    assert all(v.size == 1 for e in others for v in (*e.inputs, *e.outputs))  # only the mean is left


def test_convolution_bias_activation_and_pooling_are_one_equation() -> None:
    def f(x: Any, w: Any, b: Any) -> Any:
        return ops.max_pool2d(ops.relu(ops.conv2d(x, w, b)), 2)

    shapes = (1, 6, 6), (4, 1, 3, 3), (4,)
    w, b = np.ones(shapes[1]), np.ones(shapes[2])
    assert bodies(stage(f, ALL).program(np.ones((8, *shapes[0])), w, b), "batchwise") == [
        ["conv2d", "loops", "max_pool2d"]
    ]
    assert bodies(stage(f, ALL).program(np.ones((7, *shapes[0])), w, b), "batchwise") == []  # too few items


def test_products_of_many_rows_with_small_matrices_and_their_gradients_are_one_equation() -> None:
    def loss(w: Any, v: Any, x: Any) -> Any:
        with ad.core.trace.scope("layer"):  # whose equations have a phase, forward or backward
            slope = ad.grad(lambda x: ops.sum(ops.tanh(x @ w) @ v))(x)
        return ops.mean(ops.square(slope))

    w, v = np.ones((2, 20)), np.ones((20, 1))

    def rows_in_memory(count: int) -> list[str]:
        program = stage(ad.value_and_grad(loss, (0, 1)), ALL).program(w, v, np.ones((count, 2)))
        return [label(e) for e in program.equations for x in e.outputs if x.type.shape[:1] == (count,)]

    assert rows_in_memory(256) == []
    assert len(rows_in_memory(255)) > 3  # too few rows


def test_rows_of_sequences_and_whole_sequences_are_one_equation() -> None:
    def f(x: Any, w: Any) -> Any:
        return ops.mean(ops.softmax(ops.tanh(x @ w), 1), 1)

    def kinds(sequences: int) -> list[str]:
        return names(stage(f, ALL).program(np.ones((sequences, 4, 4)), np.ones((4, 5))))

    assert set(kinds(64)) <= {"batchwise", "reshape"}
    assert kinds(64).count("batchwise") == 1
    assert "product" in kinds(63)  # too few sequences and too few rows


def test_products_of_many_small_matrices_are_part_of_a_batchwise_equation() -> None:
    def kinds(matrices: int) -> list[str]:
        return names(stage(lambda a: ops.tanh(ops.tanh(a) @ a) @ a, ALL).program(np.ones((matrices, 4, 4))))

    assert kinds(256) == ["batchwise"]
    assert "product" in kinds(255)  # too few matrices


def test_products_with_large_matrices_are_no_part_of_a_batchwise_equation() -> None:
    program = stage(lambda x, w: ops.softmax(ops.tanh(x) @ w, 1), ALL).program(np.ones((2048, 64)), np.ones((64, 64)))
    assert "matmul" in names(program)


def test_a_sum_over_the_items_ends_a_group() -> None:
    def f(x: Any) -> Any:
        y = ops.softmax(x, 1)
        return ops.softmax(y - ops.sum(y, 0), 1)

    program = stage(f, ALL).program(np.ones((8, 3)))
    assert bodies(program, "batchwise") == [["softmax", "sum"], ["loops", "softmax"]]


def two_kernels(x: Any, f: Any = ops.square) -> Any:
    """A value that two kernels read, because the second one needs a sum over the items that the first one computes."""
    y = f(x) * 3.0
    return ops.softmax(y, 1), ops.tanh(y + ops.sum(y, 0))


LARGE = np.linspace(0, 1, 2**18, dtype=np.float32).reshape(64, -1)


def test_a_large_value_that_is_cheap_is_computed_again_by_the_kernel_that_reads_it() -> None:
    program = stage(two_kernels, ALL).program(LARGE)
    assert [label(e) for e in program.equations] == ["square+mul+softmax+sum", "square+mul+add+tanh"]
    assert [v.size for v in program.equations[0].outputs] == [LARGE.size, LARGE.shape[1]]


@pytest.mark.parametrize(("x", "f"), [(LARGE[:8], ops.square), (LARGE, ops.exp)], ids=["small", "exp"])
def test_a_value_that_is_small_or_needs_a_function_is_kept(x: np.ndarray, f: Any) -> None:
    program = stage(partial(two_kernels, f=f), ALL).program(x)
    assert [v.size for v in program.equations[0].outputs] == [x.size, x.size, x.shape[1]]


def test_a_reshape_of_another_result_of_its_kernel_is_kept() -> None:
    def f(x: Any, y: Any) -> Any:
        large = x * 2.0
        return large, ops.reshape(large, y.shape) * y

    program = stage(f).program(np.zeros((64, 8192), np.float32), np.zeros((64 * 8192,), np.float32))
    scaled, reshaped, product = program.equations
    kernel = fuse("batchwise", [scaled, reshaped], (*scaled.outputs, *reshaped.outputs))
    given = replace(program, equations=(kernel, product))
    assert recompute(given, sources=["batchwise"], readers=[]).equations == given.equations


def test_a_value_whose_computation_reads_more_bytes_is_kept() -> None:
    def f(x: Any, a: Any, b: Any) -> Any:
        return two_kernels(x, lambda x: x + a + b)

    program = stage(f, ALL).program(LARGE, LARGE, LARGE)
    assert [v.size for v in program.equations[0].outputs] == [LARGE.size, LARGE.size, LARGE.shape[1]]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_updates_of_many_parameters_are_one_equation(optimizer: str) -> None:
    program = training_program(optimizer, improve=ALL)
    (together,) = (e for e in program.equations if e.name == "horizontal")
    assert together.phase == "update"
    assert len({v.type.shape for v in together.outputs}) == 6  # two kernels, four biases
    linear = [e for e in program.equations if e.name == "product" and "optimizer" in e.scope]
    assert [e.outputs[0].type.shape for e in linear] == [(3, 17), (17, 72)]
    alone = [e for e in program.equations if e.phase == "update" and e not in (together, *linear)]
    assert all(v.size == 1 for e in alone for v in e.outputs)  # the learning rate and the step count


def test_updates_that_depend_on_one_another_are_not_fused() -> None:
    def f(x: Any, y: Any) -> Any:
        with phase("update"):
            x = x * 2.0 + 1.0
            return x, y * 2.0 + ops.broadcast_to(ops.sum(x), (4,))

    program = stage(f, ALL).program(X, np.ones(4))
    assert "horizontal" not in names(program)


def pooled_gradients(x: Any, w: Any, b: Any, stride: int = 2) -> Any:
    def loss(x: Any, w: Any, b: Any) -> Any:
        return ops.sum(ops.square(ops.max_pool2d(ops.relu(ops.conv2d(x, w, b)), 2, stride)))

    return ad.grad(loss, (0, 1, 2))(x, w, b)


POOLED = [np.random.default_rng(0).normal(size=shape) for shape in ((3, 2, 11, 11), (4, 2, 4, 4), (4,))]


@pytest.mark.parametrize("stride", [2, 1], ids=["apart", "overlapping"])
def test_the_mask_of_a_relu_before_pooling_is_applied_to_the_pooled_gradient(stride: int) -> None:
    f = partial(pooled_gradients, stride=stride)
    before, after = (stage(f, improve).program(*POOLED) for improve in (passes.SIMPLIFY, ALL))
    pooled = 4 if stride == 2 else 7

    def masks(program: Program) -> list[Any]:
        return [e.outputs[0].type.shape for e in everywhere(program) if e.name == "where"]

    assert masks(before) == [(3, 4, 8, 8)]
    assert masks(after) == [(3, 4, pooled, pooled)]
    for a, b in zip(stage(f, ALL)(*POOLED), f(*POOLED), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-12)


def test_other_masks_are_not_moved() -> None:
    def f(x: Any) -> Any:
        pooled, pullback = ad.vjp(lambda x: ops.max_pool2d(x, 2), x)
        (spread,) = pullback(pooled)
        return ops.where(ops.less(0.0, x * 2.0), spread, 0.0), ops.where(ops.less(0.0, x), spread, 1.0)

    x = POOLED[0]
    without_kernels = partial(passes.fuse_maxpool_gradients, has_kernel=lambda e: False, all_readers=False)
    assert str(stage(f, [*passes.SIMPLIFY, without_kernels]).program(x)) == str(stage(f, passes.SIMPLIFY).program(x))


def test_gradients_through_pooling_use_the_pooled_gradient() -> None:
    program = stage(pooled_gradients, ALL).program(*POOLED)
    found = {e.name: e for e in everywhere(program)}
    fused = [found[f"conv2d_{of}_grad_pooled"] for of in ("input", "weight")]
    spread = [e for e in everywhere(program) if e.name == "max_pool2d_put"]
    assert set(spread) == {e.params["body"].equations[0] for e in fused}  # no equation reads it in memory
    of_bias = [e for e in everywhere(program) if e.name == "sum" and e.outputs[0].type.shape == (4,)]
    assert [e.inputs[0].type.shape for e in of_bias] == [(3, 4, 4, 4)]


def test_a_spread_gradient_used_as_image_or_filter_is_not_replaced() -> None:
    """A pooled gradient is an image or a filter of a convolution here, which has no kernel for that."""
    x, w, _ = POOLED

    def of_weight(w: Any) -> Any:
        spread = ad.grad(lambda x: ops.sum(ops.square(ops.max_pool2d(x, 2))))(x)
        return ops.sum(ops.square(ops.conv2d(spread, w)))

    f = ad.grad(of_weight)
    assert "conv2d_weight_grad" in [e.name for e in everywhere(stage(f, ALL).program(w))]
    np.testing.assert_allclose(stage(f, ALL)(w).numpy(), f(w).numpy(), rtol=1e-12)


def test_readers_of_a_donated_array_come_before_its_overwriter() -> None:
    def f(x: Any, y: Any) -> Any:
        new = x + y
        return new, ops.cumsum(x), ops.sum(new)

    program = stage(f, [passes.readers_first], donate=(0,)).program(X, X)
    assert names(program) == ["cumsum", "add", "sum"]
    assert passes.plan_memory(program).in_place == {program.outputs[0]: program.inputs[0]}
    assert names(stage(f, [passes.readers_first]).program(X, X)) == ["add", "cumsum", "sum"]


def test_a_reader_that_depends_on_the_overwriter_stays_after_it() -> None:
    def f(x: Any) -> Any:
        new = ops.exp(x)
        return new, x * ops.sum(new)

    program = stage(f, [passes.readers_first], donate=(0,)).program(X)
    assert [name for name in names(program) if name in ("exp", "sum", "mul")] == ["exp", "sum", "mul"]
    assert passes.plan_memory(program).in_place == {}
