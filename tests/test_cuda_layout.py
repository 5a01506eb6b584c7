"""Repeated runs in the memory of a `Layout`, emulated in NumPy launch by launch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from program_samples import BATCH, ON_GPU, for_gpu, training
from test_cuda_steps_on_host import computed as by_evaluation

import adtrain as ad
from adtrain import config, ops, passes
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.batch_prefetch import prefetch_batch
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.runtime.layout import Layout, runs_per_graph
from adtrain.core import tree
from adtrain.core.array import Array, array
from adtrain.core.kernel import Target
from adtrain.core.program import HORIZONTAL, Equation, Program, Variable, primitive_names
from adtrain.core.staging import evaluate, stage
from adtrain.passes.plan_memory import stored_bytes
from adtrain.sweeps.members import groups_of, members_of
from adtrain.sweeps.session import step_arguments
from adtrain.sweeps.step import DONATED, sweep_step
from adtrain.training.preparation import outline

BATCHES, IMAGES = 8, 30
NETWORKS = ("linear", "convolutions")
COUNTS = pytest.mark.parametrize(
    "times", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2)), 3, BATCHES]
)
ALIGNED = 256
BY_MEMBER = H200._replace(by_member=True)


def data() -> tuple[Array, ...]:
    """Images, labels, and the rows of each batch."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (IMAGES, 1, 12, 12)).astype(np.uint8)
    return array(images), array(rng.integers(0, 3, IMAGES)), array(rng.integers(0, IMAGES, (BATCHES, BATCH)))


def linear(state: Any, x: Any, labels: Any) -> Any:
    """A step of one linear layer, with a schedule: its last launch, the update, reads the batch."""

    def loss(weight: Any) -> Any:
        return ops.cross_entropy(ops.matmul(ops.reshape(x, (BATCH, -1)), weight), labels)

    rate = state["rate"] * 0.9
    weight = state["weight"] - rate * ad.grad(loss)(state["weight"])
    return {"rate": rate, "step": state["step"] + 1, "weight": weight}


def step_on_data(network: str, ahead: bool = True, fused: bool = True) -> tuple[Program, list[np.ndarray]]:
    """A training step on the next batch of a data set, for a GPU, and its arguments.

    Args:
        network: "linear", or "convolutions", whose last launch does not read the batch.
        ahead: whether the next batch is known before the step has ended; otherwise it depends on the new weights.
    """
    state: Any
    if network == "linear":
        weight = np.random.default_rng(0).normal(size=(144, 3)).astype(np.float32)
        rate = array(np.asarray(0.1, np.float32))
        state, of = {"rate": rate, "step": array(np.asarray(0)), "weight": array(weight)}, lambda state: state
        step = linear
    else:
        train, state = training("sgd")
        of = lambda state: {"step": state[1]["step"], "weight": state[0]["0"]["weight"]}  # noqa: E731
        step = lambda state, x, labels: train(state, x, labels, None)[0]  # noqa: E731

    def on_data(state: Any, images: Any, labels: Any, order: Any) -> Any:
        at = of(state)["step"]
        if not ahead:
            at = at + ops.astype(ops.sum(of(state)["weight"]) * 0, "int64")
        rows = ops.take(order, at, 0)
        x = ops.astype(ops.take(images, rows, 0), "float32") * 0.01
        return step(state, x, ops.take(labels, rows, 0))

    args = (state, *data())
    program = stage(on_data, donate=(0,)).program(*args)
    return for_gpu(program) if fused else program, [x.numpy() for x in tree.flatten(args)[0]]


