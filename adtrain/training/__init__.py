"""Training: takes a checked experiment and writes a run's folder. Independent of the command line.

experiment = training.prepare(config.load("mlp"))
result = training.run(experiment, "cpu", [observer])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adtrain.lazy import lazy_getattr

if TYPE_CHECKING:
    from adtrain.config.plugged import Trust
    from adtrain.training.checkpoint import Checkpoint
    from adtrain.training.checks import check_precision, check_whole_batches
    from adtrain.training.costs import LayerCost, StepCosts, step_costs
    from adtrain.training.evaluation import Evaluation
    from adtrain.training.examples import Examples, on_device
    from adtrain.training.experiment import Experiment, Mode
    from adtrain.training.loop import continuation
    from adtrain.training.model_file import TrainedModel
    from adtrain.training.preparation import Arrays, outline, prepare, read_ahead, with_input
    from adtrain.training.progress import Best, Epoch, Interval, Progress, Validated, read_metrics
    from adtrain.training.run_folder import Recorder, Resumed, RunFolder, resume, run_in_folder
    from adtrain.training.scores import ClassScore, MultilabelScore, RegressionScore, Score
    from adtrain.training.step import TrainState, copied, evaluation_step, train_step
    from adtrain.training.summary import Summary, summarize
    from adtrain.training.trainer import Interrupted, NotFinite, Observer, Result, Start, run

__getattr__ = lazy_getattr(__name__)
