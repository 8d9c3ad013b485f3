"""The calls of one group: of a conversation and the judge behind it, or of one problem in expert iteration.

Each call says what is sampled, what it is prompted with, and what of it is trained behind what.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import inf
from typing import Literal, TypeAlias

import chz

from viva.conversation.coordinator import view_of
from viva.conversation.critiques import attempt_messages
from viva.conversation.protocol import Protocol, View
from viva.conversation.records import Solution, Turn
from viva.conversation.roles import Roles
from viva.judging.comparison import VERDICT_PREFIX
from viva.scaling.counts import Block, Call, Counter, Prompts, Template, TrainedReply


@chz.chz
class Lengths:
    """Tokens of what is not the package's own text."""

    prompt_tokens: float = chz.field(default=150.0, doc="of a problem")
    solution_tokens: float = chz.field(default=400.0, doc="of a solution")
    remark_tokens: float = chz.field(default=60.0, doc="of a reflection, an evaluation or one critique")
    ranking_tokens: float = chz.field(default=150.0, doc="of a ranking with its reasons")
    verdict_tokens: float = chz.field(default=64.0, doc="of a verdict that the judge writes")


_STOP_TOKENS = 1.0
"""The end of a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Counters of the package's text and of the agents' words."""

    lengths: Lengths
    count: Counter
    template: Template = field(default_factory=Template)
    longest: float = inf
    """Tokens at which replies of the policy are cut."""

    @property
    def said(self) -> Lengths:
        """Lengths of the policy's own words, each of which is cut; a reply of several is shown to others as a whole."""
        names = ("solution_tokens", "remark_tokens", "ranking_tokens")
        own = {name: min(self.longest, getattr(self.lengths, name)) for name in names}
        return chz.replace(self.lengths, **own)

    def reply(self, tokens: float) -> float:
        """Tokens of a reply with its end."""
        return min(self.longest, tokens + _STOP_TOKENS)

    def prompts(self, problem: Hashable = "problem") -> tuple[Prompts, str]:
        """Prompts about a problem, and the marker of its words."""
        prompts = Prompts(self.count, self.template)
        return prompts, prompts.marker(problem, self.lengths.prompt_tokens)


def solution_key(agent_id: int, round_index: int) -> Hashable:
    """The key of a solution's words in blocks."""
    return ("solution", round_index, agent_id)


Earning: TypeAlias = Callable[[Protocol, Sequence[Turn]], Sequence[bool]]
"""Whether the tokens of each reply can earn anything, see `viva.rewards.base.Reward.earning`."""


def conversation_calls(
    protocol: Protocol,
    num_agents: int,
    text: Text,
    roles: Roles | None = None,
    *,
    earning: Earning | None = None,
) -> list[Call]:
    """Every reply and comparison of every agent, in order of (round, agent, lane).

    Replies that earn are trained, or all, without `earning`. Replies to segments of the user's own are as long as
    solutions. Several policies (`roles`) share no prefix, and those that take part alone are not trained.
    """
    (prompts, question), said = text.prompts(), text.said
    turns: list[Turn] = []
    calls: list[Call] = []
    places: list[int] = []
    wave = -1
    for round_index, round_ in enumerate(protocol.rounds):
        before = list(turns)
        wave += 1
        for agent_id in range(num_agents):
            if round_.order == "sequential":
                wave += agent_id > 0
                before = list(turns)
            view = view_of(protocol, num_agents, range(num_agents), agent_id, round_index, "cost")
            for lane, segment in enumerate(round_.segments):
                if segment.votes_on is not None:
                    texts = protocol.voted_on(before, view, lane).values()
                    asked = [
                        protocol.pair_prompt(question, *pair, view, lane) for pair in permutations(texts, 2)
                    ]
                    calls += [_pair_call(protocol, each, prompts, wave) for each in asked]
                    continue
                reply = _reply_text(segment.name, view, said, prompts)
                asked = protocol.prompt(question, before, view, lane)
                prompt = prompts.blocks([("system", protocol.system_prompt), ("user", asked)])
                tokens, is_trained = text.reply(prompts.tokens(reply)), True
                if roles is not None:
                    speaker = roles.speaker(agent_id, segment.name)
                    prompt = (Block(key=("policy", speaker.name), tokens=0.0), *prompt)
                    is_trained = speaker.is_trained
                trained = TrainedReply(context=prompt, tokens=tokens) if is_trained else None
                reading = segment.read(reply, view)
                solver = agent_id if isinstance(reading.response, Solution) else None
                places.append(len(calls))
                calls.append(Call(prompt=prompt, reply=tokens, wave=wave, trained=trained, solver=solver))
                turns.append(
                    Turn(
                        agent_id=agent_id,
                        round_index=round_index,
                        prompt="",
                        text="",
                        response=reading.response,
                        status=reading.status,
                        segment=segment.name,
                        lane=lane,
                    )
                )
    can_earn = [True] * len(turns) if earning is None else earning(protocol, turns)
    for place, earns in zip(places, can_earn, strict=True):
        if not earns:
            calls[place] = replace(calls[place], trained=None)
    return calls


