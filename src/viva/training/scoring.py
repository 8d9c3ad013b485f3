"""One scoring pass before an update: how likely the policy finds the sampled tokens, behind contexts that matter.

All that an estimator needs is asked for in one ``forward`` of the training client, on the very datums that are trained
next (so the engine shares prefixes as it does in training), plus one short datum for each other context of a prompt.

Legend: ``_N`` samples, ``_T`` trained tokens of a sample, ``_D`` datums of a request.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Trajectory, Transition

from viva.experts.estimation import Estimator, Need
from viva.experts.estimators import Distill
from viva.experts.samples import FloatArray, Sample
from viva.sdk import TrainingClient
from viva.training.data_processing import model_input, trained_values, trajectory_to_data
from viva.training.samples import TrainedSample, context_key
from viva.training.update import trainer_logprobs


def name_contexts(samples_N: Sequence[TrainedSample]) -> list[str]:
    """Name of every sample's realised sampling context: its strategy's, numbered where a strategy has several.

    Two samples of one prompt and strategy have the same name if and only if they were sampled in the same context.
    """
    known: dict[tuple[Hashable, str], dict[Hashable, int]] = {}
    keys = [tuple(context_key(turn.sampled_in) for turn in sample.turns_K) for sample in samples_N]
    for sample, key in zip(samples_N, keys, strict=True):
        places = known.setdefault((sample.prompt, sample.strategy), {})
        places.setdefault(key, len(places))
    names: list[str] = []
    for sample, key in zip(samples_N, keys, strict=True):
        places = known[sample.prompt, sample.strategy]
        names.append(sample.strategy if len(places) == 1 else f"{sample.strategy} {places[key]}")
    return names


async def score(
    client: TrainingClient,
    trained_N: Sequence[TrainedSample],
    samples_N: Sequence[Sample],
    estimator: Estimator,
    *,
    temperature: float,
) -> tuple[list[Sample], int]:
    """Score what the estimator needs, and what is trained behind another context, for its log-ratio.

    Samples that are on policy need no score behind their training context: they were drawn there.

    Args:
        client: The policy.
        trained_N: All of a batch, as they are trained.
        samples_N: The same as the estimator sees them, without scores.
        estimator: Says what it needs.
        temperature: Of the policy that is trained.

    Returns:
        The samples with their scores, and how many tokens were scored, contexts included.

    Raises:
        ValueError: If an estimator compares contexts and a sample has several turns, or samples of one prompt are
            trained in different contexts.
    """
    own_D: dict[int, tuple[tinker.Datum, ...]] = {}
    if Need.OLD_LOGPROBS in estimator.needs or estimator.anchors_at_sampling:
        swapped = (index for index, sample in enumerate(samples_N) if not sample.on_policy)
        own_D = {index: trained_N[index].data_D for index in swapped}
    other_D: dict[tuple[int, str], tuple[tinker.Datum, ...]] = {}
    if Need.CONTEXT_LOGPROBS in estimator.needs:
        other_D = _other_contexts(trained_N, samples_N, estimator)
    requests = [*own_D.values(), *other_D.values()]
    scored = await _forward(client, requests, temperature)
    old_N = dict(zip(own_D, scored, strict=False))
    contexts_N: dict[int, dict[str, FloatArray]] = {}
    for (index, name), logprobs_T in zip(other_D, scored[len(own_D) :], strict=True):
        contexts_N.setdefault(index, {})[name] = logprobs_T
    scored_N = [
        replace(sample, old_logprobs_T=old_N.get(index), context_logprobs=contexts_N.get(index, {}))
        for index, sample in enumerate(samples_N)
    ]
    return scored_N, sum(datum.model_input.length for data_D in requests for datum in data_D)


def spread(kinds: Sequence[Hashable], count: int) -> list[int]:
    """Places of so many entries: the first of every kind in order, then the second of every kind, and so on."""
    seen: Counter[Hashable] = Counter()
    ranked: list[tuple[int, int]] = []
    for place, kind in enumerate(kinds):
        ranked.append((seen[kind], place))
        seen[kind] += 1
    return [place for _, place in sorted(ranked)[:count]]


def sampled_data(sample: TrainedSample, trajectory: Trajectory) -> list[tinker.Datum]:
    """The trained tokens of a sample as they were sampled: with the sampler's logprobs, behind the sampling context."""
    transitions = [trajectory.transitions[turn.turn] for turn in sample.turns_K]
    weights_K = [[0.0] * len(transition.ac.tokens) for transition in transitions]
    for turn, weights_T in zip(sample.turns_K, weights_K, strict=True):
        for place, weight in zip(turn.places, turn.weights, strict=True):
            weights_T[place] = weight
    return trajectory_to_data(replace(trajectory, transitions=transitions), weights_K)


