"""Training on equations: derivatives against SymPy, residuals of exact solutions, runs, resumption, and errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_files import load
from hypothesis import given, settings
from hypothesis import strategies as st
from resumed_runs import check_same, resume_run, train

import adtrain as ad
from adtrain import config, nn, ops, training
from adtrain.config import ConfigError
from adtrain.config.equations import reference
from adtrain.core.array import Value
from adtrain.core.errors import AdtrainError
from adtrain.equations import evaluate
from adtrain.nn.module import Module, Params, Shape, State
from adtrain.training import RunFolder, equations, inputs, loop, model_file
from adtrain.training.equations import FUNCTIONS_OF_VALUES, EquationNetwork, derivatives, placed
from adtrain.training.evaluation import predictions
from adtrain.training.scores import SolutionScore

pytestmark = pytest.mark.unfused

DECAY = """\
name: decay
data:
  points: {t: [0, 2]}
  batch_size: 16
  sampling: sobol
  resample: never
  steps_per_epoch: 20
  test_points: 50
  reference: exp(-t)
model:
  input: [t]
  output: [u]
  layers: [{linear: 6}, tanh, {linear: 1}]
loss:
  - {equation: "u_t + u"}
  - {at: {t: 0}, equation: "u - 1"}
optimizer: {sequence: {first: {adam: {lr: 0.01}}, steps: 20, then: {lbfgs: {history: 3}}}}
training: {epochs: 4, precision: float64}
"""
"""An ordinary differential equation."""


def prepared(folder: Path, *overrides: str, text: str = DECAY) -> training.Experiment:
    return training.prepare(load(folder, text, *overrides))


def error_of(run: Path) -> float:
    """The error on the points of the evaluation."""
    (test,) = (line.test for line in training.read_metrics(run) if line.kind == "test")
    assert isinstance(test, SolutionScore)
    return test.error


def closed_form(which: int, where: Value) -> Value:
    """The functions whose derivatives SymPy computes in a test."""
    x, y = where[:, 0, 0, 0], where[:, 1, 0, 0]
    if which == 0:
        return ops.stack([ops.sin(2.0 * x) * ops.exp(-y) + ops.power(x, 3.0) * ops.square(y), x * y], axis=1)
    return ops.stack([ops.tanh(x + 0.5 * y), ops.cos(x * y) / (2.0 + y)], axis=1)


KEYS = st.sets(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda x: tuple(sorted(x)))),
    min_size=1,
    max_size=4,
)


@pytest.mark.needs_torch  # which needs SymPy
@settings(max_examples=10)
@given(st.integers(0, 1), KEYS)
def test_derivatives_to_order_four_are_those_of_sympy(which: int, keys: set[tuple[int, tuple[int, ...]]]) -> None:
    sympy: Any = import_module("sympy")

    x, y = sympy.symbols("x y")
    closed_forms = (
        (sympy.sin(2 * x) * sympy.exp(-y) + x**3 * y**2, x * y),
        (sympy.tanh(x + 0.5 * y), sympy.cos(x * y) / (2 + y)),
    )
    where = np.random.default_rng(1).uniform(0.2, 1.5, (3, 2))
    found = derivatives(lambda x: closed_form(which, x), ad.array(where.reshape(3, 2, 1, 1)), keys)
    for output, by in keys:
        expected = sympy.lambdify((x, y), sympy.diff(closed_forms[which][output], *((x, y)[i] for i in by)), "numpy")
        values = np.broadcast_to(expected(*where.T), (3,))
        np.testing.assert_allclose(found[output, by].numpy(), values, rtol=1e-9, atol=1e-9)


@dataclass(frozen=True)
class Exact(Module):
    """A layer whose output is a solution of Burgers' equation without viscosity, u = x / (1 + t), and one of the heat
    equation."""

    def output_shape(self, shape: Shape) -> Shape:
        return (2,)

    def forward(self, params: Params, state: State, x: Value, mode: nn.Mode) -> tuple[Value, State]:
        t, y = x[:, 0], x[:, 1]
        return ops.stack([y / (1.0 + t), ops.exp(-0.3 * t) * ops.sin(y)], axis=1), state


SYSTEM = """\
data: {points: {t: [1, 3], x: [-2, 5]}, batch_size: 32, test_points: 100, normalize: false}
model: {input: [t, x], output: [u, v], coefficients: {k: 0.3}, layers: [{linear: 2}]}
loss:
  - {equation: "u_t + u * u_x"}
  - {equation: "v_t - k * v_xx"}
  - {at: {t: 1}, equation: "v - exp(-0.3) * sin(x)"}
  - {at: {x: [-2, 5]}, equation: "u - x / (1 + t)"}
  - {at: {x: 0, t: 2}, equation: "u + v_xx + log(t / 2) + abs(x)"}
