"""Updates fused with exchanges between GPUs, with the launches of all ranks run by the CPU, block by block."""

from __future__ import annotations

import ctypes
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cuda_on_host import Host, host
from test_cuda_ranks import placed_for_gpus
from test_cuda_steps_on_host import drawn
from thread_ranks import ThreadRank, on_ranks
from training_runs import write_config

from adtrain import config, ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.peer_exchanges import EXCHANGED_UPDATE, PEER_EXCHANGES, RESIDENT, fuse_exchanges
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.peer_window import EMPTY, SLOT_BYTES, slots_of_vectors, window_bytes
from adtrain.backends.cuda.runtime.layout import Layout
from adtrain.bench.scaling_worker import summed
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, body_of
from adtrain.core.staging import Pass, stage
from adtrain.passes.order import exchange_done_p
from adtrain.passes.plan_memory import Place, plan_memory
from adtrain.training import sharding
from adtrain.training.preparation import outline

__all__ = ["host"]

NARROW = H200._replace(multiprocessors=3)
LAUNCHES = 4
SETTINGS = (
    "model.layers=[{linear: 256}, relu, {linear: 3}]",
    "optimizer={sgd: {lr: 0.1, momentum: 0.9, weight_decay: 0.01}}",
)


def step(path: Path | str, *settings: str, limit: int = SLOT_BYTES) -> Program:
    """The Program of a step of this rank."""
    return outline(config.load(path, settings)).step_program(passes=passes(limit))


def passes(limit: int) -> list[Pass]:
    fold, optimize, *place = placed_for_gpus()
    return [fold, optimize, partial(fuse_exchanges, limit=limit), *place]


def exchanges(program: Program) -> list[Equation]:
    return [e for e in program.equations if e.form == PEER_EXCHANGES]


def launch(host: Host, plan: LaunchPlan, operands: list[list[list[np.ndarray]]], windows: list[np.ndarray]) -> None:
    """Run launches of the kernel on all ranks, for each launch with the operands of each rank.

    A rank begins a launch when its own last one has ended. The operands and the window of each rank are changed.
    """
    ranks = len(windows)
    structs = [np.array([*(x.ctypes.data for x in windows), rank], np.int64) for rank in range(ranks)]
    given = [[*(of[i] for i in plan.operands), structs[rank]] for each in operands for rank, of in enumerate(each)]
    pointers = (ctypes.c_void_p * sum(map(len, given)))(*(x.ctypes.data for row in given for x in row))
    parameters = re.search(r"peer_exchanges\(([^)]*)\)\n\{", plan.source.text)
    assert parameters is not None
    pointers_of = parameters.group(1).split(", ")[: len(plan.operands)]
    arguments = [f"({parameter.rpartition('*')[0]}*)own[{i}]" for i, parameter in enumerate(pointers_of)]
    arguments += ["&bad"] * plan.checked + [f"*(const Windows *)own[{len(arguments)}]"]
    entry = f"""
    extern "C" void go(int launches, unsigned blocks, unsigned ranks, int threads, void **pointers) {{
        static unsigned ended[{ranks}]; // blocks of each rank
        memset(ended, 0, sizeof ended);
        memset(stored, 0, sizeof stored); // kernels of other libraries have used the windows
        run({{blocks, ranks, 1}}, threads, [=] {{
            for (int i = 0; i < launches; i++) {{
                while (ended[blockIdx.y] < i * blocks) wait_for_change(ended[blockIdx.y]);
                void **own = pointers + {len(given[0])} * (i * ranks + blockIdx.y);
                peer_exchanges({", ".join(arguments)});
                __syncthreads();
                ended[blockIdx.y] += threadIdx.x == 0;
            }}
        }});
    }}"""
    library = host.library(plan.source, [entry], ranks * plan.size.blocks[0])
    library.go(len(operands), plan.size.blocks[0], ranks, plan.size.threads, pointers)


def window(ranks: int) -> np.ndarray:
    """A window that no rank has used."""
    memory = np.zeros(window_bytes(ranks), np.uint8)
    memory[slice(*slots_of_vectors(ranks))] = EMPTY
    return memory