def _other_contexts(
    trained_N: Sequence[TrainedSample], samples_N: Sequence[Sample], estimator: Estimator
) -> dict[tuple[int, str], tuple[tinker.Datum, ...]]:
    """Every sample behind every other context of its prompt that is not the training context itself."""
    known: dict[Hashable, dict[str, TrainedSample]] = {}
    trained_in: dict[Hashable, Hashable] = {}
    for trained, sample in zip(trained_N, samples_N, strict=True):
        if len(trained.turns_K) != 1:
            raise ValueError(
                f"{estimator.name} compares contexts of one completion; a sample of strategy {sample.strategy!r} is "
                f"trained in {len(trained.turns_K)} turns. Give all turns but one weight 0, or use another estimator."
            )
        key = context_key(trained.turns_K[0].trained_in)
        if trained_in.setdefault(sample.prompt, key) != key:
            raise ValueError(
                f"{estimator.name} needs one training context for all samples of a prompt; strategy "
                f"{sample.strategy!r} has another one than those before it. Train feedback behind the problem alone, "
                "or use another estimator."
            )
        if not sample.on_policy:
            known.setdefault(sample.prompt, {}).setdefault(sample.context_name, trained)
    wanted: dict[tuple[int, str], tuple[tinker.Datum, ...]] = {}
    for index, (trained, sample) in enumerate(zip(trained_N, samples_N, strict=True)):
        for name, source in known.get(sample.prompt, {}).items():
            # distillation looks at its own samples behind the teacher's context only
            is_wanted = not isinstance(estimator, Distill) or (sample.on_policy and name == estimator.teacher)
            if name != sample.context_name and is_wanted:
                wanted[index, name] = _behind(source, trained)
    return wanted


def _behind(context: TrainedSample, sample: TrainedSample) -> tuple[tinker.Datum, ...]:
    """The sample's tokens behind the other's sampling context."""
    turn, (own,) = context.turns_K[0], sample.turns_K
    action = TokensWithLogprobs(tokens=list(own.tokens), maybe_logprobs=[0.0] * len(own.tokens))
    transition = Transition(ob=model_input(turn.sampled_in), ac=action, reward=0.0, episode_done=True)
    trajectory = Trajectory(transitions=[transition], final_ob=tinker.ModelInput.empty())
    return tuple(trajectory_to_data(trajectory, [own.weights]))


async def _forward(
    client: TrainingClient, requests: Sequence[Sequence[tinker.Datum]], temperature: float
) -> list[FloatArray]:
    """Logprobs of the trained tokens of every request, in one call."""
    data_D = [datum for data in requests for datum in data]
    logprobs_D = await trainer_logprobs(client, data_D, temperature=temperature)
    trained_D = [trained_values(datum, logprobs) for datum, logprobs in zip(data_D, logprobs_D, strict=True)]
    bounds = [0, *accumulate(len(data) for data in requests)]
    return [np.concatenate([np.zeros(0), *trained_D[start:stop]]) for start, stop in pairwise(bounds)]