optimizer: adam
training: {epochs: 1, precision: float64}
"""


@pytest.mark.parametrize("normalize", [False, True])
def test_the_residual_of_an_exact_solution_is_zero(tmp_path: Path, normalize: bool) -> None:
    experiment = prepared(tmp_path, f"data.normalize={normalize}".lower(), text=SYSTEM)
    net = experiment.network
    assert isinstance(net, EquationNetwork)
    layers: list[Module] = [Exact()]
    if normalize:  # the network gets numbers in [-1, 1], of which the layer makes those of the variables
        layers.insert(0, Scaled())
    exact = replace(net, model=nn.Sequential(*layers))
    images = ad.array(np.asarray(experiment.train.images, np.float64))
    params: Any = {"coefficients": {"k": ad.array(np.float64(0.3))}}
    for term in exact.terms:
        where = placed(images, term.fixed, exact.offset)
        (residual,) = exact.residuals(params, {}, where, nn.Mode(training=False), [term])
        np.testing.assert_allclose(residual.numpy(), np.zeros(32), atol=1e-7)
    wrong: Any = {"coefficients": {"k": ad.array(np.float64(0.4))}}
    (residual,) = exact.residuals(wrong, {}, images, nn.Mode(training=False), [exact.terms[1]])
    assert np.abs(residual.numpy()).max() > 1e-2


@dataclass(frozen=True)
class Scaled(Module):
    """The variables of SYSTEM from the network's input."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def forward(self, params: Params, state: State, x: Value, mode: nn.Mode) -> tuple[Value, State]:
        return x * np.array([1.0, 3.5]) + np.array([2.0, 1.5]), state


@dataclass(frozen=True)
class Known(Module):
    """A layer whose outputs are expressions of its inputs, the variables of `names`."""

    expressions: Any
    names: Any

    def output_shape(self, shape: Shape) -> Shape:
        return (len(self.expressions),)

    def forward(self, params: Params, state: State, x: Value, mode: nn.Mode) -> tuple[Value, State]:
        values = {name: x[:, i] for i, name in enumerate(self.names)}
        return ops.stack([evaluate(each, values, FUNCTIONS_OF_VALUES) for each in self.expressions], axis=1), state


@pytest.mark.parametrize("name", ["poisson", "wave", "schroedinger"])
def test_the_solution_that_a_packaged_config_knows_solves_its_equations(name: str) -> None:
    small = "data.batch_size=16", "data.test_points=25", "data.normalize=false", "training.precision=float64"
    experiment = training.prepare(config.load(name, small))
    net = experiment.network
    assert isinstance(net, EquationNetwork)
    exact = replace(net, model=nn.Sequential(Known(reference(experiment.config), net.names.variables)))
    images = ad.array(np.asarray(experiment.train.images, np.float64))
    for term in exact.terms:
        where = placed(images, term.fixed, exact.offset)
        (residual,) = exact.residuals({}, {}, where, nn.Mode(training=False), [term])
        # At the ends of schroedinger the solution falls like exp(-|x|), up to terms in exp(-3|x|).
        atol = 1e-4 if name == "schroedinger" and term.fixed else 1e-9
        np.testing.assert_allclose(residual.numpy(), np.zeros(16), atol=atol)