def _pair_call(protocol: Protocol, asked: str, prompts: Prompts, wave: int) -> Call:
    """One comparison by label probabilities, of which one token is read."""
    messages = [("system", protocol.system_prompt), ("user", asked)]
    prompt = prompts.blocks(messages, prefill=VERDICT_PREFIX)
    return Call(prompt=prompt, reply=1.0, role="judge", wave=wave)


def _reply_text(segment: str, view: View, lengths: Lengths, prompts: Prompts) -> str:
    """A reply as the segment asks for it, with a marker for everything the agent makes up."""

    def new(what: str, tokens: float, *more: int) -> str:
        return prompts.marker((what, view.round_index, view.agent_id, *more), tokens)

    if segment == "turn":
        remarks = [new(what, lengths.remark_tokens) for what in ("reflection", "evaluation")]
        return (
            f'{{"reflection": "{remarks[0]}", "evaluation": "{remarks[1]}", '
            f'"solution": "{new("solution", lengths.solution_tokens)}"}}'
        )
    if segment == "revision":
        return f"Revise: {new('solution', lengths.solution_tokens)}"
    if segment == "critique":
        others = [(letter, target) for letter, target in view.letters.items() if target != view.agent_id]
        return "\n".join(
            f"Critique of {letter}: {new('critique', lengths.remark_tokens, target)}"
            for letter, target in others
        )
    if segment in ("ranking", "verdict", "comparison"):
        return new(segment, lengths.ranking_tokens)
    return new("solution", lengths.solution_tokens)  # a proposal, or a segment of the user's own


def judge_calls(
    shown: Sequence[tuple[Hashable, ...]],
    *,
    messages: Callable[[str, Sequence[str], str], Sequence[tuple[str, str]]],
    prefill: str | None,
    text: Text,
    longest: float,
    wave: int,
) -> list[Call]:
    """A judge's calls about the solutions that are shown in each, by key (`solution_key`).

    `messages` makes role and text of a prompt from problem, solutions and the judge's own answer, as long as a
    solution; that and its verdict are cut at `longest` tokens. `prefill` is what the reply is made to begin with if one
    label is read from its next token, ``None`` if a verdict is written.
    """
    prompts, question = text.prompts()
    own = prompts.marker("own answer", min(longest, text.lengths.solution_tokens))
    length = text.said.solution_tokens
    solutions = {
        key: prompts.marker(key, length) for key in dict.fromkeys(key for keys in shown for key in keys)
    }
    calls: list[Call] = []
    for keys in shown:
        asked = messages(question, [solutions[key] for key in keys], own)
        prompt = prompts.blocks(asked, prefill=prefill or "")
        reply = 1.0 if prefill is not None else min(longest, text.lengths.verdict_tokens)
        calls.append(Call(prompt=prompt, reply=reply, role="judge", wave=wave))
    return calls


def answer_call(text: Text, wave: int, longest: float) -> Call:
    """An answer to the bare problem of so many tokens at most."""
    prompts, question = text.prompts()
    prompt = prompts.blocks([("user", question)])
    reply = min(longest, text.lengths.solution_tokens + _STOP_TOKENS)
    return Call(prompt=prompt, reply=reply, role="judge", wave=wave)


def scorer_calls(
    number: int,
    *,
    messages: Callable[[str, str | None], Sequence[tuple[str, str]]],
    text: Text,
    wave: int,
) -> list[Call]:
    """A scorer's passes over so many different solutions: each by itself, and behind every other one.

    `messages` makes role and text of a prompt from the problem and the solution that is shown, if one is.
    """
    prompts, question = text.prompts()
    length = text.said.solution_tokens
    solutions = [prompts.marker(("solution", place), length) for place in range(number)]
    pairs: list[tuple[str | None, str]] = [(None, target) for target in solutions] if number > 1 else []
    pairs += permutations(solutions, 2)
    return [
        Call(
            prompt=prompts.blocks(messages(question, informant), prefill=target),
            reply=1.0,
            role="judge",
            wave=wave,
        )
        for informant, target in pairs
    ]


