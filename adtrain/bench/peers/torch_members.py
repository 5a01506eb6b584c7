"""The training step of many networks in PyTorch: the gradients of one network mapped by torch.func.vmap."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from adtrain.bench.peers.layers import unsupported
from adtrain.bench.peers.members import MembersJob
from adtrain.bench.peers.steps import Runner
from adtrain.bench.peers.torch_steps import Training


class MembersTraining(Training):
    """Networks in training, whose parameters are stacked along axis 0.

    Args:
        form: "vmap" or "vmap-compile".

    Raises:
        Unsupported: PyTorch has no counterpart of a layer, or the model has running statistics, or the config has
            training.clip_norm.
    """

    def __init__(self, job: MembersJob, form: str) -> None:
        import torch

        if job.statistics:
            unsupported("torch.func.vmap", "running statistics")
        if job.experiment.config.training.clip_norm is not None:
            unsupported("torch.func.vmap", "training.clip_norm")
        super().__init__(job, "graph" if job.device == "gpu" else "eager")
        gradients = torch.func.vmap(torch.func.grad_and_value(self.forward))
        self.gradients = torch.compile(gradients) if form == "vmap-compile" else gradients

    def step(self, at: Any) -> Any:
        """Take a step on the batches at these indices (members, batch), and return the losses (members,)."""
        import torch

        with torch.no_grad():
            gradients, losses = self.gradients({path: x.detach() for path, x in self.parameters.items()}, at)
        for path, parameter in self.parameters.items():
            parameter.grad = gradients[path]
        if self.clipping.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters.values(), self.clipping.clip_value)
        self.update.step()
        return losses


def runner(job: MembersJob, form: str) -> Runner:
    """The step of all members; on a GPU one CUDA graph."""
    import torch

    training = MembersTraining(job, form)
    orders = torch.tensor(job.orders, device=training.device)
    take_step = training.recorded(orders[0, 0].clone()) if job.device == "gpu" else training.step
    chunks = cycle(orders)

    def run(calls: int) -> float:
        for _ in range(calls):
            for at in next(chunks):
                losses = take_step(at)
        return float(losses.mean())

    return Runner(lambda: [take_step(at).tolist() for at in next(chunks)], run)