def drawn_for_ranks(equations: list[Equation], rng: np.random.Generator) -> list[list[np.ndarray]]:
    """The arguments of each rank. Ranks send different arrays. The others, such as parameters, are the same."""
    first = equations[0]
    sent = {v for member in first.params["body"].equations for e in body_of(member).equations for v in sent_by(e)}
    same = [drawn(v, rng) for v in first.inputs]
    return [
        [drawn(v, rng) if v in sent else x.copy() for v, x in zip(first.inputs, same, strict=True)] for _ in equations
    ]


def gradients_sent(e: Equation) -> list[Variable]:
    """The gradients that a `peer_exchanges` equation sends, a vector for each bucket."""
    updates = [x for x in e.params["body"].equations if x.form == EXCHANGED_UPDATE]
    return [body_of(x).equations[0].inputs[0] for x in updates]


def sent_by(e: Equation) -> tuple[Variable, ...]:
    return e.inputs if e.has(Trait.COLLECTIVE) else ()


def expected(equations: list[Equation], arguments: list[list[np.ndarray]], rank: ThreadRank) -> list[np.ndarray]:
    e = equations[rank.rank]
    return list(e.primitive.reference(*arguments[rank.rank], **e.params))


def repeated_exchanges(path: Path, ranks: int, *settings: str) -> list[Equation]:
    """The `peer_exchanges` equation of each rank in a repeated step."""

    def of_rank(rank: ThreadRank) -> Equation:
        _, (steps, _), _ = Layout(step(path, *settings), Lowering(NARROW)).runs(2)
        return next(x.equation for x in steps if x.equation.form == PEER_EXCHANGES)

    return on_ranks(ranks, of_rank)


def plan_of(equations: list[Equation]) -> LaunchPlan:
    """The launch that all ranks have."""
    plans = [plan for e in equations for plan in Lowering(NARROW).launches(e) if isinstance(plan, LaunchPlan)]
    assert len(plans) == len(equations)
    assert len({(plan.source, tuple(plan.operands)) for plan in plans}) == 1
    return plans[0]