STRATEGIES = ("iid", "prompt_augmentation", "feedback", "conversation", "best_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One strategy on one problem."""

    name: str
    group_size: int = 4
    """Samples; a conversation has its calls."""
    hint: str = ""
    said: str = ""
    """Feedback to a first attempt; the policy's own has the length of a remark."""
    train_behind: Literal["problem", "attempt"] = "problem"
    num_kept: int | None = None
    """best_of: how many samples of a group are imitated; ``None``: all."""
    conversation: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The passes that the estimator wants before the update."""

    swapped: bool
    """Samples that were drawn in another context than they are trained in, behind the latter."""
    contexts: bool
    """Every sample behind every other context of its problem."""


def problem_calls(
    strategies: Sequence[Strategy],
    scoring: Scoring,
    text: Text,
    *,
    problem: Hashable = "problem",
) -> list[Call]:
    """The calls of all strategies on one problem, which goes by a key; `ValueError` if one is none of `STRATEGIES`."""
    prompts, question = text.prompts(problem)
    bare = prompts.blocks([("user", question)])
    trained = TrainedReply(context=bare, tokens=text.reply(text.lengths.solution_tokens))
    calls: list[Call] = []
    for strategy in strategies:
        if strategy.name == "conversation":
            made = _of_conversation(strategy, trained)
        elif strategy.name == "feedback":
            made = _of_feedback(strategy, trained, question, prompts, text)
        elif strategy.name == "prompt_augmentation":
            hinted = prompts.blocks([("system", strategy.hint), ("user", question)])
            made = [Call(prompt=hinted, reply=trained.tokens, trained=trained)] * strategy.group_size
        elif strategy.name in ("iid", "best_of"):
            made = [Call(prompt=bare, reply=trained.tokens, trained=trained)] * strategy.group_size
        else:
            raise ValueError(
                f"the cost of the strategy {strategy.name!r} is not known; known are {', '.join(STRATEGIES)}"
            )
        kept = len(made) if strategy.num_kept is None else strategy.num_kept
        calls += [*made[:kept], *(replace(call, trained=None) for call in made[kept:])]
    contexts = list(dict.fromkeys(call.prompt for call in calls if call.trained is not None))
    return [_with_scores(call, scoring, contexts) for call in calls]


def _of_feedback(
    strategy: Strategy, trained: TrainedReply, question: str, prompts: Prompts, text: Text
) -> list[Call]:
    calls: list[Call] = []
    lengths = text.said
    for place in range(strategy.group_size):
        attempt = prompts.marker(("attempt", place), lengths.solution_tokens)
        said = strategy.said or prompts.marker(("feedback", place), lengths.remark_tokens)
        messages = [("user", question), ("assistant", attempt)]
        own = trained
        if strategy.train_behind == "attempt":
            own = replace(trained, context=prompts.blocks(messages))
        prompt = prompts.blocks([*messages, ("user", said)])
        calls.append(Call(prompt=trained.context, reply=trained.tokens))
        if not strategy.said:
            asked = [(each["role"], str(each["content"])) for each in attempt_messages(question, attempt)]
            reply = text.reply(text.lengths.remark_tokens)
            calls.append(Call(prompt=prompts.blocks(asked), reply=reply, wave=1))
        calls.append(Call(prompt=prompt, reply=trained.tokens, wave=1 if strategy.said else 2, trained=own))
    return calls


def _of_conversation(strategy: Strategy, trained: TrainedReply) -> list[Call]:
    """Every agent's last solution is trained behind the bare problem, with the end of the turn."""
    last = {call.solver: place for place, call in enumerate(strategy.conversation) if call.solver is not None}
    return [
        replace(call, trained=trained if place in last.values() else None)
        for place, call in enumerate(strategy.conversation)
    ]


def _with_scores(call: Call, scoring: Scoring, contexts: Sequence[tuple[Block, ...]]) -> Call:
    trained = call.trained
    if trained is None:
        return call
    scored: list[TrainedReply] = []
    if scoring.swapped and trained.context != call.prompt:
        scored.append(trained)
    if scoring.contexts:
        own = {call.prompt, trained.context}
        scored += [replace(trained, context=context) for context in contexts if context not in own]
    return replace(call, scored=tuple(scored))
