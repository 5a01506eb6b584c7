"""Training: from a checked experiment to a run's folder. It knows nothing of the command line.

experiment = training.prepare(config.load("mlp"))
result = training.run(experiment, "cpu", [observer])
"""

from __future__ import annotations

from adtrain.training.evaluation import Score, evaluate
from adtrain.training.experiment import Experiment, prepare
from adtrain.training.layer_costs import LayerCost, layer_costs
from adtrain.training.loop import Result, continuation, run
from adtrain.training.model_file import TrainedModel
from adtrain.training.progress import Epoch, Interval, Observer
from adtrain.training.run_folder import Recorder, RunFolder
from adtrain.training.step import TrainState, evaluation_step, train_step
from adtrain.training.summary import summarize

__all__ = [
    "Epoch", "Experiment", "Interval", "LayerCost", "Observer", "Recorder", "Result", "RunFolder", "Score",
    "TrainState", "TrainedModel", "continuation", "evaluate", "evaluation_step", "layer_costs", "prepare", "run",
    "summarize", "train_step",
]  # fmt: skip
