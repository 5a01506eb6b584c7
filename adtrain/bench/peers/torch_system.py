"""PyTorch as a system: steps, members, operations and whole trainings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np

from adtrain import augment, optim
from adtrain.bench.op_table import OpCase
from adtrain.bench.peers import torch_network
from adtrain.bench.peers.adtrain_system import accuracy
from adtrain.bench.peers.jobs import (
    REPEATS,
    Arrays,
    Checked,
    Job,
    MembersJob,
    OpRunner,
    Runner,
    operations,
    unsupported,
)
from adtrain.bench.peers.systems import Unsupported
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.training.loop import batches_of

WARM_UP_STEPS = 3
"""Before capture, as PyTorch's documentation of CUDA graphs asks: memory is allocated, algorithms are selected."""


class Training:
    """A network in training.

    Args:
        form: "eager", "compile", "graph", "max" or "max-tf32"; see `systems.SYSTEMS`.
        changed: is applied to the pixels of a batch, (N, C, H, W), before they are normalised. Its second argument is
            the batch's indices.

    Raises:
        Unsupported: PyTorch has no counterpart of a layer, or TF32 is to replace another precision than float32.
    """

    def __init__(self, job: Job, form: str, changed: Callable[[Any, Any], Any] = lambda pixels, at: pixels) -> None:
        import torch

        precision = job.experiment.config.training.precision
        form, _, reduced = form.partition("-")
        if reduced and precision != "float32":
            raise Unsupported(f"computes in TF32 in place of float32; the config's precision is {precision}")
        self.device = device = configure(reduced or precision, job.device)
        self.captured = job.device == "gpu" and form in ("graph", "max")
        layout = torch.channels_last if form == "max" else torch.contiguous_format

        def placed(x: Any) -> Any:
            """The images or filters in the layout of the form, and any other tensor as it is."""
            return x.contiguous(memory_format=layout) if x.ndim == 4 else x

        experiment = job.experiment
        network, options = experiment.network, experiment.config.training
        self.clipping = options.clip_value, options.clip_norm
        weights = {path: placed(torch.tensor(x, device=device)) for path, x in job.weights.items()}
        self.parameters = {path: x.requires_grad_() for path, x in experiment.optimizer.trained(weights).items()}
        statistics = {path: torch.tensor(x, device=device) for path, x in job.statistics.items()}
        self.arrays = {**weights, **statistics}
        self.start = {path: x.detach().clone() for path, x in self.arrays.items()}
        products = torch.bfloat16 if precision == "bfloat16" else None
        self.update = torch_network.optimizer(experiment.optimizer, self.parameters, self.captured, products)
        self.rates = [group["lr"] for group in self.update.param_groups]
        examples = np.asarray(experiment.train.images), np.asarray(experiment.train.labels, np.int64)
        images, labels = (torch.tensor(x, device=device) for x in examples)
        scale, shift = (torch.tensor(x, device=device) for x in job.normalization)
        classes = network.model.output_shape(network.input_shape)[0]
        outputs = torch_network.model(network.model)
        loss_of = torch_network.loss(experiment.config, torch.eye(classes, device=device, dtype=scale.dtype))

        def forward(arrays: Arrays, at: Any) -> Any:
            pixels = changed(images.index_select(0, at).to(scale.dtype), at) * scale + shift
            inputs = placed(pixels.reshape(len(at), *network.input_shape))
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                return loss_of(outputs(arrays, inputs), labels.index_select(0, at))

        self.forward, self.advance = forward, clip_and_update
        if form in ("compile", "max"):
            torch.compiler.reset()  # the number of compiled variants in a process is limited
        if form == "compile":
            self.forward = torch.compile(forward)
        elif form == "max":
            self.forward = torch.compile(forward, fullgraph=True, dynamic=False)
            self.advance = torch.compile(clip_and_update)  # PyTorch itself leaves out a fused optimizer

    def step(self, at: Any) -> Any:
        """Take a step on the batch at these indices, and return its loss."""
        self.clear()
        loss = self.forward(self.arrays, at)
        loss.backward()
        self.exchange()
        self.advance(self.update, list(self.parameters.values()), *self.clipping)
        return loss.detach()

    def clear(self) -> None:
        """Remove the gradients of the last step."""
        self.update.zero_grad(set_to_none=True)

    def exchange(self) -> None:
        """Replace the gradients by their mean over all ranks; `torch_ranks` defines it."""

    def variable_rate(self) -> None:
        """Keep the learning rates in tensors, so that `set_rate` changes them for recorded steps too."""
        import torch

        for group in self.update.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=self.device)

    def set_rate(self, factor: float) -> None:
        """Set the learning rates of the next steps: this factor times the config's."""
        for group, rate in zip(self.update.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], float):
                group["lr"] = factor * rate
            else:
                group["lr"].fill_(factor * rate)

    def warm_up(self, at: Any, steps: int) -> None:
        """Take steps, and return to the start."""
        for _ in range(steps):
            self.step(at)
        self.restart(self.start)

    def restart(self, arrays: Mapping[str, Any]) -> None:
        """Begin again from these weights and statistics, by path."""
        import torch

        with torch.no_grad():
            for path, first in arrays.items():
                self.arrays[path].copy_(torch.as_tensor(first))
        for averages in self.update.state.values():
            for x in averages.values():
                x.zero_()

    def repeatable(self, at: Any) -> Callable[[Any], Any]:
        """The step for batches of the size of `at`: one CUDA graph where the form captures it."""
        return self.recorded(at.clone()) if self.captured else self.step

    def recorded(self, at: Any) -> Callable[[Any], Any]:
        """The step as a CUDA graph that reads its indices from `at`. Returns to the start after its warm-up."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.warm_up(at, WARM_UP_STEPS)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.clear()
        # Other threads, such as that of NCCL in torch.distributed, may call CUDA during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = self.step(at)

        def take_step(indices: Any) -> Any:
            at.copy_(indices)
            graph.replay()
            return loss

        return take_step


def clip_and_update(
    optimizer: Any, parameters: Sequence[Any], clip_value: float | None, clip_norm: float | None
) -> None:
    """Clip the gradients of the parameters, and update them."""
    import torch

    if clip_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, clip_value)
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()


def steps(job: Job, form: str) -> Runner:
    """The step as `form` says; see `Training`.

    Raises:
        Unsupported: PyTorch has no counterpart of a layer.
    """
    return _runner(job, Training(job, form))


def _runner(job: Job, training: Training) -> Runner:
    import torch

    orders = torch.tensor(job.orders, device=training.device)
    take_step = training.repeatable(orders[0, 0])
    chunks = cycle(orders)

    def run(calls: int) -> float:
        for _ in range(calls):
            for at in next(chunks):
                losses = take_step(at)
        return float(losses.mean())

    return Runner(lambda: [take_step(at).tolist() for at in next(chunks)], run)


def configure(precision: str, device: str) -> Any:
    """Set threads and the precision of matrix products and convolutions in this process; returns the torch.device."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    return device_of(device)


