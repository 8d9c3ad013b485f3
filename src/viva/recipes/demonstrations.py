"""The examples of a warm-up (`viva.recipes.warmup`): of a model's own replies, of a script, or of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinker_cookbook.renderers.base import Message, Renderer

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.messages import counted
from viva.conversation.protocol import Protocol, Reading, Segment, View
from viva.conversation.records import ReplyStatus, Turn
from viva.conversation.rendering import build_prompt, read_reply, reply_tokens
from viva.eval.direct import ask_all
from viva.eval.records import Asked
from viva.judging import comparison
from viva.judging.answers import extract_answer
from viva.judging.comparison import (
    VERDICT_PREFIX,
    TournamentPattern,
    judge_accuracy,
    judge_health,
    judge_messages,
)
from viva.judging.judge import JudgeMode, JudgeOptions, PolicyRef, SamplingClient
from viva.recipes.common import OpenRun, say
from viva.recipes.loop import direct_sampler
from viva.recipes.plan import Plan
from viva.recipes.protocol import Game
from viva.rewards.base import Grader, Played, Reward, Scored
from viva.run.files import read_json_lines
from viva.selfplay.controls import scripted_reply
from viva.training.console import Begin, unseen
from viva.training.data import Example, PromptItem, derive_seed
from viva.training.metrics import mean_by_key
from viva.training.rollouts import run_groups
from viva.training.sampling import SeatSampler

# the judge


@dataclass(frozen=True)
class Pair:
    """A right and a wrong reply to one problem."""

    question: str
    right: str
    wrong: str


async def judged_pairs(
    plan: Plan,
    opened: OpenRun,
    sampler: SamplingClient,
    items: Sequence[PromptItem],
    *,
    samples: int,
    what: str,
) -> list[Pair]:
    """One pair for every problem to which the model gives a wrong reply among so many."""
    direct = direct_sampler(plan.config, plan.check, opened).at(plan.config.temperature)
    known = [item for item in items if item.answer is not None]
    say(f"asking the model {counted(samples, 'time')} each: {len(known)} {what}")
    asked = await ask_all(sampler, direct, known, samples)
    return [pair for each in asked if (pair := _pair(each, plan.check.is_right)) is not None]


def _pair(asked: Asked, grader: Grader) -> Pair | None:
    finished = [answer for answer in asked.answers if answer.finished and answer.vote is not None]
    wrong = next((answer for answer in finished if not answer.right), None)
    if wrong is None or asked.answer is None:
        return None
    own = next((answer for answer in finished if answer.right), None)
    if own is not None:
        return Pair(asked.question, own.text, wrong.text)
    said, known = extract_answer(wrong.text) or "", extract_answer(asked.answer) or asked.answer
    before, found, after = wrong.text.rpartition(said)
    right = f"{before}{known}{after}" if found else known
    if not grader(right, asked.answer):  # what it takes for the answer need not be what was put in
        return None
    return Pair(asked.question, right, wrong.text if found else wrong.text.strip())


def verdicts(renderer: Renderer, pair: Pair, mode: JudgeMode) -> list[Example]:
    """Both orders of a pair, with the verdict as completion.

    It is the label behind the beginning of a verdict (``logprob``), or the whole object (``verdict``), whose reasoning
    is the right reply, so that the model answers itself before it compares.
    """
    prefix = VERDICT_PREFIX if mode == "logprob" else ""
    examples: list[Example] = []
    for first, second, label in ((pair.right, pair.wrong, "A"), (pair.wrong, pair.right, "B")):
        rest = f'{label}"}}'
        if mode == "verdict":
            rest = json.dumps({"reasoning": pair.right, "preference": label}, ensure_ascii=False)
        messages = judge_messages(pair.question, first, second, comparison.JUDGE_SYSTEM_PROMPT)
        prompt = build_prompt(renderer, messages, prefill=prefix).to_ints()
        whole = build_prompt(renderer, messages, prefill=f"{prefix}{rest}").to_ints()
        is_joined = whole[: len(prompt)] == prompt
        completion = whole[len(prompt) :] if is_joined else reply_tokens(renderer, rest)
        completion = (*completion, *_end(renderer))
        examples.append(Example(prompt=tuple(prompt), completion=completion, kind="judge"))
    return examples


@dataclass(frozen=True, kw_only=True)
class JudgeEvaluator:
    """The policy as judge of held-out pairs, each in both orders."""

    pairs: Sequence[Pair]
    renderer: Renderer
    options: JudgeOptions

    async def __call__(
        self, sampler: SamplingClient, step: int, begin: Begin = unseen
    ) -> Mapping[str, float]:
        """``test/judge/...``: means over pairs of what `judge_health` and `judge_accuracy` say."""
        judge = self.options.make(PolicyRef(sampling_client=sampler), self.renderer)
        judged = await gather_or_cancel(
            judge.tournament(
                pair.question,
                {0: pair.right, 1: pair.wrong},
                TournamentPattern.ALL_PAIRS_BOTH_WAYS,
                index,
            )
            for index, pair in enumerate(self.pairs)
        )
        # all comparisons together would be of one pair
        figures = mean_by_key(judge_health(own) | judge_accuracy(own, {0: True, 1: False}) for own in judged)
        return {f"test/{name}": value for name, value in figures.items()}


# a protocol


@dataclass(frozen=True, kw_only=True)
class Unpaid(Reward):
    """No reward: conversations are only played."""

    name: str = "unpaid"

    async def score(self, played: Played) -> Scored:
        """Nothing for everybody."""
        return Scored(rewards=dict.fromkeys(((agent, 0) for agent in played.agents), 0.0))


@dataclass(frozen=True, kw_only=True)
class _Kept(Unpaid):
    """Keeps the examples of a conversation."""

    views: dict[tuple[int, int, str], View]
    """Texts by round, agent and segment."""
    examples: list[Example]
    scripted: bool

    async def score(self, played: Played) -> Scored:
        """Nothing; the conversation's replies become examples."""
        for seat, (agent_id, lane) in enumerate(played.protocol.seats(played.conversation.num_agents)):
            turns = played.conversation.sampled_turns(agent_id, lane)
            transitions = played.trajectories_G[seat].transitions
            for turn, transition in zip(turns, transitions, strict=False):
                completion = self._completion(played, turn, transition.ac.tokens)
                if completion is not None:
                    prompt = tuple(transition.ob.to_ints())
                    self.examples.append(Example(prompt=prompt, completion=completion, kind=turn.segment))
        return await super().score(played)

    def _completion(self, played: Played, turn: Turn, tokens_T: Sequence[int]) -> tuple[int, ...] | None:
        _, is_finished = read_reply(played.renderer, list(tokens_T))
        if turn.status is ReplyStatus.OK and is_finished:
            return tuple(tokens_T)
        if not self.scripted:
            return None
        segment = played.protocol.rounds[turn.round_index].segments[turn.lane]
        view = self.views[turn.round_index, turn.agent_id, turn.segment]
        text = _shuffled(scripted_reply(segment, view), random.Random(f"{played.seed}/{turn.agent_id}"))
        return (*reply_tokens(played.renderer, text), *_end(played.renderer))


