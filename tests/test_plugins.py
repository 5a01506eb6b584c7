"""Plug-ins: what they register, the errors of broken ones, and where they are named."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from command_line import invoke
from plugin_files import LAYER, OPERATION, call, here, no_plugins, train, write_plugged
from pydantic import Field
from training_runs import TEXT, write_config

import adtrain as ad
from adtrain import config, plugins, training
from adtrain.bench import step
from adtrain.bench.peers import torch_network
from adtrain.bench.peers.systems import Unsupported
from adtrain.config.specs import FAMILIES
from adtrain.core.errors import AdtrainError, OptionError

pytestmark = [pytest.mark.usefixtures("no_plugins"), pytest.mark.unfused]
__all__ = ["here", "no_plugins"]


def build(folder: Path, layer: str, text: str = LAYER) -> str:
    """The problems of a config with the layer."""
    with pytest.raises(AdtrainError) as caught:
        config.load(write_plugged(folder, layer, text))
    return str(caught.value).replace(f"{folder}/", "")


# What plug-ins register


def test_a_layer_of_a_plugin_has_the_options_of_its_annotations(here: Path) -> None:
    cfg = config.load(write_plugged(here, "mish"), ["model.layers.1.mish.beta=2"])
    mish: Any = config.build.model(cfg).layers[1]
    assert (mish.kind(), mish.beta) == ("mish", 2)
    assert build(here, "mish: {beta: -1}") == (
        "tiny.yaml:8:20: model.layers[1].mish.beta: found -1, expected a number in (0, 3.4e38]"
    )
    assert build(here, "mish: {beat: 1}") == (
        "tiny.yaml:8:14: model.layers[1].mish.beat: unknown key; did you mean beta?"
    )
    assert "unknown layer 'mosh'; did you mean mish?" in build(here, "mosh")


OPTIONS = """
from typing import Annotated, Literal
from pydantic import Field

@ad.register.layer("all")
class All(ad.nn.Module):
    count: int
    part: Annotated[float, Field(gt=0, lt=1)] = 0.5
    on: bool = True
    word: str = "a"
    how: Literal["up", "down"] = "up"
    pair: tuple[int, int] = (1, 2)
    either: int | str = 1
    perhaps: float | None = None

    def output_shape(self, shape):
        return shape

    def forward(self, params, state, x, mode):
        return x, state
"""


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("count: 1.5", "count: found 1.5, expected an integer"),
        ("count: true", "count: found true, expected an integer"),
        ("part: 0.1", "count: missing, expected an integer"),
        ("count: 1, part: 1", "part: found 1, expected a number in (0, 1)"),
        ("count: 1, part: .nan", "part: found nan, expected a number in (0, 1)"),
        ("count: 1, on: 1", "on: found 1, expected true or false"),
        ("count: 1, word: 1", "word: found 1, expected a string"),
        ("count: 1, how: left", "how: found 'left', expected one of up, down"),
        ("count: 1, pair: [1]", "pair: found [1], expected a list of 2 integers in [-2^63, 2^63)"),
        ("count: 1, either: 1.5", "either: found 1.5, expected an integer in [-2^63, 2^63) or a string"),
        ("count: 1, perhaps: x", "perhaps: found 'x', expected a number in [-3.4e38, 3.4e38]"),
    ],
)
def test_plain_annotations_are_types_too(here: Path, options: str, problem: str) -> None:
    config.load(write_plugged(here, "all: {count: 3, pair: [4, 5], either: x, perhaps: 1}", LAYER + OPTIONS))
    found = build(here, f"all: {{{options}}}", LAYER + OPTIONS)
    assert problem in found
    assert len(found.splitlines()) == 1


FAMILY = """
import numpy as np
import adtrain as ad
from adtrain import ops
from adtrain.option_types import Fraction, Positive, Size
from adtrain.optim.optimizer import zero_step

@ad.register.layer("gain")
class Gain(ad.nn.Module):
    start: float = 1.0

    def output_shape(self, shape):
        return shape

    def parameter_shapes(self, shape):
        return {"weight": shape}

    def new_arrays(self, shape, rng, dtype):
        return {"weight": ad.array(np.full(shape, self.start, dtype))}, {}

    def forward(self, params, state, x, mode):
        return x * params["weight"], state

@ad.register.loss("focal")
class Focal:
    gamma: Positive = 2.0

    def __call__(self, outputs, labels):
        log_p = -ops.cross_entropy(outputs, labels, reduction="none")
        return -ops.mean((1 - ops.exp(log_p)) ** self.gamma * log_p)

