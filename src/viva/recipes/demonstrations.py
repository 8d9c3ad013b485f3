"""The examples of a warm-up (`viva.recipes.warmup`): of a model's own replies, of a script, or of a file."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viva.conversation.protocol import Protocol, Reading, Round, Segment, View, counted
from viva.conversation.records import ReplyStatus, Turn
from viva.rewards.base import Played, Reward, Scored
from viva.training.data import Example

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Message, Renderer

    from viva.eval.records import Asked
    from viva.judging.judge import SamplingClient
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.recipes.protocol import Game
    from viva.training.data import PromptItem


# the judge

_JUDGE = "judge"


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
    """One pair for every problem that has a wrong reply to it, of so many that the model gives."""
    from viva.eval.direct import DirectSampler, ask_all
    from viva.recipes.common import say

    config = plan.config
    direct = DirectSampler(
        renderer=opened.renderer,
        seed=config.seed,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        system_prompt=config.system_prompt,
        context_window=opened.context_window,
        grader=plan.grader,
        vote=plan.check.vote,
    )
    known = [item for item in items if item.answer is not None]
    say(f"asking the model {counted(samples, 'time')} each: {len(known)} {what}")
    asked, _ = await ask_all(sampler, direct, known, samples)
    return [pair for each in asked if (pair := _pair(each)) is not None]


def _pair(asked: Asked) -> Pair | None:
    from viva.judging.answers import extract_answer

    finished = [answer for answer in asked.answers if answer.finished and answer.vote is not None]
    wrong = next((answer for answer in finished if not answer.right), None)
    if wrong is None:
        return None
    own = next((answer for answer in finished if answer.right), None)
    if own is not None:
        return Pair(asked.question, own.text, wrong.text)
    said, known = extract_answer(wrong.text) or "", extract_answer(asked.answer) or asked.answer
    before, found, after = wrong.text.rpartition(said)
    right = f"{before}{known}{after}" if found else known
    return Pair(asked.question, right, wrong.text if found else wrong.text.strip())


def verdicts(renderer: Renderer, pair: Pair) -> list[Example]:
    """Both orders of a pair, with the verdict as completion."""
    from viva.conversation.rendering import build_prompt
    from viva.judging.comparison import JUDGE_SYSTEM_PROMPT, VERDICT_PREFIX, judge_messages

    examples: list[Example] = []
    for first, second, label in ((pair.right, pair.wrong, "A"), (pair.wrong, pair.right, "B")):
        messages = judge_messages(pair.question, first, second, JUDGE_SYSTEM_PROMPT)
        prompt = build_prompt(renderer, messages, prefill=VERDICT_PREFIX).to_ints()
        whole = build_prompt(renderer, messages, prefill=f'{VERDICT_PREFIX}{label}"}}').to_ints()
        examples.append(_behind(renderer, prompt, whole, f'{label}"}}', _JUDGE))
    return examples


@dataclass(frozen=True, kw_only=True)
class JudgeEvaluator:
    """The policy as judge of held-out pairs, each in both orders, by the probabilities of its labels."""

    pairs: Sequence[Pair]
    renderer: Renderer

    async def __call__(self, sampler: SamplingClient, step: int) -> Mapping[str, float]:
        """``test/judge/...``: accuracy of the more probable label, of both orders together, and `judge_health`."""
        from viva.conversation.coordinator import gather_or_cancel
        from viva.judging.comparison import TournamentPattern, judge_health
        from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge

        judge = PolicySelfComparisonJudge(PolicyRef(sampling_client=sampler), self.renderer)
        judged = await gather_or_cancel(
            judge.tournament(
                pair.question,
                {0: pair.right, 1: pair.wrong},
                TournamentPattern.ALL_PAIRS_BOTH_WAYS,
                index,
            )
            for index, pair in enumerate(self.pairs)
        )
        own = [
            [(each.score or 0.0) * (1 if each.second == 0 else -1) for each in comparisons]
            for comparisons in judged
        ]
        single = [_share(score) for scores in own for score in scores]
        both = [_share(sum(scores)) for scores in own]
        health = judge_health([each for comparisons in judged for each in comparisons])
        return {
            "test/judge/accuracy": sum(single) / len(single),
            "test/judge/accuracy_both_orders": sum(both) / len(both),
        } | {f"test/{name}": value for name, value in health.items() if name != "judge/cyclic_triads"}


def _share(score: float) -> float:
    return 1.0 if score > 0 else 0.5 if score == 0 else 0.0


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
    """By round, agent and segment."""
    examples: list[Example]
    scripted: bool

    async def score(self, played: Played) -> Scored:
        """Nothing; the conversation's replies become examples."""
        for seat, (agent_id, lane) in enumerate(played.protocol.seats(played.conversation.num_agents)):
            turns = [
                turn for turn in played.conversation.turns if (turn.agent_id, turn.lane) == (agent_id, lane)
            ]
            transitions = played.trajectories_G[seat].transitions
            for turn, transition in zip(turns, transitions, strict=False):
                completion = self._completion(played, turn, transition.ac.tokens)
                if completion is not None:
                    prompt = tuple(transition.ob.to_ints())
                    self.examples.append(Example(prompt=prompt, completion=completion, kind=turn.segment))
        return await super().score(played)

    def _completion(self, played: Played, turn: Turn, tokens_T: Sequence[int]) -> tuple[int, ...] | None:
        from viva.conversation.rendering import read_reply
        from viva.selfplay.check import scripted_reply

        _, is_finished = read_reply(played.renderer, list(tokens_T))
        if turn.status is ReplyStatus.OK and is_finished:
            return tuple(tokens_T)
        if not self.scripted:
            return None
        segment = played.protocol.rounds[turn.round_index].segments[turn.lane]
        view = self.views[turn.round_index, turn.agent_id, turn.segment]
        text = _shuffled(scripted_reply(segment, view), random.Random(f"{played.seed}/{turn.agent_id}"))
        return (*_encoded(played.renderer, text), *_end(played.renderer))


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
    from viva.recipes.common import say
    from viva.training.data import derive_seed
    from viva.training.rollouts import Policy, run_groups

    config = plan.config
    kept: list[_Kept] = []
    builders: list[Any] = []
    for index in range(samples * len(plan.order.items)):
        views: dict[tuple[int, int, str], View] = {}
        game = make_game()
        kept.append(_Kept(views=views, examples=[], scripted=scripted))
        game = replace(game, protocol=_watched(game.protocol, views), reward=kept[-1])
        item = plan.order.items[index % len(plan.order.items)]
        seed = derive_seed(config.seed, "warmup", index)
        builders.append(game.group(item, seed, renderer=opened.renderer, judge=None, grader=plan.grader))
    say(f"playing {counted(len(builders), 'conversation')} to make examples of")
    policy = Policy(
        sampler=sampler,
        seed=derive_seed(config.seed, "warmup"),
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        context_window=opened.context_window,
        timeout_s=config.policy_timeout_s,
    )
    await run_groups(builders, policy, max_retries=config.max_retries)
    return [example for each in kept for example in each.examples]