def _shuffled(text: str, rng: random.Random) -> str:
    """A scripted ranking in another order, so that no order is learned."""
    head, mark, order = text.partition("Ranking: ")
    if not mark:
        return text
    letters = order.split(" > ")
    rng.shuffle(letters)
    return f"{head}{mark}{' > '.join(letters)}"


async def played_examples(
    plan: Plan,
    opened: OpenRun,
    sampler: SamplingClient,
    make_game: Callable[[], Game],
    *,
    samples: int,
    scripted: bool,
) -> list[Example]:
    """Replies of so many conversations about each prompt, see `viva.recipes.warmup`."""
    config = plan.config
    kept: list[_Kept] = []
    builders: list[Any] = []
    for index in range(samples * len(plan.order.items)):
        views: dict[tuple[int, int, str], View] = {}
        game = make_game()
        kept.append(_Kept(views=views, examples=[], scripted=scripted))
        game = replace(game, protocol=_watched(game.protocol, views), reward=kept[-1])
        factory = game.factory(
            opened.renderer, plan.check.is_right, voter_policy=PolicyRef(sampling_client=sampler)
        )
        item = plan.order.items[index % len(plan.order.items)]
        builders.append(factory(item, derive_seed(config.seed, "warmup", index)))
    say(f"playing {counted(len(builders), 'conversation')} to make examples of")
    policy = SeatSampler(sampler=sampler, sampling=config.sampling(opened.context_window).seeded("warmup"))
    await run_groups(builders, policy, max_retries=config.max_retries)
    return [example for each in kept for example in each.examples]


def _watched(protocol: Protocol, views: dict[tuple[int, int, str], View]) -> Protocol:
    """The protocol, whose readers keep the views that they get."""

    def watched(segment: Segment) -> Segment:
        def read(text: str, view: View) -> Reading:
            views[view.round_index, view.agent_id, segment.name] = view
            return segment.read(text, view)

        return replace(segment, read=read)

    return protocol.with_segments(watched)


# a file


def read_messages(path: str) -> list[list[Message]]:
    """The conversations of a file; a `ValueError` names file and line."""
    found: list[list[Message]] = []
    for number, line in enumerate(read_json_lines(Path(path).expanduser()), 1):
        messages = line.get("messages")
        if (
            not isinstance(messages, list)
            or len(messages) < 2
            or not all(isinstance(each, dict) and isinstance(each.get("content"), str) for each in messages)
            or messages[-1].get("role") != "assistant"
        ):
            raise ValueError(
                f'{path}:{number}: needs "messages", a list of at least two objects with role and content, the last '
                f"by the assistant; got {str(line)[:80]}"
            )
        found.append(messages)
    return found


def file_example(renderer: Renderer, messages: Sequence[Message]) -> Example:
    """The last message as completion behind the others."""
    prompt, completion = messages[:-1], reply_tokens(renderer, str(messages[-1]["content"]))
    return Example(
        prompt=tuple(build_prompt(renderer, prompt).to_ints()), completion=(*completion, *_end(renderer))
    )


def _end(renderer: Renderer) -> list[int]:
    """The token that ends a turn."""
    stop = renderer.get_stop_sequences()[0]
    return [stop] if isinstance(stop, int) else renderer.tokenizer.encode(stop, add_special_tokens=False)