@ad.register.optimizer("signed")
class Signed(ad.optim.Optimizer):
    def init(self, params):
        return {"step": zero_step(params)}

    def updated(self, params, grads, state, lr):
        new = ad.tree.map(lambda p, g: p - ops.astype(lr, p.dtype) * ops.sign(g), params, grads)
        return new, {"step": state["step"] + 1}

@ad.register.schedule("linear_decay")
class LinearDecay(ad.optim.Schedule):
    total_steps: int
    final: Fraction = 0.0

    def __call__(self, step):
        return 1.0 - (1.0 - self.final) * ops.astype(step, np.float64) / self.total_steps

@ad.register.augment("darker")
class Darker(ad.augment.Augmentation):
    most: Fraction = 0.1

    def __call__(self, batch, rng):
        kept = 1.0 - self.most * self.uniform(rng, "factor", (batch.images.shape[0], 1, 1, 1), batch.images)
        return batch._replace(images=batch.images * kept)

@ad.register.metric("brier")
class Brier:
    factor: Positive = 1.0

    def __call__(self, predictions):
        errors = predictions.probabilities - np.eye(len(predictions.classes))[predictions.labels]
        return self.factor * np.square(errors).sum(axis=1).mean()

@ad.register.dataset("rings")
class Rings:
    points: Size = 60
    noise: Fraction = 0.1

    def load(self):
        rng = np.random.default_rng(0)
        rings = rng.integers(0, 2, self.points)
        angles = rng.uniform(0, 2 * np.pi, self.points)
        radii = 1 + rings + rng.normal(0, self.noise, self.points)
        rows = np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)
        return (rows, np.array(["inner", "outer"])[rings]), None
