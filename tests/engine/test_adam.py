from typing import Any

import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from viva.engine.adam import AdamW, check_adam

settings_of_steps = st.lists(
    st.tuples(
        st.sampled_from([1e-3, 0.1]),
        st.sampled_from([0.0, 0.9]),
        st.sampled_from([0.95, 0.999]),
        st.sampled_from([1e-12, 1e-2]),
        st.sampled_from([0.0, 0.1]),
        st.sampled_from([0.0, 0.5, 100.0]),
    ),
    min_size=1,
    max_size=5,
)


def pair() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(4, 3, generator=generator)) for name in "ab"}


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@given(settings_of_steps)
def test_steps_are_those_of_torch(steps: list[Any]) -> None:
    ours, theirs = pair(), pair()
    optimizer, reference = AdamW(ours), torch.optim.AdamW(theirs.values())
    for number, (lr, beta1, beta2, eps, decay, clip) in enumerate(steps):
        set_gradients(ours, number)
        set_gradients(theirs, number)
        for group in reference.param_groups:
            group.update(lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip or float("inf"))
        reference.step()
        metrics = optimizer.step(
            tinker.AdamParams(
                learning_rate=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, grad_clip_norm=clip
            )
        )
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    parameters = pair()
    optimizer = AdamW(parameters)
    set_gradients(parameters, 0)
    optimizer.step(tinker.AdamParams())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    state = {name: value.clone() for name, value in optimizer.state().items()}
    set_gradients(parameters, 1)
    assert parameters["b"].grad is not None
    parameters["b"].grad[0, 0] = bad
    with pytest.raises(FloatingPointError, match="weights are unchanged"):
        optimizer.step(tinker.AdamParams())
    assert optimizer.num_steps == 1
    assert all(torch.equal(parameters[name], value) for name, value in before.items())
    assert all(torch.equal(optimizer.state()[name], value) for name, value in state.items())


def test_a_restored_optimizer_goes_on_bit_for_bit() -> None:
    whole, first = pair(), pair()
    optimizer, started = AdamW(whole), AdamW(first)
    for number in range(3):
        for parameters, stepper in ((whole, optimizer), (first, started)):
            set_gradients(parameters, number)
            stepper.step(tinker.AdamParams(learning_rate=0.1))
    resumed = AdamW(first)
    resumed.load(started.state(), started.num_steps)
    for parameters, stepper in ((whole, optimizer), (first, resumed)):
        set_gradients(parameters, 7)
        stepper.step(tinker.AdamParams(learning_rate=0.1))
    assert all(torch.equal(whole[name], first[name]) for name in whole)


def test_a_state_of_other_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mean\.c"):
        AdamW(pair()).load({"mean.c": torch.zeros(2)}, 1)


NO_NUMBERS = [float("nan"), float("inf"), float("-inf")]
negative = st.floats(max_value=0.0, exclude_max=True)
refused = st.one_of(
    st.tuples(
        st.sampled_from(["learning_rate", "weight_decay", "grad_clip_norm"]),
        negative | st.sampled_from(NO_NUMBERS),
    ),
    st.tuples(
        st.sampled_from(["beta1", "beta2"]), negative | st.floats(min_value=1) | st.sampled_from(NO_NUMBERS)
    ),
    st.tuples(st.just("eps"), st.floats(max_value=1e-39) | st.sampled_from(NO_NUMBERS)),
)


@given(refused)
def test_settings_that_are_no_numbers_or_out_of_range_are_refused(setting: tuple[str, float]) -> None:
    name, value = setting
    with pytest.raises(ValueError, match=f"{name} must be .*; got "):
        check_adam(tinker.AdamParams(**{name: value}))


@given(
    st.floats(0, 10),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
    st.floats(1e-37, 1),
    st.floats(0, 0.1),
    st.floats(0, 1e6),
)
def test_settings_that_are_taken_leave_weights_that_are_numbers(
    rate: float, beta1: float, beta2: float, eps: float, decay: float, clip: float
) -> None:
    params = tinker.AdamParams(
        learning_rate=rate, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, grad_clip_norm=clip
    )
    check_adam(params)
    parameters = pair()
    optimizer = AdamW(parameters)
    for number in range(2):
        set_gradients(parameters, number)
        optimizer.step(params)
    assert all(torch.isfinite(parameter).all() for parameter in parameters.values())