def _watched(protocol: Protocol, views: dict[tuple[int, int, str], View]) -> Protocol:
    """The protocol, whose readers keep the views that they get."""

    def watched(segment: Segment) -> Segment:
        def read(text: str, view: View) -> Reading:
            views[view.round_index, view.agent_id, segment.name] = view
            return segment.read(text, view)

        return replace(segment, read=read)

    rounds = [
        Round(each.name, [watched(segment) for segment in each.segments], each.sights, each.order)
        for each in protocol.rounds
    ]
    return replace(protocol, rounds=tuple(rounds))


# a file


def read_messages(path: str) -> list[list[Message]]:
    """The conversations of a file.

    Raises:
        ValueError: With file and line.
    """
    from viva.run.files import read_json_lines

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
    from viva.conversation.rendering import build_prompt

    text = str(messages[-1]["content"])
    prompt = build_prompt(renderer, messages[:-1]).to_ints()
    whole = build_prompt(renderer, messages[:-1], prefill=_shield(renderer, text)).to_ints()
    return _behind(renderer, prompt, whole, text, "message")


def _behind(renderer: Renderer, prompt: list[int], whole: list[int], text: str, kind: str) -> Example:
    """The example whose completion is `text`; `whole` is the prompt with it."""
    rest = whole[len(prompt) :] if whole[: len(prompt)] == prompt else _encoded(renderer, text)
    return Example(prompt=tuple(prompt), completion=(*rest, *_end(renderer)), kind=kind)


def _encoded(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(_shield(renderer, text), add_special_tokens=False)


def _shield(renderer: Renderer, text: str) -> str:
    """The text, none of which becomes a control token."""
    from viva.conversation.guard import GuardedTokenizer

    tokenizer: object = renderer.tokenizer
    return tokenizer.shield(text) if isinstance(tokenizer, GuardedTokenizer) else text


def _end(renderer: Renderer) -> list[int]:
    """The token that ends a turn."""
    stop = renderer.get_stop_sequences()[0]
    return [stop] if isinstance(stop, int) else renderer.tokenizer.encode(stop, add_special_tokens=False)