def check(
    host: Host, equations: list[Equation], windows: list[np.ndarray], rng: np.random.Generator, launches: int = 1
) -> None:
    """Launch the kernel some times. Some elements of the gradients have the bits of empty slots."""
    arguments = [drawn_for_ranks(equations, rng) for _ in range(launches)]
    for of_rank in (x for each in arguments for x in each):
        for sent in gradients_sent(equations[0]):
            gradients = of_rank[equations[0].inputs.index(sent)]
            gradients.reshape(-1).view(np.uint8).reshape(-1, gradients.itemsize)[::97] = EMPTY
    results = [[[np.zeros(v.type.shape, v.type.dtype) for v in e.outputs] for e in equations] for _ in arguments]
    operands = [[[*x, *y] for x, y in zip(*pair, strict=True)] for pair in zip(arguments, results, strict=True)]
    launch(host, plan_of(equations), operands, windows)
    for given, found in zip(arguments, results, strict=True):
        right = on_ranks(len(windows), partial(expected, equations, given))
        for x, y in zip((x for of in found for x in of), (y for of in right for y in of), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [
        (2, "optimizer={adam: {lr: 0.01}}"),
        pytest.param(4, SETTINGS[1], marks=pytest.mark.exhaustive),
    ],
)
def test_the_kernel_computes_the_bits_of_the_separate_exchanges(
    tmp_path: Path, host: Host, ranks: int, optimizer: str
) -> None:
    """Launches of several ranks overlap. They take the indices of the next batch, too."""
    equations = repeated_exchanges(write_config(tmp_path), ranks, SETTINGS[0], optimizer)
    assert "take" in [e.name for e in equations[0].params["body"].equations]
    assert plan_of(equations).size.blocks[0] > 2
    rng, windows = np.random.default_rng(0), [window(ranks) for _ in range(ranks)]
    check(host, equations, windows, rng, LAUNCHES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_kernels_with_other_buckets_and_types_share_windows(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    path = write_config(tmp_path)
    one = repeated_exchanges(path, ranks, SETTINGS[0], "optimizer={sgd: {lr: 0.1}}")
    monkeypatch.setattr(sharding, "BUCKET_BYTES", 1024)
    buckets = repeated_exchanges(path, ranks, *SETTINGS)
    doubles = repeated_exchanges(path, ranks, *SETTINGS, "training.precision=float64")
    assert [len(gradients_sent(e[0])) for e in (one, buckets, doubles)] == [1, 3, 3]
    assert {v.type.dtype for v in gradients_sent(doubles[0])} == {np.dtype(np.float64)}
    rng, windows = np.random.default_rng(0), [window(ranks) for _ in range(ranks)]
    for equations in (one, doubles, buckets):
        check(host, equations, windows, rng)
    assert all((w[slice(*slots_of_vectors(ranks))] == EMPTY).all() for w in windows)


def test_all_blocks_that_wait_for_peers_fit_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A multiprocessor has registers for RESIDENT blocks."""
    monkeypatch.setattr(sharding, "BUCKET_BYTES", 1 << 18)
    layers = 5
    model = ", ".join(["{linear: 256}, relu"] * layers)
    equations = repeated_exchanges(write_config(tmp_path), 2, f"model.layers=[{model}, {{linear: 3}}]")
    assert len(gradients_sent(equations[0])) > layers - 2
    text = plan_of(equations).source.text
    (waiting,) = {int(blocks) for blocks in re.findall(r"add_share\(windows, \d+ \+ block, (\d+)\)", text)}
    assert f"__launch_bounds__(THREADS, {RESIDENT})" in text
    assert NARROW.multiprocessors < waiting <= RESIDENT * NARROW.multiprocessors


@pytest.mark.parametrize("name", ["mlp", "cnn", "lenet5-augmented"])
def test_a_step_has_one_launch_that_exchanges_and_updates_parameters_in_place(name: str) -> None:
    def check(rank: ThreadRank) -> None:
        program, lowering = step(name), Lowering(H200)
        assert not any(e.has(Trait.COLLECTIVE) for e in program.equations)
        (e,) = exchanges(program)
        assert len(lowering.launches(e)) == 1
        plan = plan_memory(program, lowering.scratch)
        assert [plan.places[v] for v in program.outputs if v.nbytes > 1 << 20] == [
            Place("input", i) for i, v in enumerate(program.inputs) if v in program.donated and v.nbytes > 1 << 20
        ]

    on_ranks(2, check)


@pytest.mark.parametrize(("name", "batch", "launches"), [("mlp", 128, 6), ("mlp", 2048, 7), ("cnn", 128, 11)])
def test_small_equations_and_gathers_of_a_repeated_step_share_launches(name: str, batch: int, launches: int) -> None:
    """The schedule, the step counters, the metrics and the indices of the next batch have no launches of their own. Nor
    has the sum of a bias gradient beside products."""

    def count(rank: ThreadRank) -> int:
        _, (repeated, _), _ = Layout(step(name, f"data.batch_size={batch}"), Lowering(H200)).runs(2)
        return sum(not placed.equation.is_view for placed in repeated)

    assert on_ranks(2, count) == [launches] * 2


def test_the_sum_that_the_benchmark_times_is_exchanged_by_one_launch() -> None:
    def names(rank: ThreadRank) -> list[str]:
        staged = stage(summed, passes(SLOT_BYTES), donate=(0,))
        return [e.name for e in staged.program(ops.zeros((1 << 16,))).equations if not e.is_view]

    assert on_ranks(2, names) == [["add", "peer_exchanges"]] * 2


def test_other_exchanges_have_ended_when_the_launch_with_updates_begins(tmp_path: Path) -> None:
    layers = "model.layers=[{linear: 256}, {batch_norm1d: {sync: true}}, relu, {linear: 3}]"

    def check(rank: ThreadRank) -> None:
        program = step(write_config(tmp_path / str(rank.rank)), layers)
        begun = [e.outputs[0] for e in program.equations if e.has(Trait.COLLECTIVE)]
        names = [e.name for e in program.equations]
        before = program.equations[: names.index("peer_exchanges")]
        assert begun
        assert set(begun) == {e.inputs[0] for e in before if e.primitive is exchange_done_p}

    on_ranks(2, check)


@pytest.mark.parametrize(("setting", "limit"), [("training.clip_norm=1.0", SLOT_BYTES), ("data.shards=2", 1 << 20)])
def test_clipping_by_norm_and_long_slices_keep_separate_exchanges(setting: str, limit: int) -> None:
    def fused(rank: ThreadRank) -> int:
        return len(exchanges(step("mlp", setting, limit=limit)))

    assert on_ranks(2, fused) == [0, 0]