def device_of(device: str) -> Any:
    """PyTorch's device for one of adtrain's."""
    import torch

    return torch.device("cpu" if device == "cpu" else "cuda")


class MembersTraining(Training):
    """Networks in training, whose parameters are stacked along axis 0.

    Args:
        form: "vmap" or "vmap-compile".

    Raises:
        Unsupported: PyTorch has no counterpart of a layer, or the model has running statistics, or the config has
            training.clip_norm, parameter groups or Muon.
    """

    def __init__(self, job: MembersJob, form: str) -> None:
        import torch

        if job.statistics:
            unsupported("torch.func.vmap", "running statistics")
        if job.experiment.config.training.clip_norm is not None:
            unsupported("torch.func.vmap", "training.clip_norm")
        if isinstance(job.experiment.optimizer, (optim.Grouped, optim.Muon)):
            unsupported("torch.func.vmap", job.experiment.optimizer.kind())
        super().__init__(job, "graph")
        gradients = torch.func.vmap(torch.func.grad_and_value(self.forward))
        self.gradients = torch.compile(gradients) if form == "vmap-compile" else gradients

    def step(self, at: Any) -> Any:
        """Take a step on the batches at these indices (members, batch), and return the losses (members,)."""
        import torch

        with torch.no_grad():
            gradients, losses = self.gradients({path: x.detach() for path, x in self.parameters.items()}, at)
        for path, parameter in self.parameters.items():
            parameter.grad = gradients[path]
        self.advance(self.update, list(self.parameters.values()), *self.clipping)
        return losses