@pytest.mark.parametrize("name", ["burgers", "navier-stokes", "inverse-heat"])
def test_a_step_of_a_packaged_config_lowers_the_loss(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).random((20, 3))
    Path("heat.csv").write_text("t,x,u\n" + "".join(f"{t},{x},{u}\n" for t, x, u in rows))
    small = "data.batch_size=32", "data.test_points=25", "optimizer={adam: {lr: 0.001}}"
    experiment = training.prepare(config.load(name, small), training.Mode.EAGER)
    state, seed = experiment.initial_state("cpu"), experiment.seed("cpu")
    images, labels = (ad.array(np.asarray(x)) for x in (experiment.train.images, experiment.train.labels))
    losses = []
    for _ in range(2):
        state, metrics = experiment.train_step(state, seed, images, labels, ad.array(np.arange(32)))
        losses.append(float(metrics.loss))
    assert losses[1] < losses[0]


def test_terms_with_several_values_take_them_in_turns() -> None:
    points = ad.array(np.arange(10.0).reshape(5, 2, 1, 1))
    found = placed(points, [(1, (7.0, 8.0))], (0.0, 0.0)).numpy()[:, :, 0, 0]
    assert found.tolist() == [[0, 7], [2, 8], [4, 7], [6, 8], [8, 7]]


@pytest.mark.parametrize(
    "first",
    [
        "{linear: 6}, tanh",
        pytest.param("{fourier_features: {frequencies: 4, scale: 0.1}}", marks=pytest.mark.exhaustive),
    ],
)
def test_a_network_learns_the_solution_and_predicts_it_at_points(first: str, tmp_path: Path) -> None:
    """The error is the relative L2 norm at the points of the evaluation."""
    experiment = prepared(tmp_path, "training.epochs=6", f"model.layers=[{first}, {{linear: 1}}]")
    assert train(experiment, RunFolder.create(experiment, tmp_path / "run"))
    assert error_of(tmp_path / "run") < 0.02
    trained, test = model_file.load(tmp_path / "run"), experiment.test
    found = predictions(trained.network, trained.params, trained.statistics, test.images, "cpu")
    expected = np.exp(-np.linspace(0, 2, 50))[:, np.newaxis]
    np.testing.assert_allclose(test.labels, expected, rtol=1e-12)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error_of(tmp_path / "run") == pytest.approx(error, rel=1e-9)
    (tmp_path / "points.csv").write_text("t\n0\n1\n2\n")
    images = inputs.read(tmp_path / "points.csv", trained).images
    found = predictions(trained.network, trained.params, trained.statistics, images, "cpu")
    np.testing.assert_allclose(found[:, 0], np.exp([0, -1, -2]), atol=0.05)


@pytest.mark.parametrize("form", ["csv", "npy"])
def test_a_table_can_have_the_solution(tmp_path: Path, form: str) -> None:
    rows = np.array([[0.5, 0.6], [1.0, 0.4], [2.0, 0.1]])
    path = tmp_path / f"solution.{form}"
    if form == "npy":
        np.save(path, rows)
    else:
        path.write_text("u,t\n" + "".join(f"{u},{t}\n" for t, u in rows))
    experiment = prepared(tmp_path, f"data.reference={path}")
    np.testing.assert_array_equal(experiment.test.labels, rows[:, 1:])
    np.testing.assert_array_equal(np.asarray(experiment.test.images)[:, 0, 0, 0], rows[:, 0].astype(np.float32))