"""
WITH_FAMILY = (
    TEXT.replace("data: {", "plugins: [mine.py]\ndata: {augment: [darker: 0.2], ", 1)
    .replace("- relu", "- relu\n    - gain")
    .replace("cross_entropy", "focal")
    .replace("adam: {lr: 0.01}", "signed: 0.01")
    .replace("seed:", "metrics: [{brier: {factor: 2}}, f1], seed:")
    + "schedule: {linear_decay: {warmup_steps: 2}}\n"
)
OF_RINGS = """name: rings
plugins: [mine.py]
data: {dataset: {rings: {points: 80}}, batch_size: 16, test: 0.25, validation: 0.2}
model: {input: [2], layers: [{linear: 8}, relu, {linear: 2}]}
loss: cross_entropy
optimizer: {adam: 0.01}
training: {epochs: 1, metrics: [brier]}
"""


def test_a_plugin_of_every_kind_is_trained_and_evaluated_as_in_training(here: Path) -> None:
    (here / "mine.py").write_text(FAMILY)
    train(write_config(here, WITH_FAMILY), "--output-dir", "run")
    summary = json.loads((here / "run/summary.json").read_text())
    score = json.loads(call("eval", "run", "--device", "cpu", "--trust-plugins", "--json"))["test"]
    assert score["loss"] == pytest.approx(summary["test"]["loss"], rel=1e-6)
    assert summary["config"]["schedule"] == {
        "linear_decay": {"final": 0.0, "warmup_epochs": 0.0, "warmup_steps": 2},
    }  # total_steps is not an option


def test_a_metric_of_a_plugin_is_shown_and_stored_like_those_of_the_package(here: Path) -> None:
    (here / "mine.py").write_text(FAMILY)
    shown = invoke("train", str(write_config(here, OF_RINGS)), "--output-dir", "run")
    assert shown.exit_code == 0, shown.output
    summary = json.loads((here / "run/summary.json").read_text())
    *_, epoch, test = map(json.loads, (here / "run/metrics.jsonl").read_text().splitlines())
    assert summary["metrics"] == test["metrics"] == {"brier": pytest.approx(summary["metrics"]["brier"])}
    assert f"brier {summary['metrics']['brier']:.4f}" in " ".join(shown.stdout.split())
    assert f", brier {epoch['metrics']['brier']:.4f}" in shown.stderr
    call("report", "run", "--trust-plugins", "--device", "cpu")
    assert "brier" in (here / "run/report.html").read_text()
    again = json.loads(call("eval", "run", "--device", "cpu", "--trust-plugins", "--json"))
    assert again["metrics"] == pytest.approx(summary["metrics"])


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("points: 80", "points: 0", "3:34: data.dataset.rings.points: found 0, expected an integer in [1, 2^31)"),
        ("points: 80", "pionts: 80", "data.dataset.rings.pionts: unknown key; did you mean points?"),
        ("{rings: {points: 80}}", "rigns", "3:17: data.dataset: unknown data set 'rigns'; did you mean rings?"),
        ("[brier]", "[brir]", "training.metrics[0]: unknown metric 'brir'; did you mean brier?"),
        ("[brier]", "[brier, brier: 3]", "training.metrics[1] brier: found twice, expected each metric once"),
        (" test: 0.25,", "", "data.test: missing, "),
        (" test: 0.25,", " test: 0.25, header: true,", "header: an option of a CSV file, found the data set rings"),
    ],
)
def test_names_and_options_of_data_sets_and_metrics_are_checked(
    here: Path, right: str, wrong: str, problem: str
) -> None:
    (here / "mine.py").write_text(FAMILY)
    assert right in OF_RINGS
    assert problem in train(write_config(here, OF_RINGS.replace(right, wrong)), "--output-dir", "run", expect=2)


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("[rings]), None", "[rings])", "rings: the training part: found a NumPy array, expected a pair of arrays"),
        ("[rings]), None", "[rings[1:]]), None", "rings: the training part: labels: found 79 labels, expected 80"),
        (
            "return (rows, ",
            "return rows, (rows, ",
            "rings: load returned a tuple, expected a tuple of two: the training",
        ),
        ("2 * np.pi,", "2 * np.pie,", "AttributeError: module 'numpy' has no attribute 'pie'"),
    ],
)
def test_a_data_set_that_loads_something_else_is_reported_with_its_place(
    here: Path, right: str, wrong: str, problem: str
) -> None:
    assert right in FAMILY
    (here / "mine.py").write_text(FAMILY.replace(right, wrong))
    message = train(write_config(here, OF_RINGS), "--output-dir", "run", expect=2)
    assert problem in message
    assert f"{here}/mine.py:" in message


def test_a_loss_of_a_plugin_takes_classes_and_no_numbers(here: Path) -> None:
    (here / "mine.py").write_text(FAMILY)
    np.savez(here / "numbers.npz", x_train=np.ones((9, 36)), y_train=np.linspace(0, 1, 9))
    cfg = write_config(here, WITH_FAMILY)
    message = train(
        cfg, "--output-dir", "run", "--set", f"data={{path: {here}/numbers.npz, test: 0.3, batch_size: 4}}", expect=2
    )
    assert "loss: found focal for the numbers of y_train, expected mse, l1 or huber" in message


def test_gradients_of_a_network_of_plugins_are_checked(here: Path) -> None:
    (here / "mine.py").write_text(FAMILY)
    assert "all 5 checks passed" in call("gradcheck", write_config(here, WITH_FAMILY), "--device", "cpu")


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("return x * params", "return x[:, :2] * params", "mul: shapes (16, 2) and (16,)"),
        ('x * params["weight"], state', "x[:, :2], state", "forward returned float32[16, 2], expected float32[16, 16]"),
        (
            'return x * params["weight"], state',
            'return x * params["weight"]',
            "returned an array, expected a tuple of two: the output and the state",
        ),
        ('* params["weight"], state', '* params["weight"], {"n": 1}', "forward, in the state, returned an int"),
        ("        return shape\n", "        return shape[0]\n", "output_shape returned 16, expected the shape of one"),
        ("x * params[", "x * parms[", "NameError: name 'parms' is not defined"),
        ("x * params[", "ops.matmul(x, x) * params[", "matmul: "),
        ("np.full(shape, self.start, dtype)", "np.zeros(3, dtype)", "new_arrays returned {'weight': (3,)}, expected"),
        ("return -ops.mean(", "return -(", "returned float32[16], expected the mean loss, a float of shape ()"),
        ('return new, {"step": state["step"] + 1}', "return new, {}", "a tree of state of another structure"),
        ("return 1.0 - (1.0 - self.final) *", "return 2.0 if self.final == 0 else", "returned a float, expected an"),
        ("images=batch.images * kept", "images=batch.images[:1] * kept[:1]", "returned images float32[1, 1, 6, 6]"),
        (
            "np.square(errors).sum(axis=1).mean()",
            "np.square(errors)",
            "returned a NumPy array, expected a finite number, or",
        ),
        (
            "np.square(errors).sum(axis=1).mean()",
            "np.nan",
            "brier: returned nan, expected a finite number, or a ByClass",
        ),
        ("return x * params", "1 / 0; return x * params", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_mistake_in_a_plugin_is_reported_in_one_line_with_its_place(
    here: Path, right: str, wrong: str, problem: str
) -> None:
    assert right in FAMILY
    (here / "mine.py").write_text(FAMILY.replace(right, wrong))
    message = train(write_config(here, WITH_FAMILY), "--output-dir", "run", expect=2)
    assert problem in message
    assert f"{here}/mine.py:" in message


# Broken plug-ins


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("import adtrain as ad", "import adtrain as", "mine.py:1: invalid syntax"),
        ("import adtrain as ad", "import adtrain as ad, nothing_such", "mine.py:1: ModuleNotFoundError: No module"),
        ("ad.nn.Module", "object", "mine.py:5: layer mish: Mish is not a subclass of adtrain.nn.module.Module"),
        ("class Mish(ad.nn.Module):", "def mish(x):", "mine.py:5: layer mish: found a function, expected a class"),
        ("def forward", "def backward", "mine.py:5: layer mish: Mish has no method forward"),
        ("Positive = 1.0", "list = ()", "mine.py:5: layer mish: beta has the type list, expected int, float, bool"),
        ("Positive = 1.0", "Positve = 1.0", "NameError: name 'Positve' is not defined"),
        ('"mish"', '"relu"', "mine.py:5: layer relu: the name is taken by adtrain.nn.activation.ReLU; choose another"),
        (
            '"mish"',
            '"model"',
            "layer 'model': expected lower-case letters, digits and _, not a key of configs",
        ),
        ('"mish"', '"Mish"', "layer 'Mish': expected lower-case letters"),
        ('("mish")', "", 'mine.py:5: layer: found Mish in place of the name, expected a decorator with ("name")'),
        ("import adtrain as ad", "import sys, adtrain as ad; sys.exit()", "mine.py:1: SystemExit"),
    ],
)
def test_a_broken_plugin_is_reported_in_one_line(here: Path, right: str, wrong: str, message: str) -> None:
    assert right in LAYER
    found = build(here, "mish", LAYER.replace(right, wrong))
    assert found.startswith("tiny.yaml:2:11: plugins[0]: ")
    assert message in found
    assert len(found.splitlines()) == 1


def test_a_name_that_is_taken_twice_is_refused_with_both_places(here: Path) -> None:
    (here / "other.py").write_text(LAYER)
    cfg = write_plugged(here)
    cfg.write_text(cfg.read_text().replace("[mine.py]", "[mine.py, other.py]"))
    assert train(cfg, expect=2) == (
        f"{cfg}:2:20: plugins[1]: {here}/other.py:5: layer mish: the name is taken at {here}/mine.py:5; "
        f"choose another at {here}/other.py:5"
    )
    assert "the name is taken at" in build(here, "mish", LAYER + LAYER.partition("\n\n\n")[2])


def test_a_changed_plugin_replaces_what_it_registered(here: Path) -> None:
    config.load(write_plugged(here))
    assert "known: gamma" in build(here, "mish: {beta: 1}", LAYER.replace("beta", "gamma"))


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("[none.py]", "2:11: plugins[0]: none.py: found nothing, expected a Python file"),
        (
            "[none]",
            "2:11: plugins[0]: none: found neither a name that ends in .py nor an installed plug-in; installed: ",
        ),
        ("mine.py", "2:10: plugins: found 'mine.py', expected a list"),
        ("[1]", "2:11: plugins[0]: found 1, expected a mapping"),
        ("[{file: mine.py, sha: 1}]", "2:27: plugins[0].sha: unknown key; did you mean sha256?"),
        ("[{file: mine.py, sha256: 1}]", "2:35: plugins[0].sha256: found 1, expected 64 hexadecimal digits"),
        (f"[{{file: mine.py, sha256: {'a' * 64}}}]", "found the SHA-256 "),
        (
            f"[{{file: mine.py, files: {{a.c: {'a' * 64}}}}}]",
            f"a.c: found the SHA-256 none (no kernel reads it), expected {'a' * 64}",
        ),
        ("[mine.py, ./mine.py]", "2:20: plugins[1]: found a second plug-in mine.py"),
    ],
)
def test_plugins_that_a_config_names_wrongly(here: Path, named: str, message: str) -> None:
    cfg = write_plugged(here)
    cfg.write_text(cfg.read_text().replace("[mine.py]", named))
    assert message in train(cfg, expect=2).replace(f"{here}/", "")


def test_a_class_that_is_registered_twice_by_one_line_is_replaced(here: Path) -> None:
    for default in (1.0, 2.0):

        @ad.register.layer("again")
        class Again(ad.nn.ReLU):
            factor: Annotated[float, Field(ge=0)] = default
            how: Literal["up", "down"] = "up"

    assert FAMILIES["layer"]["again"].target is Again
    with pytest.raises(OptionError, match=r"the name is taken at .*test_plugins.py:\d+; choose another at .*\.py"):
        ad.register.layer("again")(Again)
    with pytest.raises(OptionError, match=r"not a subclass of adtrain\.augment\.batch\.Augmentation"):
        ad.register.augment("bright")(Again)


# Where plug-ins are named


def test_the_command_line_can_name_a_plugin(here: Path) -> None:
    cfg = write_plugged(here)
    cfg.write_text(cfg.read_text().replace("plugins: [mine.py]\n", ""))
    assert "unknown layer 'mish'" in train(cfg, expect=2)
    for command in (["summary", cfg], ["graph", cfg, "-o", "g.txt"], ["gradcheck", cfg, "--device", "cpu"]):
        assert "unknown layer" in call(*command, expect=2)
        call(*command, "--plugin", "mine.py")
        del FAMILIES["layer"]["mish"]
        plugins._loaded.clear()
    train(cfg, "--set", "plugins=[mine.py]", "--output-dir", "set")
    train(cfg, "--plugin", "mine.py", "--output-dir", "run")
    assert config.load("run/config.yaml", run_plugin=training.Trust(copies=True).run).plugins is not None


def test_paths_of_plugins_begin_in_the_folder_of_the_config(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = write_plugged(here)
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    config.load(cfg)


def test_an_installed_plugin_is_named_by_its_entry_point(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = here / "site" / "mish_layers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LAYER)
    about = here / "site" / "mish_layers-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mish-layers\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[adtrain.plugins]\nmish_layers = mish_layers\n")
    monkeypatch.syspath_prepend(str(here / "site"))
    importlib.invalidate_caches()
    cfg = write_plugged(here)
    cfg.write_text(cfg.read_text().replace("mine.py", "mish_layers"))
    train(cfg, "--output-dir", "run")
    assert not (here / "run/plugins").exists()
    assert "--plugin mish_layers" in call("eval", "run", "--device", "cpu", expect=2)
    call("eval", "run", "--device", "cpu", "--plugin", "mish_layers")


# Commands with plug-ins


def test_bench_runs_a_plugin_of_the_command_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = write_plugged(here)
    cfg.write_text(cfg.read_text().replace("plugins: [mine.py]\n", ""))
    bench = ["bench", cfg, "--device", "cpu"]
    assert "unknown layer" in call(*bench, expect=2)
    monkeypatch.setattr(step, "result", lambda path, *_: pytest.fail(config.load(path).name))
    with pytest.raises(pytest.fail.Exception, match="tiny"):
        invoke(*map(str, bench), "--plugin", "mine.py")


@pytest.mark.needs_torch
def test_a_peer_has_no_loss_of_a_plugin(here: Path) -> None:
    (here / "mine.py").write_text(FAMILY)
    cfg = config.load(write_config(here, WITH_FAMILY))
    with pytest.raises(Unsupported, match="no counterpart of the loss focal in PyTorch"):
        torch_network.loss(cfg, None)


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        (
            "    vjp=lambda ct, out, x: (2.0 * ct,),\n",
            "",
            "custom_op doubled has no vjp, and is differentiated; give vjp=, which returns None",
        ),
        ("(2.0 * ct,)", "(2.0 * ct, ct)", "doubled: vjp returned 2, expected a tuple of 1"),
        ("numpy=lambda x: x + x", "numpy=lambda x: np.sum(x)", "doubled"),
        ("ad.ArrayType(x.shape, x.dtype)", "ad.ArrayType(x.shap, x.dtype)", "mine.py:19: AttributeError: "),
    ],
)
def test_a_broken_operation_in_a_layer_is_reported_in_one_line(
    here: Path, right: str, wrong: str, problem: str
) -> None:
    text = LAYER + OPERATION
    assert right in text
    train(write_plugged(here, "doubled", text), "--output-dir", "right")
    message = train(write_plugged(here, "doubled", text.replace(right, wrong)), "--output-dir", "wrong", expect=2)
    assert problem in message


def test_trust_plugins_is_for_runs(here: Path) -> None:
    cfg = write_plugged(here)
    assert "--trust-plugins is for --resume RUN only" in train(cfg, "--trust-plugins", expect=2)
