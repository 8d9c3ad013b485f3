"""Trajectories and datums, in plain numbers."""

import tinker
from hypothesis import strategies as st
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, Trajectory, Transition

tokens = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def transition(observation, action, *, logprobs=None, masked=False):
    if logprobs is None:
        logprobs = [-0.5 - index / 7 for index in range(len(action))]
    return Transition(
        ob=tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=observation)]),
        ac=TokensWithLogprobs(tokens=action, maybe_logprobs=logprobs),
        reward=0.0,
        episode_done=False,
        metrics={PARSE_ERROR_MASKED_METRIC_KEY: 1.0} if masked else {},
    )


@st.composite
def trajectories(draw):
    """Turns that extend, or do not extend, what came before."""
    transitions, history = [], []
    for _ in range(draw(st.integers(1, 5))):
        extends = draw(st.booleans())
        observation = (history if extends else []) + draw(tokens)
        action = draw(tokens)
        transitions.append(transition(observation, action, masked=draw(st.booleans())))
        history = observation + action
    return Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())


def as_plain(datum):
    inputs = {name: (t.dtype, t.shape, t.to_numpy().tolist()) for name, t in datum.loss_fn_inputs.items()}
    return datum.model_input.to_ints(), inputs
