"""Schedules equal PyTorch's, keep their last value, and are float64 for every type of step.

Differences: after the end PyTorch's cosine rises again and OneCycleLR raises, while ours keep their last value; ours
do not change momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adtrain as ad
from adtrain.core.errors import OptionError
from adtrain.optim.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    MultiStep,
    OneCycle,
    Plateau,
    Polynomial,
    Schedule,
    Step,
    Trapezoid,
    Triangular,
    WarmUp,
)

ALL: list[Schedule] = [
    Constant(), Step(3, 0.5), MultiStep((2, 5)), Exponential(0.9), Cosine(20, 0.1), OneCycle(20), WarmUp(4, Cosine(16)),
    CosineRestarts(3, 2), Polynomial(20, 2.0), Triangular(4), Trapezoid(20), Plateau(5),
]  # fmt: skip


def factors(schedule: Schedule, steps: int) -> list[float]:
    return [schedule(ad.array(t)).item() for t in range(steps)]


def factors_in_torch(make: Callable[[Any], Any], steps: int) -> list[float]:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < steps - 1:  # OneCycleLR divides by 0 after some last steps
            scheduler.step()
    return found


def warm_up_in_torch(schedulers: Any, optimizer: Any) -> Any:
    rise = schedulers.LinearLR(optimizer, start_factor=1 / 6, total_iters=5)
    return schedulers.SequentialLR(optimizer, [rise, schedulers.CosineAnnealingLR(optimizer, 15)], milestones=[5])


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # raised inside PyTorch's SequentialLR
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Constant(), lambda s, o: s.ConstantLR(o, 1.0)),
        (Step(3, 0.5), lambda s, o: s.StepLR(o, 3, 0.5)),
        (Step(1, 0.0), lambda s, o: s.StepLR(o, 1, 0.0)),
        (MultiStep((2, 7), 0.3), lambda s, o: s.MultiStepLR(o, [2, 7], 0.3)),
        (Exponential(0.9), lambda s, o: s.ExponentialLR(o, 0.9)),
        (Cosine(20), lambda s, o: s.CosineAnnealingLR(o, 20)),
        (Cosine(20, 0.1), lambda s, o: s.CosineAnnealingLR(o, 20, 0.1)),
        (CosineRestarts(4), lambda s, o: s.CosineAnnealingWarmRestarts(o, 4)),
        (CosineRestarts(2, 3, 0.1), lambda s, o: s.CosineAnnealingWarmRestarts(o, 2, 3, 0.1)),
        (Polynomial(15, final=0.2), lambda s, o: s.LinearLR(o, 1.0, 0.2, 15)),
        (Polynomial(15, 2.0), lambda s, o: s.PolynomialLR(o, 15, 2.0)),
        (Polynomial(30, 0.7), lambda s, o: s.PolynomialLR(o, 30, 0.7)),
        (Triangular(4), lambda s, o: s.CyclicLR(o, 0.1, 1.0, 4, cycle_momentum=False)),
        (Triangular(3, 5, 0.0), lambda s, o: s.CyclicLR(o, 0.0, 1.0, 3, 5, cycle_momentum=False)),
        (Trapezoid(20, 0.5), lambda s, o: s.SequentialLR(o, [s.ConstantLR(o, 1.0), s.LinearLR(o, 1.0, 0.0, 10)], [10])),
        (OneCycle(20), lambda s, o: s.OneCycleLR(o, 1.0, 20, cycle_momentum=False)),
        (OneCycle(20, 0.0), lambda s, o: s.OneCycleLR(o, 1.0, 20, pct_start=0.0, cycle_momentum=False)),
        (OneCycle(20, 0.04), lambda s, o: s.OneCycleLR(o, 1.0, 20, pct_start=0.04, cycle_momentum=False)),
        (
            OneCycle(20, 0.45, 10.0, 50.0),
            lambda s, o: s.OneCycleLR(
                o, 1.0, 20, pct_start=0.45, div_factor=10.0, final_div_factor=50.0, cycle_momentum=False
            ),
        ),
        (WarmUp(5, Cosine(15)), warm_up_in_torch),
    ],
    ids=lambda x: repr(x) if isinstance(x, Schedule) else "",
)
@pytest.mark.needs_torch
def test_twenty_steps_equal_pytorch(ours: Schedule, theirs: Callable[[Any, Any], Any]) -> None:
    from torch.optim import lr_scheduler

    expected = factors_in_torch(lambda optimizer: theirs(lr_scheduler, optimizer), 20)
    np.testing.assert_allclose(factors(ours, 20), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10])
@pytest.mark.needs_torch
def test_short_schedules_equal_pytorch_at_every_step(steps: int) -> None:
    from torch.optim import lr_scheduler as s

    pairs: list[tuple[Schedule, Callable[[Any], Any]]] = []
    for pct in (0.0, 0.05, 0.1, 0.3, 0.5, 0.6, 0.9, 0.99):
        if pct * steps != 1:  # there PyTorch divides 0 by 0
            cycle = partial(s.OneCycleLR, max_lr=1.0, total_steps=steps, pct_start=pct, cycle_momentum=False)
            pairs.append((OneCycle(steps, pct), cycle))
    for factor in (0.0, 0.5, 1.0):
        pairs += [
            (Cosine(steps, factor), partial(s.CosineAnnealingLR, T_max=steps, eta_min=factor)),
            (Step(steps, factor), partial(s.StepLR, step_size=steps, gamma=factor)),
            (MultiStep((steps, steps), factor), partial(s.MultiStepLR, milestones=[steps, steps], gamma=factor)),
            (Exponential(factor), partial(s.ExponentialLR, gamma=factor)),
        ]
    for ours, theirs in pairs:
        expected = factors_in_torch(theirs, steps)
        np.testing.assert_allclose(factors(ours, steps), expected, rtol=1e-12, atol=1e-15, err_msg=repr(ours))


def test_one_cycle_whose_rise_ends_at_step_0_starts_at_the_peak() -> None:
    assert factors(OneCycle(2, 0.5), 3) == pytest.approx([1.0, 1 / 25e4, 1 / 25e4])


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_a_factor_is_a_float64_scalar_in_0_to_1(schedule: Schedule) -> None:
    for dtype in (np.int64, np.int32):
        factor = schedule(ad.array(7, dtype))
        assert factor.shape == ()
        assert factor.dtype == np.float64
    assert all(0 <= factor <= 1 for factor in factors(schedule, 30))


@pytest.mark.parametrize(
    ("schedule", "last"),
    [
        (Cosine(4, 0.1), 0.1),
        (OneCycle(4), 1 / 25e4),
        (Polynomial(4, 3.0, 0.1), 0.1),
        (Trapezoid(4, 0.5, 0.1), 0.1),
    ],
    ids=repr,
)
def test_the_last_value_is_kept_after_the_end(schedule: Schedule, last: float) -> None:
    np.testing.assert_allclose(factors(schedule, 8)[4:], last, rtol=1e-12)


@pytest.mark.parametrize("total_steps", [1, 2, 3])
@pytest.mark.parametrize("pct_start", [0.0, 0.3, 0.9])
def test_one_cycle_of_up_to_three_steps_is_finite_and_ends_low(total_steps: int, pct_start: float) -> None:
    found = factors(OneCycle(total_steps, pct_start), total_steps + 2)
    assert np.isfinite(found).all()
    assert found[-1] == pytest.approx(1 / 25e4)


@settings(max_examples=15)
@given(
    losses=st.lists(st.sampled_from([0.5, 0.9, 0.99999, 1.0, 1.1, 2.0]), min_size=1, max_size=15),
    patience=st.integers(0, 3), factor=st.sampled_from([0.1, 0.5]), lowest=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
@pytest.mark.needs_torch
def test_plateau_equals_pytorch_after_each_epoch(
    losses: list[float], patience: int, factor: float, lowest: float
) -> None:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kind, options = torch.optim.lr_scheduler.ReduceLROnPlateau, {"patience": patience, "min_lr": lowest, "eps": 0}
    theirs = kind(optimizer, factor=factor, **options)
    ours = Plateau(3, factor, patience, 1e-4, lowest)
    state = ours.init()
    for epoch, loss in enumerate(losses):
        for i in range(3):
            state = ours.updated(state, ad.array(loss * (i + 1) / 6), ad.array(np.int64(3 * epoch + i)))
        theirs.step(loss)
        assert state["factor"].item() == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


def test_trapezoid_after_a_warm_up_is_stable_and_decays_over_its_last_part() -> None:
    found = factors(WarmUp(3, Trapezoid(8, 0.5, 0.2)), 13)
    np.testing.assert_allclose(found, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    np.testing.assert_allclose(factors(Trapezoid(5, 0.0), 7), [1, 1, 1, 1, 1, 0, 0])


def test_warm_up_rises_linearly_to_the_first_factor_of_the_next_schedule() -> None:
    np.testing.assert_allclose(factors(WarmUp(4, Constant()), 6), [0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    np.testing.assert_allclose(factors(WarmUp(0, Exponential(0.5)), 3), [1.0, 0.5, 0.25])
    assert factors(WarmUp(3, Exponential(0.5)), 6)[3:] == [1.0, 0.5, 0.25]


def test_step_schedule_is_exact_at_large_steps_and_at_boundaries() -> None:
    assert Step(7, 1.0 - 1e-9)(ad.array(7 * 10**9)).item() == pytest.approx((1.0 - 1e-9) ** 10**9, rel=1e-12)
    periods = [Step(49, 0.5)(ad.array(49 * k + d)).item() for k in range(1, 30) for d in (-1, 0)]
    assert periods == [0.5 ** (k + d) for k in range(1, 30) for d in (-1, 0)]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_a_traced_step_has_the_same_factor(schedule: Schedule) -> None:
    """Reading the number out of a traced step would raise."""
    factor, _ = ad.vjp(schedule, ad.array(3.0, "float64"))
    assert factor.item() == schedule(ad.array(3)).item()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Step(0), "step: step_size is 0, expected an integer in [1, 2^31)"),
        (lambda: Step(3, float("nan")), "step: gamma is nan, expected a number in [0, 3.4e38]"),
        (
            lambda: MultiStep((3, -1)),
            "multistep: milestones is (3, -1), expected a tuple of 1 or more integers in [1, 2^31)",
        ),
        (lambda: Exponential(-0.5), "exponential: gamma is -0.5, expected a number in [0, 3.4e38]"),
        (lambda: Cosine(0), "cosine: total_steps is 0, expected an integer in [1, 2^31)"),
        (lambda: OneCycle(10, 1.0), "one_cycle: pct_start is 1.0, expected a number in [0, 1)"),
        (lambda: OneCycle(10, div_factor=0.0), "one_cycle: div_factor is 0.0, expected a number in [1, 3.4e38]"),
        (lambda: WarmUp(-1, Constant()), "warmup: steps is -1, expected an integer in [0, 2^31)"),
    ],
)
def test_the_error_of_an_invalid_option(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert str(caught.value) == message


def test_every_schedule_has_a_name() -> None:
    assert {type(schedule) for schedule in ALL} == {*SCHEDULES.values(), WarmUp}
