"""A whole training by adtrain, as `adtrain train` runs it, and the accuracy of any system's weights."""

from __future__ import annotations

from collections.abc import Callable

from adtrain import nn, training
from adtrain.bench.peers.races import Checked
from adtrain.bench.peers.steps import Job
from adtrain.training import Epoch, Observer, TrainState


class Epochs(Observer):
    """Notes the seconds of training and the test accuracy after each epoch."""

    def __init__(self, job: Job) -> None:
        self.job, self.found = job, list[Checked]()

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> None:
        before, reached = self.found[-1].seconds if self.found else 0.0, state()
        self.found.append(Checked(before + epoch.seconds, accuracy(self.job, reached.params, reached.statistics)))


def run(job: Job, form: str) -> list[Checked]:
    epochs = Epochs(job)
    training.run(job.experiment, job.device, [epochs])
    return epochs.found


def accuracy(job: Job, params: nn.Params, statistics: nn.State) -> float:
    """The fraction of the test images that a model on the job's device gets right."""
    experiment = job.experiment
    examples = training.on_device(experiment.test, job.device)
    evaluation = training.Evaluation(experiment.evaluation_step, experiment.network.task, examples)
    score = evaluation.score(params, statistics)
    return float(score._asdict()["accuracy"])