class Memory:
    """An emulated device memory, which holds NaN where nothing was written."""

    def __init__(self) -> None:
        self.bytes = np.full(1 << 22, 0xFF, np.uint8)
        self.end = 0

    def allocate(self, size: int) -> int:
        at, self.end = self.end, self.end + -(-max(size, 1) // ALIGNED) * ALIGNED
        assert self.end <= len(self.bytes)
        return at

    def at(self, address: int, v: Variable) -> np.ndarray:
        return self.bytes[address : address + stored_bytes(v)].view(v.type.dtype).reshape(v.stored.shape)


def computed(equation: Equation, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    if equation.members:
        return by_evaluation(equation, [*arrays])
    found = equation.primitive.reference(*arrays, **equation.params)
    return list(found) if isinstance(found, tuple) else [found]


def run(program: Program, args: Sequence[np.ndarray], times: int, target: Target = H200) -> list[np.ndarray]:
    """The results of ``times`` runs, as `CudaProgram` makes them."""
    layout, memory = Layout(program, Lowering(target)), Memory()

    def allocated(variables: Sequence[Variable]) -> list[int]:
        return [memory.allocate(stored_bytes(v)) for v in variables]

    addresses = [*allocated(layout.inputs), *allocated(layout.constants), *allocated(layout.outputs)]
    for v, address, x in zip(program.inputs, addresses, args, strict=False):
        memory.at(address, v)[...] = x
    for v, address in zip(layout.constants, addresses[len(layout.inputs) :], strict=False):
        memory.at(address, v)[...] = program.constants[v].numpy()
    base = memory.allocate(layout.arena_bytes)
    addresses += [base + byte for byte in layout.arena]
    inputs = addresses[: len(program.inputs)]
    for steps, swaps in layout.runs(times):
        for equation, operands, _ in steps:
            where = [addresses[i] + offset for i, offset in operands]
            read = len(equation.inputs)
            arrays = [memory.at(a, v).copy() for a, v in zip(where, equation.inputs, strict=False)]
            for a, v, x in zip(where[read:], equation.outputs, computed(equation, arrays), strict=True):
                if equation.name != "reshape":
                    memory.at(a, v)[...] = x
        for taken, made, _ in swaps:
            addresses[taken], addresses[made] = addresses[made], addresses[taken]
    if times % 2:
        for taken, made, size in layout.final_swaps:
            memory.bytes[addresses[made] :][:size] = memory.bytes[addresses[taken] :][:size]
    assert all(place.where == "input" for place in layout.results)
    return [memory.at(inputs[at], v) for (_, at, _), v in zip(layout.results, program.outputs, strict=True)]


@COUNTS
@pytest.mark.parametrize(
    ("network", "ahead"),
    [
        pytest.param(x, i % 2 == k, marks=pytest.mark.exhaustive if k else ())
        for i, x in enumerate(NETWORKS)
        for k in (0, 1)
    ],
)
def test_repeated_runs_compute_the_same_as_single_runs(network: str, ahead: bool, times: int) -> None:
    """Up to the last batch of the order; nothing is read after it."""
    program, args = step_on_data(network, ahead)
    expected = list(args)
    for _ in range(times):
        expected[: len(program.outputs)] = [x.numpy() for x in evaluate(program, [*map(array, expected)])]
    for found, x in zip(run(program, args, times), expected, strict=False):
        np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)


@pytest.fixture(params=["product", "loops"])
def bfloat16_step(monkeypatch: pytest.MonkeyPatch, request: Any) -> tuple[Program, list[np.ndarray]]:
    """A step whose products have bfloat16 operands in memory, as if they were large; and its arguments.

    The epilogue of a product updates the weight, or loops do, because the norm of the gradient divides it.
    """
    for name in ("product_precision", "forms.horizontal"):
        monkeypatch.setattr(import_module(f"adtrain.backends.cuda.{name}"), "MAX_FLOPS", 0)
    monkeypatch.setattr(import_module("adtrain.backends.cuda.forms.horizontal"), "ELEMENTS", 1)
    monkeypatch.setattr(import_module("adtrain.backends.cuda.forms.one_block"), "MAX_STEPS", 64)
    monkeypatch.setattr(import_module("adtrain.backends.cuda.product_precision"), "LAUNCH_CYCLES", -(10**9))
    rng = np.random.default_rng(0)
    x = array(rng.normal(size=(2200, 64)).astype(np.float32))

    def step(state: Any, x: Any) -> Any:
        def loss(weight: Any) -> Any:
            with ops.matmul_precision("bfloat16"):
                return ops.mean(ops.square(ops.matmul(x, weight)))

        gradient = ad.grad(loss)(state["weight"])
        with ad.core.trace.phase("update"):
            scale = 0.1 / ops.norm(gradient) if request.param == "loops" else 0.1
            return {"step": state["step"] + 1, "weight": state["weight"] - scale * gradient}

    state = {"step": array(np.asarray(0)), "weight": array(rng.normal(size=(64, 64)).astype(np.float32))}
    program = for_gpu(stage(step, donate=(0,)).program(state, x))
    return program, [v.numpy() for v in tree.flatten((state, x))[0]]


def test_the_update_of_a_weight_writes_the_copy_that_the_next_step_reads(bfloat16_step: Any) -> None:
    runs = prefetch_batch(bfloat16_step[0], H200)
    assert runs.steady is not None
    copied = runs.prologue[-1].outputs[0]
    (writer,) = [e for e in runs.steady.equations if runs.steady.outputs[-1] in e.outputs]
    assert runs.steady.inputs[-1] is copied
    assert runs.prologue[-1].inputs == (bfloat16_step[0].inputs[1],)  # the weight
    assert primitive_names(writer)[-1] == "to_bfloat16"


@pytest.mark.parametrize(("launches", "expected"), [(1, (10, 1)), (400, (10, 1)), (700, (4, 1)), (2001, (1,))])
def test_a_graph_has_up_to_ten_runs_with_up_to_4000_launches(launches: int, expected: Any) -> None:
    assert runs_per_graph(launches) == expected


@COUNTS
def test_repeated_steps_with_copies_of_weights_compute_the_same_bytes_as_single_steps(
    bfloat16_step: Any, times: int
) -> None:
    program, args = bfloat16_step
    expected = list(args)
    for _ in range(times):
        expected[: len(program.outputs)] = run(program, expected, 1)
    for found, x in zip(run(program, args, times), expected, strict=False):
        np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("order", ["own", "shared"])
def test_repeated_steps_of_a_sweep_compute_the_same_as_single_steps(order: str) -> None:
    program, args = sweep_step_on_data(order)
    expected = list(args)
    for _ in range(3):
        expected[: len(program.outputs)] = [x.numpy() for x in evaluate(program, [*map(array, expected)])]
    for found, x in zip(run(program, args, 3, BY_MEMBER), expected, strict=False):
        np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)


