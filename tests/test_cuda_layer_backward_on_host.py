"""The gradients and the update of a layer in one kernel, compiled for the CPU: against NumPy, and by member."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_host import Host, host
from test_cuda_members_on_host import BY_MEMBER
from test_cuda_resident_steps_on_host import arguments_of, step_program
from test_cuda_streamed_layer_on_host import SMALL_SHARED, stepwise

from adtrain.backends.cuda.forms.streamed_layer import LAYER_BACKWARD
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.kernel import Target
from adtrain.core.program import Equation, Program
from adtrain.passes.plan_memory import plan_memory

__all__ = ["host"]

TWO_HIDDEN = "model.layers=[{linear: 64}, relu, {linear: 32}, relu, {linear: 10}]"


def fused(program: Program) -> list[Equation]:
    """The `layer_backward` equations."""
    return [e for e in program.equations if e.form == LAYER_BACKWARD]


def program_of(count: int, *settings: str, target: Target = SMALL_SHARED) -> Program:
    return step_program(count, *settings, target=target)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ((TWO_HIDDEN, "optimizer={sgd: {lr: 0.1, momentum: 0.9}}"), 1),
        pytest.param(
            ("model.layers=[{linear: 48}, tanh, {linear: 80}, relu, {linear: 96}, tanh, {linear: 10}]",),
            2,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_fused_gradients_and_updates_match_numpy(settings: tuple[str, ...], count: int, host: Host) -> None:
    host.lowering = Lowering(SMALL_SHARED)
    program = program_of(2, *settings)
    assert len(fused(program)) == count
    stepwise(host, program, arguments_of(program), 1)


@pytest.mark.exhaustive
def test_the_bytes_of_a_member_do_not_depend_on_the_number_of_members(host: Host) -> None:
    host.lowering = Lowering(SMALL_SHARED)
    three, one = program_of(3, TWO_HIDDEN), program_of(1, TWO_HIDDEN)
    known = arguments_of(three)
    third = {
        w: np.ascontiguousarray(known[v][2:]) if v.members else known[v]
        for v, w in zip((*three.inputs, *three.constants), (*one.inputs, *one.constants), strict=True)
    }
    for x, y in zip(stepwise(host, three, known, 1), stepwise(host, one, third, 1), strict=True):
        assert np.ascontiguousarray(x[2:] if x.shape != y.shape else x).tobytes() == y.tobytes()


def test_a_gradient_that_is_not_finite_gives_gradients_that_are_not_finite(host: Host) -> None:
    host.lowering = Lowering(SMALL_SHARED)
    program = program_of(1, TWO_HIDDEN)
    (e,) = fused(program)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=v.stored.shape).astype(v.type.dtype) for v in e.inputs]
    arrays[0][0, 3, 5] = np.inf
    for x in host.computed(e, None, arrays)[1:]:
        assert not np.isfinite(x[0, 5]).any()


def test_gradients_of_units_and_inputs_of_any_magnitude_are_as_exact_as_float32(host: Host) -> None:
    host.lowering = Lowering(SMALL_SHARED)
    (e,) = fused(program_of(1, TWO_HIDDEN, "optimizer={sgd: {lr: 0.1, momentum: 0.9}}"))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=v.stored.shape).astype(v.type.dtype) for v in e.inputs]
    of_inputs, of_weights = e.params["body"].equations
    known = dict(zip(e.params["body"].inputs, arrays, strict=True))
    gradient, weights = (known[v] for v in of_inputs.params["body"].equations[0].inputs)
    x = known[of_weights.params["body"].equations[0].inputs[1]]
    gradient *= 10.0 ** rng.integers(-12, 1, (1, 1, gradient.shape[2]))
    x *= 10.0 ** rng.integers(-12, 1, (1, 1, x.shape[2]))
    for v, array in known.items():
        if (array.shape == weights.shape and array is not weights) or (v in of_inputs.inputs and not v.type.shape):
            array[...] = 0  # the momentum, and the constants of the gradient of relu
    found = host.computed(e, None, arrays)
    momentum = min((1, 2), key=lambda i: np.abs(found[i]).min())
    expected = gradient[0].T.astype(np.float64) @ x[0]
    bound = np.abs(gradient[0]).T.astype(np.float64) @ np.abs(x[0])
    assert (np.abs(found[momentum][0] - expected) <= 3e-7 * bound).all()
    expected = (gradient[0].astype(np.float64) @ weights[0]) * (x[0] > 0)
    bound = np.abs(gradient[0]).astype(np.float64) @ np.abs(weights[0])
    assert (np.abs(found[0][0] - expected) <= 3e-7 * bound).all()


@pytest.mark.parametrize(
    ("settings", "target"),
    [
        ((TWO_HIDDEN, "data.batch_size=24"), SMALL_SHARED),
        (("model.layers=[{linear: 64}, relu, {linear: 40}, relu, {linear: 10}]",), SMALL_SHARED),
        (("model.layers=[{linear: 64}, relu, {linear: 10}]",), SMALL_SHARED),
        ((TWO_HIDDEN,), SMALL_SHARED._replace(capability=(7, 5))),
        ((TWO_HIDDEN,), SMALL_SHARED._replace(shared=8 << 10)),
    ],
)
def test_other_gradients_are_not_fused(settings: tuple[str, ...], target: Target) -> None:
    assert not fused(program_of(2, *settings, target=target))


def test_wide_hidden_layers_are_fused_on_an_h200() -> None:
    layers = "model.layers=[{linear: 512}, relu, {linear: 256}, relu, {linear: 10}]"
    program = step_program(2, layers, "data.batch_size=64", target=BY_MEMBER)
    (e,) = fused(program)
    (launch,) = Lowering(BY_MEMBER).launches(e)
    assert isinstance(launch, LaunchPlan)
    assert launch.size.blocks == (8, 2, 1)
    plan = plan_memory(program)
    assert all(plan.places[v].where == "input" for v in e.outputs[1:]), "the update is in place"
