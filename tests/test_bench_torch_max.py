"""PyTorch in its fastest form: compiled without a break, channels last, and on a GPU one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import training_runs
from npz_files import parts, write_npz

from adtrain.bench.peers import jobs, torch_network
from adtrain.bench.peers.jobs import Job
from adtrain.bench.peers.systems import Unsupported, environment
from adtrain.bench.peers.torch_system import Training, steps
from adtrain.bench.peers.worker import Worker

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute"),  # PyTorch's own, while it traces
]

BLOCK = "{transformer_encoder_layer: {nhead: 2, dim_feedforward: 5, dropout: 0.0}}"
NETWORKS = {
    "convolution": "[{conv2d: {out_channels: 4, kernel_size: 3}}, batch_norm2d, relu, {max_pool2d: 2}, flatten, "
    "{linear: 3}]",
    "transformer": f"[{{patches: 3}}, {{linear: 4}}, {BLOCK}, mean, {{linear: 3}}]",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces the forward pass and derives the gradients, but generates no code."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def job(folder: Path, *overrides: str, layers: str = NETWORKS["convolution"]) -> Job:
    """Training on images with three channels."""
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 6, 6), dtype=np.uint8)
    data = f"data={{path: {write_npz(folder / 'images.npz', parts(images))}, batch_size: 8}}"
    fixed = data, "model.input=[3, 6, 6]", "training.precision=float64"
    return Job(training_runs.prepare(folder, *fixed, *overrides, layers=layers), "cpu")


@pytest.mark.parametrize(
    ("network", "overrides"),
    [
        ("convolution", ["optimizer={rmsprop: {lr: 0.01, momentum: 0.5}}", "training.clip_value=0.01"]),
        pytest.param("transformer", ["training.clip_norm=0.05"], marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_compiled_step_has_the_losses_of_adtrain(tmp_path: Path, network: str, overrides: list[str]) -> None:
    given = job(tmp_path, *overrides, layers=NETWORKS[network])
    found, expected = steps(given, "max"), jobs.runner("adtrain", given)
    for _ in range(2):
        np.testing.assert_allclose(found.losses(), expected.losses(), rtol=1e-9)


@pytest.mark.parametrize(("form", "channels_last"), [("max", True), ("eager", False)])
def test_images_and_filters_are_channels_last_in_the_fastest_form_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, channels_last: bool
) -> None:
    given, convolve, found = job(tmp_path), torch.nn.functional.conv2d, list[bool]()

    def observed(x: Any, weight: Any, *options: Any) -> Any:
        found.extend(each.is_contiguous(memory_format=torch.channels_last) for each in (x, weight))
        return convolve(x, weight, *options)

    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(torch.nn.functional, "conv2d", observed)
    steps(given, form).losses()
    assert found == [channels_last] * (2 * jobs.CHUNK["cpu"])


@pytest.mark.parametrize("affine", ["weight", "bias", "true", "false"])
def test_batch_norm_gets_both_parameters_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affine: str) -> None:
    """PyTorch's kernels for GPUs take no other."""
    layers = f"[{{conv2d: {{out_channels: 4, kernel_size: 3}}}}, {{batch_norm2d: {{affine: {affine}}}}}, flatten, "
    given, normalize, found = job(tmp_path, layers=f"{layers}{{linear: 3}}]"), torch.nn.functional.batch_norm, set()

    def observed(x: Any, mean: Any, var: Any, weight: Any, bias: Any, *options: Any) -> Any:
        found.add((weight is None, bias is None))
        return normalize(x, mean, var, weight, bias, *options)

    monkeypatch.setattr(torch.nn.functional, "batch_norm", observed)
    steps(given, "eager").losses()
    assert found == {(affine == "false", affine == "false")}


def test_network_that_torch_compile_must_break_fails_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch_network.model

    def broken(layers: Any) -> Any:
        apply = model(layers)

        def outputs(arrays: Any, x: Any) -> Any:
            torch._dynamo.graph_break()
            return apply(arrays, x)

        return outputs

    monkeypatch.setattr(torch_network, "model", broken)
    path = str(training_runs.write_config(tmp_path))
    answer = Worker("torch-max", "cpu").answer({"do": "step", "config_name": path, "overrides": []})
    ((kind, reason),) = answer.items()
    assert (kind, reason.count("\n")) == ("failed", 0)
    assert "graph_break" in reason


def test_process_may_compile_more_networks_than_variants_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    for width in (2, 3):
        steps(job(tmp_path, layers=f"[flatten, {{linear: {width}}}, {{linear: 3}}]"), "max").losses()


def test_captured_step_has_the_losses_of_adtrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = job(tmp_path)
    monkeypatch.setattr(Training, "__init__", captured(Training.__init__))
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    simulate_capture(monkeypatch)
    found, expected = steps(given, "max"), jobs.runner("adtrain", given)
    for _ in range(2):
        np.testing.assert_allclose(found.losses(), expected.losses(), rtol=1e-9)


def captured(made: Any) -> Any:
    """The constructor of a training whose step is captured, as on a GPU."""

    def init(self: Training, *arguments: Any) -> None:
        made(self, *arguments)
        self.captured = True

    return init


def simulate_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs on the CPU: what a step changes during the capture is undone, and a replay takes the step."""
    step, last = Training.step, list[Any]()

    def observed(training: Training, at: Any) -> Any:
        last[:] = training, at, step(training, at)
        return last[-1]

    class Graph:
        taken: Sequence[Any]

        def replay(self) -> None:
            training, at, loss = self.taken
            loss.copy_(step(training, at))

    @contextmanager
    def capture(graph: Graph, **options: str) -> Iterator[None]:
        training = last[0]
        assert all(x.grad is None for x in training.parameters.values()), "a gradient is outside the graph's memory"
        averages = [x for state in training.update.state.values() for x in state.values()]
        before = [(x, x.detach().clone()) for x in (*training.arrays.values(), *averages)]
        yield
        graph.taken = tuple(last)
        with torch.no_grad():
            for x, saved in before:
                x.copy_(saved)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(Training, "step", observed)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)


@pytest.mark.parametrize(
    ("form", "precision", "allowed"),
    [("max", "float32", False), ("max", "tf32", True), ("max", "bfloat16", False), ("max-tf32", "float32", True)],
)
def test_tf32_is_allowed_where_the_config_or_the_form_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, precision: str, allowed: bool
) -> None:
    found = dict[str, bool]()
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda value: found.update(matmul=value == "high"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not allowed)
    Training(job(tmp_path, f"training.precision={precision}"), form)
    assert (found["matmul"], torch.backends.cudnn.allow_tf32) == (allowed, allowed)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16", "float64"])
def test_tf32_in_place_of_another_precision_than_float32_is_unsupported(tmp_path: Path, precision: str) -> None:
    with pytest.raises(Unsupported, match=f"TF32 in place of float32; the config's precision is {precision}"):
        Training(job(tmp_path, f"training.precision={precision}"), "max-tf32")


def test_full_autotuning_makes_torch_compile_search_as_max_autotune_does() -> None:
    from torch import _inductor

    names = {"max_autotune": "MAX_AUTOTUNE", "coordinate_descent_tuning": "COORDINATE_DESCENT_TUNING"}
    assert _inductor.list_mode_options("max-autotune-no-cudagraphs") == dict.fromkeys(names, True)
    variables = {f"TORCHINDUCTOR_{name}": "1" for name in names.values()}
    assert environment("gpu", 1, "full").items() >= variables.items()
    assert not environment("gpu", 1, "cached").keys() & variables.keys()
