"""The calls of one problem in expert iteration: what each strategy samples, and what is trained behind what."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from viva.scaling.calls import Call, Counter, Markers, Template, TrainedReply, message_blocks
from viva.scaling.conversations import Lengths
from viva.scaling.tree import Block

__all__ = ["STRATEGIES", "Scoring", "Strategy", "problem_calls"]

STRATEGIES = ("iid", "prompt_augmentation", "feedback", "conversation", "best_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One strategy on one problem."""

    name: str
    group_size: int = 4
    """Samples; of a conversation, the calls tell."""
    hint: str = ""
    said: str = ""
    """Feedback to a first attempt; the policy's own has the length of a remark."""
    train_behind: Literal["problem", "attempt"] = "problem"
    num_kept: int | None = None
    """best_of: how many samples of a group are imitated; ``None``: all."""
    conversation: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What the estimator lets be scored before the update."""

    swapped: bool
    """Samples that were drawn in another context than they are trained in, behind the latter."""
    contexts: bool
    """Every sample behind every other context of its problem."""


def problem_calls(
    strategies: Sequence[Strategy],
    scoring: Scoring,
    *,
    lengths: Lengths,
    count: Counter,
    template: Template,
    problem: Hashable = "problem",
) -> list[Call]:
    """The calls of all strategies on one problem, which goes by a key.

    Raises:
        ValueError: If a strategy is not one of `STRATEGIES`.
    """
    markers = Markers()
    question = markers.new(problem, lengths.prompt)
    bare = message_blocks([("user", question)], markers, count, template)
    calls: list[Call] = []
    for strategy in strategies:
        if strategy.name == "conversation":
            made = _of_conversation(strategy, bare, lengths)
        elif strategy.name == "feedback":
            made = _of_feedback(strategy, bare, question, markers, lengths, count, template)
        elif strategy.name == "prompt_augmentation":
            hinted = message_blocks([("system", strategy.hint), ("user", question)], markers, count, template)
            made = [_sample(hinted, bare, lengths) for _ in range(strategy.group_size)]
        elif strategy.name in ("iid", "best_of"):
            made = [_sample(bare, bare, lengths) for _ in range(strategy.group_size)]
        else:
            raise ValueError(
                f"the cost of the strategy {strategy.name!r} is not known; known are {', '.join(STRATEGIES)}"
            )
        kept = len(made) if strategy.num_kept is None else strategy.num_kept
        calls += [*made[:kept], *(replace(call, trained=None) for call in made[kept:])]
    contexts = list(dict.fromkeys(call.prompt for call in calls if call.trained is not None))
    return [_with_scores(call, scoring, contexts) for call in calls]


def _sample(prompt: tuple[Block, ...], bare: tuple[Block, ...], lengths: Lengths) -> Call:
    tokens = lengths.solution + lengths.stop
    return Call(prompt=prompt, reply=tokens, trained=TrainedReply(context=bare, tokens=tokens))


def _of_feedback(
    strategy: Strategy,
    bare: tuple[Block, ...],
    question: str,
    markers: Markers,
    lengths: Lengths,
    count: Counter,
    template: Template,
) -> list[Call]:
    tokens = lengths.solution + lengths.stop
    calls: list[Call] = []
    for place in range(strategy.group_size):
        attempt = markers.new(("attempt", place), lengths.solution)
        said = strategy.said or markers.new(("feedback", place), lengths.remark)
        attempted = message_blocks([("user", question), ("assistant", attempt)], markers, count, template)
        prompt = message_blocks(
            [("user", question), ("assistant", attempt), ("user", said)], markers, count, template
        )
        context = attempted if strategy.train_behind == "attempt" else bare
        calls.append(Call(prompt=bare, reply=tokens))
        calls.append(
            Call(prompt=prompt, reply=tokens, wave=1, trained=TrainedReply(context=context, tokens=tokens))
        )
    return calls


def _of_conversation(strategy: Strategy, bare: tuple[Block, ...], lengths: Lengths) -> list[Call]:
    """Every agent's last solution is trained behind the bare problem, with the end of the turn."""
    last = {call.solver: place for place, call in enumerate(strategy.conversation) if call.solver is not None}
    trained = TrainedReply(context=bare, tokens=lengths.solution + lengths.stop)
    return [
        replace(call, trained=trained if place in last.values() else None)
        for place, call in enumerate(strategy.conversation)
    ]


def _with_scores(call: Call, scoring: Scoring, contexts: Sequence[tuple[Block, ...]]) -> Call:
    trained = call.trained
    if trained is None:
        return call
    scored: list[TrainedReply] = []
    is_swapped = trained.context != call.prompt
    if scoring.swapped and is_swapped:
        scored.append(trained)
    if scoring.contexts:
        own = {call.prompt, trained.context}
        scored += [replace(trained, context=context) for context in contexts if context not in own]
    return replace(call, scored=tuple(scored))
