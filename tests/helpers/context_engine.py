"""Batches of two strategies, on an engine whose logprobs depend on the context alone."""

import numpy as np
import tinker
from bandit_engine import Done
from expert_making import Group, outcome
from tinker_cookbook.rl.types import Trajectory
from transitions import transition

from viva.experts.strategy import Completion
from viva.training.batch import ExpertConfig

BARE, HINT, OTHER = 10, 20, 30
"""Contexts of one token."""


class ContextEngine:
    """Finds every token the less likely, the larger the first token of the input is."""

    def __init__(self):
        self.requests = []
        self.configs = []

    def forward(self, data, loss_fn, loss_fn_config=None):
        assert loss_fn == "importance_sampling"
        self.configs.append(loss_fn_config)
        self.requests.append([datum.model_input.to_ints() for datum in data])
        outputs = []
        for datum in data:
            assert set(datum.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}
            targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
            logprobs = logprobs_of(datum.model_input.to_ints()[0], targets)
            outputs.append({"logprobs": tinker.TensorData.from_numpy(logprobs.astype(np.float32))})
        return Done(tinker.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=outputs, metrics={}))


def logprobs_of(context, targets):
    return -(context / 100) * (1 + np.asarray(targets) / 10)


class Named(Group):
    def __init__(self, strategy_id, *, trained_in=None, weight=None, weights=None):
        self.strategy_id = strategy_id
        self.weight = weight
        if trained_in is not None:
            self.context_transform = lambda observation, turn: tinker.ModelInput.from_ints([trained_in])
        if weights is not None:
            self.completions = lambda group: [
                [Completion(transition=turn, weight=weight) for turn, weight in enumerate(weights)]
                for _ in group.trajectories_G
            ]


def drawn(context, action):
    """A trajectory sampled by the engine's policy."""
    return Trajectory(
        [transition([context], action, logprobs=logprobs_of(context, action).tolist())],
        tinker.ModelInput.empty(),
    )


def iid(rewards=(0.0, 1.0), **options):
    return outcome(
        Named("iid", **options), [drawn(BARE, [1, 2, seat]) for seat in range(len(rewards))], rewards
    )


def hint(rewards=(0.0, 1.0), context=HINT, name="hint", **options):
    builder = Named(name, trained_in=BARE, **options)
    return outcome(builder, [drawn(context, [3, 4, seat]) for seat in range(len(rewards))], rewards)


def config(estimator="token_tis", **options):
    return ExpertConfig(estimator=estimator, **{"num_checked": 0, "min_effective_share": 0.0, **options})