@pytest.mark.exhaustive
def test_a_coefficient_is_learnt_from_measurements(tmp_path: Path) -> None:
    t = np.linspace(0, 2, 15)
    np.save(tmp_path / "measured.npy", np.stack([t, np.exp(-0.7 * t)], axis=1))
    loss = "loss=[{equation: 'u_t + k * u'}]"
    settings = "model.coefficients={k: 2.0}", f"data.measurements={tmp_path / 'measured.npy'}", loss
    experiment = prepared(tmp_path, *settings, "data.reference=null", "training.epochs=10")
    assert train(experiment, RunFolder.create(experiment, tmp_path / "run"))
    trained = model_file.load(tmp_path / "run")
    assert float(trained.params["coefficients"]["k"]) == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize("key", ["reference", "measurements"])
def test_points_of_a_table_outside_the_box_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    for last, found in ((2.0, ""), (2000.0, "table.npy: found 1 point outside [0, 2], such as [2000.0] in row 1: the")):
        np.save(tmp_path / "table.npy", np.array([[0.0, 1.0], [last, 0.5]]))
        prepared(tmp_path, "data.reference=null", f"data.{key}={tmp_path / 'table.npy'}")
        assert found in caplog.text
        assert bool(found) == bool(caplog.text)


def test_a_decimal_comma_in_a_table_of_points_is_an_error_without_advice(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text('t,u\n0.5,"0,5"\n')
    with pytest.raises(ad.AdtrainError, match=r"found '0,5' in column 1 \(u\), expected a finite number such as 1\.5$"):
        prepared(tmp_path, "data.reference=null", f"data.measurements={tmp_path / 'table.csv'}")


ADAPTIVE = "data.resample=step", "data.resample_until=20", "data.adaptive=true", "data.sampling=uniform"


@pytest.mark.parametrize(
    "settings", [pytest.param((), id="fixed", marks=pytest.mark.exhaustive), pytest.param(ADAPTIVE, id="adaptive")]
)
def test_a_run_stopped_and_resumed_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    experiment = prepared(tmp_path, *settings, "training.epochs=2")
    assert train(experiment, RunFolder.create(experiment, tmp_path / "whole"))
    assert not train(experiment, RunFolder.create(experiment, tmp_path / "stopped"), stop_call=13)
    assert not resume_run(tmp_path / "stopped", experiment, stop_call=11)
    assert resume_run(tmp_path / "stopped", experiment)
    check_same(tmp_path / "whole", tmp_path / "stopped")


def points_of(folder: Path, *settings: str) -> list[np.ndarray]:
    """The points of three steps."""
    experiment = prepared(folder, "optimizer=adam", *settings, text=DECAY.replace("sobol", "uniform"))
    (change,) = experiment.augmentations
    images = ad.array(np.asarray(experiment.train.images))
    found = []
    for step in (0, 1, 25):
        batch = ad.augment.Batch(images, images, experiment.network.unit, epoch=ad.array(np.int64(step // 20)))
        seed = experiment.config.training.seed
        found.append(change(batch, ops.rng_state(seed, step)).images.numpy())
    return found


@pytest.mark.parametrize("sampling", ["uniform", "sobol", "latin_hypercube"])
def test_points_are_drawn_when_the_config_says(tmp_path: Path, sampling: str) -> None:
    def equal(*settings: str) -> list[bool]:
        first, second, third = points_of(tmp_path, f"data.sampling={sampling}", *settings)
        for found in (first, second, third):
            assert (found >= 0).all()
            assert (found < 2).all()
        return [np.array_equal(first, second), np.array_equal(first, third)]

    assert equal("data.resample=never") == [True, True]
    assert equal("data.resample=epoch") == [True, False]
    assert equal("data.resample=step") == [False, False]
    first, *_ = points_of(tmp_path, f"data.sampling={sampling}", "data.resample=never")
    other, *_ = points_of(tmp_path, f"data.sampling={sampling}", "data.resample=never", "training.seed=1")
    assert not np.array_equal(first, other)


def test_points_with_large_residuals_are_kept(tmp_path: Path) -> None:
    experiment = prepared(tmp_path, *ADAPTIVE[:3], "data.resample_until=1")
    net = experiment.network
    rng = np.random.default_rng(0)
    kept, fresh = (ad.array(rng.random((4, 1, 1, 1))) for _ in range(2))
    batch = ad.augment.Batch(fresh, fresh, net.unit, kept=kept)
    outputs = None, ad.array(np.array([0.0, 4.0, 1.0, 9.0]))  # the mean of the roots is 1.5
    found = net.kept_points(outputs, batch, ad.array(np.int64(0))).numpy()  # type: ignore[arg-type]
    expected = np.where(np.array([False, True, False, True]).reshape(4, 1, 1, 1), kept.numpy(), fresh.numpy())
    np.testing.assert_array_equal(found, expected)
    later = net.kept_points(outputs, batch, ad.array(np.int64(1))).numpy()  # type: ignore[arg-type]
    np.testing.assert_array_equal(later, kept.numpy())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loss=[{equation: u_t + w}]"], r"--set loss: loss\[0\].equation: unknown name w; known: t, u, pi, sin"),
        (
            ["loss=[{equation: u_t + u}]"],
            "found u_t, expected a condition at a value of t, too: add a term such as {at: {t: 0}",
        ),
        (
            ["loss=[{equation: u_tt + u}, {at: {t: 0}, equation: u}]"],
            "found u_tt, expected 2 conditions at values of t, not 1: add a term at another value of t, or one with",
        ),
        (["loss=[{equation: u, at: {s: 0}}]"], r"loss\[0\].at.s: unknown variable; did you mean|variables: t"),
        (["loss=[{equation: u, at: {t: 3}}]"], r"found 3, expected a number in data.points.t, \[0, 2\]"),
        (["loss=mse"], "found mse, expected a list of equations for data.points"),
        (["data.points={t: [2, 0]}"], r"data.points.t: found \[2, 0\], expected a number and a greater one"),
        (["data.points={t: 2}"], "data.points.t: found 2, expected a number and a greater one"),
        (["data.points=2"], "data.points: found 2, expected variables with the least and the greatest number of each"),
        (["model.coefficients={k: x}"], "model.coefficients.k: found 'x', expected a number in"),
        (["data.points={tt: [0, 2]}"], "the name of one is a letter, which digits may follow"),
        (["loss=[{equation: 2 * t}]"], "found nothing that the training changes, expected u in it\n  2"),
        (["model.input=[x]"], r"model.input: found \[x\], expected the variables of data.points, each once: t"),
        (
            ["model.input=[1]"],
            r"model.input: found no names of variables, expected those of data.points for equations: \[t\]",
        ),
        (["model.output=[t]"], "model.output: found t, which is a variable, expected another name"),
        (["model.output=[pi]"], "model.output: found pi, which is a number"),
        (
            ["model.output=[u, v]", "data.reference=null"],
            r"found the output \[1\], expected \[2\], one for each of u, v",
        ),
        (["model.coefficients={k: 1}"], "model.coefficients: found k, which is in no equation"),
        (["data.reference=u"], "data.reference: unknown name u"),
        (["data.reference={v: exp(t)}"], "data.reference: found v, expected one expression for each of u"),
        (["data.adaptive=true"], "expected resample: step together with adaptive"),
        (["data.test=0.2"], "expected no test together with points"),
        (["data.validation=0.2"], "expected no validation together with points"),
        (["data.points=null", "data.dataset=mnist"], "expected points together with reference"),
        (["model.layers=[{linear: 6}, batch_norm1d, {linear: 1}]"], "found a layer with running statistics"),
        (["data.resample=step"], "found step, expected never, or data.resample_until of at most 20"),
        (["optimizer=lbfgs", "data.resample=epoch"], "found epoch, expected never: the optimizer lbfgs"),
        (["training.clip_norm=1"], "the optimizer sequence has a line search, which needs the gradient of the loss"),
        (["data.shards=2"], "data.shards: found 2, expected none"),
        (["parameter_groups=[no_decay]"], "sequence updates all parameters together"),
        (["data.reference=log(t)"], "found no finite number at t = 0"),
        (["data.reference=nothing.csv"], "nothing.csv: cannot be read"),
    ],
)
def test_a_mistake_is_an_error_that_names_the_key(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(AdtrainError, match=message):
        prepared(tmp_path, *settings)


VARIABLES, OUTPUTS = "txy", "uv"
IN_TAYLOR_MODE: dict[str, dict[str, int]] = {
    "u_t u_x u_xx": {},
    "u_t u_xx u_yy": {},
    "u_tx": {},
    "u_xx u_yy": {},
    "u_t v_t u_xx v_xx": {"x": 2},
    "u_x u_y v_x v_y u_xx u_yy v_xx v_yy": {"x": 2, "y": 2},
    "u_t u_xxx": {"x": 3},
    "u_tt u_xxxx": {"t": 2, "x": 4},
    "u_tx v_xxx": {"x": 3},
}
"""The variables by which derivatives are computed in Taylor mode, with their orders."""


def test_taylor_mode_is_chosen_for_many_variables() -> None:
    """The time of the choice does not grow with the number of sets of variables."""
    second = [(output, (i, i)) for output in range(2) for i in range(100)]
    assert equations._in_taylor_mode(second) == dict.fromkeys(range(100), 2)


@pytest.mark.parametrize("names", IN_TAYLOR_MODE)
def test_derivatives_are_those_of_reverse_mode(names: str) -> None:
    keys = [(OUTPUTS.index(name[0]), tuple(map(VARIABLES.index, name[2:]))) for name in names.split()]
    chosen = {VARIABLES[i]: order for i, order in equations._in_taylor_mode(keys).items()}
    assert chosen == IN_TAYLOR_MODE[names]
    rng = np.random.default_rng(0)
    a, b = (ad.array(rng.normal(size=shape)) for shape in ((3, 7), (7, 2)))

    def network(where: Value) -> Value:
        return ops.matmul(ops.tanh(ops.matmul(ops.reshape(where, (-1, 3)), a)), b)

    where = ad.array(rng.normal(size=(4, 3, 1, 1)))
    found, expected = derivatives(network, where, keys), equations._by_reverse_mode(network, where, keys)
    for key in keys:
        np.testing.assert_allclose(found[key].numpy(), expected[key].numpy(), rtol=1e-11, atol=1e-12, err_msg=str(key))


def test_layers_without_a_derivative_that_an_equation_needs_are_refused() -> None:
    where = ops.ones((2, 1, 1, 1), "float64")
    piecewise = lambda x: ops.relu(ops.reshape(x, (2, 1)) * 3.0)  # noqa: E731
    assert derivatives(piecewise, where, [(0, (0,))])[0, (0,)].numpy().tolist() == [3, 3]
    with pytest.raises(AdtrainError, match="loss: the derivatives of order 2 are 0 at all points, expected layers"):
        derivatives(piecewise, where, [(0, (0, 0))])


def test_an_error_shows_the_equation_with_a_caret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, DECAY.replace("u_t + u", "u_t + 2 * q"))
    head, text, caret = raised.value.lines
    assert head.startswith(f"{tmp_path / 'c.yaml'}:15:6: loss[0].equation: unknown name q")
    assert text[caret.index("^")] == "q"


def test_a_resolved_config_reads_back(tmp_path: Path) -> None:
    cfg = load(tmp_path, DECAY)
    (tmp_path / "again.yaml").write_text(config.dump(cfg))
    assert config.load(tmp_path / "again.yaml") == cfg


def test_lbfgs_needs_all_examples_in_a_batch(tmp_path: Path) -> None:
    from training_runs import prepare

    with pytest.raises(ConfigError, match=r"data.batch_size: found 10 of .* examples, expected all"):
        prepare(tmp_path, "optimizer=lbfgs", "data.batch_size=10")