def members(job: MembersJob, form: str) -> Runner:
    """The step of all members; on a GPU one CUDA graph."""
    return _runner(job, MembersTraining(job, form))


def operation(case: OpCase, phase: str, device: str, form: str) -> OpRunner:
    """The operation; phase "backward" is the gradient alone, whose residuals are computed beforehand.

    For bfloat16 the inputs are converted beforehand.

    Args:
        form: "eager" or "graph".
    """
    import torch

    where = configure("tf32" if case.precision == "tf32" else "float32", device)
    kind = torch.bfloat16 if case.precision == "bfloat16" else torch.float32

    def tensor(x: np.ndarray) -> Any:
        return torch.tensor(x, device=where, dtype=kind if x.dtype.kind == "f" else None)

    args = [tensor(x).requires_grad_(x.dtype.kind == "f" and phase == "backward") for x in case.arrays()]
    functions = _functions()
    if case.op not in functions:
        unsupported("PyTorch", case.op)
    f = case.of(functions)
    stream = torch.cuda.Stream() if form == "graph" else None

    with torch.cuda.stream(stream):  # PyTorch runs a gradient on the stream of its forward operation
        if phase == "forward":
            once: Callable[..., Any] = lambda: (f(*args),)  # noqa: E731
        else:
            output, cotangent = f(*args), tensor(case.cotangent())
            floats = case.floats(args)

            def once(ct: Any = cotangent) -> Any:
                return torch.autograd.grad(output, floats, ct, retain_graph=True)

        once()
    call = _recorded(once, stream) if form == "graph" else lambda: [once() for _ in range(REPEATS)][-1]

    def run(calls: int) -> float:
        for _ in range(calls):
            found = call()
        return float(found[0].flatten()[0])  # waits for the device

    def results(*ct: np.ndarray) -> list[np.ndarray]:
        found = once(*map(tensor, ct))
        return [x.detach().float().cpu().numpy() for x in found]

    return OpRunner(run, results)