def sweep_step_on_data(order: str) -> tuple[Program, list[np.ndarray]]:
    """The step of two members of a sweep, for a GPU, and its arguments."""
    sweep = f"sweep={{order: {order}, training.seed: {{range: 2}}}}"
    cfg = config.load("smoke", [sweep, "data.batch_size=8"])
    (group,) = groups_of(cfg, members_of(cfg))
    rng = np.random.default_rng(0)
    *args, rows = step_arguments(group, 2)
    args = [*args[:3], *(x[:IMAGES] for x in args[3:])]
    args = [*tree.map(lambda x: array(np.array(x)), args), array(rng.integers(0, IMAGES, rows.shape))]
    improve = (passes.by_member, *passes.SIMPLIFY, *gpu_fusions(BY_MEMBER))
    program = stage(sweep_step(group.experiment), improve, donate=DONATED).program(*args)
    return program, [x.numpy() for x in tree.flatten(args)[0]]


def test_the_next_batch_is_gathered_in_the_last_launch_of_a_step() -> None:
    program, _ = step_on_data("linear")
    runs = prefetch_batch(program, H200)
    assert runs.steady is not None
    assert len(runs.steady.equations) == len(runs.epilogue.equations) < len(program.equations)
    first, *others = (primitive_names(runs.prologue[0]), *map(primitive_names, runs.epilogue.equations))
    assert "take" in first
    assert not any("take" in other for other in others)
    assert "take" in primitive_names(runs.steady.equations[-1])


@pytest.mark.parametrize("network", NETWORKS)
def test_a_batch_that_depends_on_the_new_weights_is_not_prefetched(network: str) -> None:
    program, _ = step_on_data(network, ahead=False)
    runs = prefetch_batch(program, H200)
    assert runs.steady is None
    assert runs.epilogue is program


@pytest.mark.parametrize("name", ["mlp", "mlp-small", "lenet5", "cnn"])
def test_products_share_the_same_launches_in_all_runs(name: str) -> None:
    runs = prefetch_batch(outline(config.load(name, [])).step_program(passes=ON_GPU), H200)
    assert runs.steady is not None
    assert products(runs.steady) == products(runs.epilogue)


def test_nothing_is_prefetched_where_a_product_would_share_another_launch() -> None:
    """The counter that the gather needs would have to join the product's launch."""
    program, _ = step_on_data("convolutions")
    assert prefetch_batch(program, H200).steady is None


def products(program: Program) -> set[frozenset[Variable]]:
    """The results of the products, for each launch."""
    found = set()
    for e in program.equations:
        sharing = e.params["body"].equations if e.form == HORIZONTAL else (e,)
        found.add(frozenset(v for m in sharing if "matmul" in primitive_names(m) for v in m.outputs))
    return found


def test_a_program_without_fusion_is_not_prefetched() -> None:
    program, _ = step_on_data("linear", fused=False)
    assert prefetch_batch(program, H200).steady is None


def test_memory_of_prefetched_batches_is_counted() -> None:
    program, _ = step_on_data("linear")
    layout = Layout(program, Lowering(H200))
    fetched = layout.inputs[len(program.inputs) :]
    assert layout.extra_bytes >= 2 * max(v.size * v.type.dtype.itemsize for v in fetched)
