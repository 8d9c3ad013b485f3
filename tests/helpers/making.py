"""Random samples for property tests."""

import numpy as np
from hypothesis import strategies as st

from viva.experts.samples import Sample

logprobs = st.floats(-30, 0, allow_nan=False)
rewards = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-10, 10, allow_nan=False))


@st.composite
def sample_batches(draw, min_size=0, max_size=8, max_tokens=4, num_prompts=2, reward=rewards):
    """Samples of iid (on policy), hint (scored under both contexts) and feedback (a context of its own each)."""
    batch = []
    for index in range(draw(st.integers(min_size, max_size))):
        strategy = draw(st.sampled_from(["iid", "hint", "feedback"]))
        length = draw(st.integers(0, max_tokens))

        def row(length=length):
            return np.array(draw(st.lists(logprobs, min_size=length, max_size=length)))

        batch.append((strategy, index, draw(st.integers(0, num_prompts - 1)), draw(reward), length, row))
    contexts = {
        prompt: {name(strategy, index) for strategy, index, where, *_ in batch if where == prompt}
        for prompt in range(num_prompts)
    }
    return [
        Sample(
            strategy=strategy,
            prompt=prompt,
            reward=reward_,
            sampling_logprobs_T=row(),
            old_logprobs_T=None if strategy == "iid" else row(),
            on_policy=strategy == "iid",
            context=name(strategy, index),
            context_logprobs={
                context: row()
                for context in sorted(contexts[prompt] | {"hint"})
                if context not in ("iid", name(strategy, index))
            },
            finished=draw(st.booleans()),
        )
        for strategy, index, prompt, reward_, _, row in batch
    ]


def name(strategy, index):
    return f"feedback {index}" if strategy == "feedback" else strategy