def _recorded(once: Callable[[], Any], stream: Any) -> Callable[[], Any]:
    """REPEATS runs as one CUDA graph."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(REPEATS):
            found = once()

    def call() -> Any:
        graph.replay()
        return found

    return call


def _functions() -> dict[str, Callable[..., Any]]:
    import torch

    F = torch.nn.functional
    return {
        **operations(torch),
        "conv2d": F.conv2d,
        "conv_transpose2d": F.conv_transpose2d,
        "take": lambda x, indices, axis: torch.index_select(x, axis, indices),
        "attention": F.scaled_dot_product_attention,
        "relu": torch.relu,
        "gelu": F.gelu,
        "max": lambda x, axis: torch.amax(x, dim=() if axis is None else axis),
        "transpose": lambda x: x.T.contiguous(),
        "softmax": lambda x: torch.softmax(x, -1),
        "log_softmax": lambda x: torch.log_softmax(x, -1),
        "cross_entropy": F.cross_entropy,
        "layer_norm": lambda x, normalized_shape: F.layer_norm(x, (normalized_shape,)),
        "max_pool2d": F.max_pool2d,
        "avg_pool2d": F.avg_pool2d,
        "embedding": F.embedding,
    }


class Racer:
    """Trains jobs that differ from the first one in their seeds only. The step is compiled, and captured, once.

    Raises:
        Unsupported: PyTorch has no counterpart of something in the job.
    """

    def __init__(self, job: Job, form: str) -> None:
        import torch

        device = device_of(job.device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=device)
        self.first_half = torch.zeros(len(job.experiment.train), dtype=torch.bool, device=device)
        self.trained = Training(job, form, _augmented(job, self.epoch, self.first_half))
        schedule, steps = job.experiment.schedule, job.experiment.total_steps
        self.factors = [float(schedule(array(np.int64(i))).numpy()) for i in range(steps)]
        if form not in ("eager", "compile"):
            self.trained.variable_rate()
        self.takes = {}
        for size in {len(batch) for batch in batches_of(job.experiment, 1)}:
            at = torch.arange(size, device=device)
            self.takes[size] = self.trained.repeatable(at)
            self.trained.warm_up(at, WARM_UP_STEPS)

    def __call__(self, job: Job) -> list[Checked]:
        """The epochs of a training."""
        import torch

        experiment, trained = job.experiment, self.trained
        torch.manual_seed(experiment.config.training.seed)
        self.first_half.bernoulli_(0.5)
        trained.restart({**job.weights, **job.statistics})
        found, done = list[Checked](), 0
        for epoch in range(1, experiment.epochs + 1):
            batches = list(batches_of(experiment, epoch))[: experiment.total_steps - done]
            start = perf_counter()
            self.epoch.fill_(epoch)
            order = torch.tensor(np.concatenate(batches), device=trained.device).split([len(x) for x in batches])
            for i, at in enumerate(order, done):
                trained.set_rate(self.factors[i])
                loss = self.takes[len(at)](at)
            float(loss)
            seconds = perf_counter() - start + (found[-1].seconds if found else 0.0)
            done += len(batches)
            found.append(Checked(seconds, _accuracy(job, trained)))
        return found


race = Racer
"""See `systems.System`."""


def _augmented(job: Job, epoch: Any, first_half: Any) -> Callable[[Any, Any], Any]:
    """The config's augmentations as a function of pixels (N, C, H, W) and of their indices.

    `epoch` is a tensor with the number of the epoch. `first_half` says of each training image whether an alternating
    flip flips it in the first epoch. Raises Unsupported for an augmentation without a counterpart.
    """
    changes = [_change(change, epoch, first_half) for change in job.experiment.augmentations]

    def changed(pixels: Any, at: Any) -> Any:
        for change in changes:
            pixels = change(pixels, at)
        return pixels

    return changed


def _change(change: augment.Augmentation, epoch: Any, first_half: Any) -> Callable[[Any, Any], Any]:
    import torch

    def crop(x: Any, at: Any) -> Any:
        count, channels, height, width = x.shape
        padded = torch.nn.functional.pad(x, [change.padding] * 4, mode=change.padding_mode)  # type: ignore[attr-defined]

        def indices(size: int) -> Any:
            corner = torch.randint(2 * change.padding + 1, (count, 1), device=x.device)  # type: ignore[attr-defined]
            return corner + torch.arange(size, device=x.device)

        rows, columns = indices(height)[:, None, :, None], indices(width)[:, None, None, :]
        images = torch.arange(count, device=x.device)[:, None, None, None]
        return padded[images, torch.arange(channels, device=x.device)[:, None, None], rows, columns]

    def flip(x: Any, at: Any) -> Any:
        flipped = torch.rand(len(x), device=x.device) < change.probability  # type: ignore[attr-defined]
        return torch.where(flipped[:, None, None, None], x.flip(3), x)

    def alternate(x: Any, at: Any) -> Any:
        flipped = first_half.index_select(0, at) == (epoch % 2 == 1)
        return torch.where(flipped[:, None, None, None], x.flip(3), x)

    def cutout(x: Any, at: Any) -> Any:
        def distances(size: int) -> Any:
            middle = torch.randint(size, (len(x), 1), device=x.device) - (0.5 if change.size % 2 == 0 else 0.0)  # type: ignore[attr-defined]
            return (torch.arange(size, device=x.device) - middle).abs()

        rows, columns = distances(x.shape[2])[:, None, :, None], distances(x.shape[3])[:, None, None, :]
        return torch.where(torch.maximum(rows, columns) < change.size / 2, 0.0, x)  # type: ignore[attr-defined]

    match change:
        case augment.Crop():
            return crop
        case augment.Flip():
            return alternate if change.alternate else flip
        case augment.Cutout():
            return cutout
    unsupported("PyTorch", f"the augmentation {change.kind()}")


def _accuracy(job: Job, trained: Training) -> float:
    """The test accuracy of the weights, by adtrain."""
    state = job.experiment.initial_state("cpu")
    found = []
    for arrays in (state.params, state.statistics):
        structure = tree.flatten(arrays)[1]
        leaves = [array(trained.arrays[path].detach().cpu().numpy(), device=job.device) for path in tree.paths(arrays)]
        found.append(tree.unflatten(structure, leaves))
    return accuracy(job, *found)
