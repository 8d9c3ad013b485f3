"""Supervised training before a run: a model learns to judge pairs, or to speak in the form of a protocol.

    viva train warmup examples=judge model_name=... train_prompts_path=problems.jsonl log_path=runs/judge
    viva train warmup examples=critique model_name=... train_prompts_path=prompts.jsonl log_path=runs/form
    viva train critique_self_play load_checkpoint_path=runs/form/state/weights/000040 ...

Examples are made once, by the model as it is at the start, and kept in the run's ``examples.jsonl``:

- ``judge``: pairs of a right and a wrong reply to a problem with a known answer, in both orders; the completion is the
  verdict. Wrong replies are the model's own. The right one is its own, too, or else the wrong one with the known answer
  in the place of its answer, so that form tells nothing.
- a protocol: conversations that the model plays with itself. Replies that could be read as their segment asks are
  completions as they are (rejection sampling); with ``scripted=true`` the others are replaced by a scripted one.
- a file: JSON lines with ``messages``, the last of which is the assistant's.

The loss is the cross-entropy of the completions' tokens; prompts are not trained.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chz

from viva.conversation.protocol import Protocol, Reading, Segment, View, counted
from viva.conversation.records import ReplyStatus, Turn
from viva.recipes.config import RecipeConfig
from viva.recipes.protocol import Game
from viva.recipes.reward import refuse_unused
from viva.rewards.base import Played, Reward, Scored
from viva.training.data import Example

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Message, Renderer

    from viva.eval.records import Asked
    from viva.judging.judge import SamplingClient
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.training.data import PromptItem
    from viva.training.loop import Training

EXAMPLES = "examples.jsonl"
_JUDGE = "judge"
_UNUSED = ("num_epochs", "max_staleness", "stream_updates", "loss_fn", "loss_fn_config", "num_substeps")


@chz.chz
class Config(RecipeConfig):
    """Options of a warm-up."""

    examples: str = chz.field(
        default=_JUDGE,
        doc="what is learned: judge, a protocol (critique, round_robin, path.py:PROTOCOL), or a .jsonl file",
    )
    samples: int = chz.field(
        default=4, doc="replies to each problem, or conversations about each prompt, to make examples of"
    )
    scripted: bool = chz.field(
        default=False, doc="a protocol: scripted replies in the place of those that cannot be read"
    )
    prompts: dict[str, str] | None = chz.field(default=None, doc="a protocol: its words, as in other recipes")
    batch_size: int | None = chz.field(default=32, doc="examples per step")
    max_steps: int | None = chz.field(default=40, doc="steps of the warm-up")
    eval_every: int = chz.field(default=10, doc="steps between evaluations; 0 never evaluates")
    log_path: str = "runs/warmup"

    def game(self) -> Game:
        """The protocol to learn, without a reward.

        Raises:
            ValueError: If it cannot be found or played.
        """
        from viva.selfplay.check import find_protocol

        protocol = find_protocol(self.examples, self.num_agents)
        if self.personas is not None:
            protocol = replace(protocol, personas=self.personas)
        protocol = replace(protocol, on_failure="continue")
        protocol = protocol if self.prompts is None else protocol.with_prompts(self.prompts)
        protocol.check()
        return Game(protocol=protocol, reward=_Unpaid(), num_agents=self.num_agents)

    @property
    def is_protocol(self) -> bool:
        """Whether a protocol is learned."""
        return self.examples != _JUDGE and not self.examples.endswith(".jsonl")

    def make_plan(self) -> Plan:
        """Check all options and load the prompts."""
        from viva.recipes.plan import BatchUnit, at_least, plan_run

        at_least(self, {"samples": 1})
        refuse_unused(self, _UNUSED, "the loss of a warm-up is cross-entropy, and its length is max_steps")
        if self.max_steps is None:
            raise ValueError("max_steps says how long a warm-up is; give a number")
        if not self.is_protocol and (self.scripted or self.prompts is not None):
            raise ValueError(
                f"scripted and prompts are for protocols; leave them out with examples={self.examples}"
            )
        if self.is_protocol:
            self.game()
        elif self.examples != _JUDGE:
            _read_messages(self.examples)
        plan = plan_run(
            self,
            recipe="warmup",
            summary=f"supervised, {self.examples}",
            unit=BatchUnit(samples=1, name="1", groups="examples"),
        )
        if self.examples == _JUDGE and all(item.answer is None for item in plan.order.items):
            raise ValueError(
                "examples=judge needs problems with known answers, and none has one; give them in the key answer"
            )
        return plan

    async def build_training(self, plan: Plan, opened: OpenRun) -> Training:
        """The loop's parts for an open run; makes the examples, unless the run has them."""
        from viva.recipes.loop import make_training
        from viva.training.data import ExampleDataset

        path = opened.folder.path / EXAMPLES
        if not path.exists():
            await _make(self, plan, opened, path)
        kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        examples = tuple(Example.of(each) for each in kept if "completion" in each)
        pairs = tuple(_Pair(**each["pair"]) for each in kept if "pair" in each)
        return make_training(
            plan,
            opened,
            self.game().factory(opened.renderer, None, plan.grader) if self.is_protocol else None,
            dataset=ExampleDataset(
                examples=examples,
                batch_size=plan.order.groups_per_batch,
                seed=self.seed,
                num_steps=len(plan.order),
            ),
            evaluators=[_JudgeEvaluator(pairs=pairs, renderer=opened.renderer)] if pairs else (),
        )


async def _make(config: Config, plan: Plan, opened: OpenRun, path: Path) -> None:
    """Write the examples, and the pairs that a judge is tested on.

    Raises:
        ValueError: If there are none; with what to do.
    """
    from viva.recipes.common import say
    from viva.run.files import note_written, write_atomic
    from viva.sdk import settled

    pairs: list[_Pair] = []
    if config.examples.endswith(".jsonl"):
        examples = [_example(opened.renderer, messages) for messages in _read_messages(config.examples)]
    else:
        sampler = await settled(opened.client.save_weights_and_get_sampling_client())
        if config.examples == _JUDGE:
            train = await _pairs(config, plan, opened, sampler, plan.order.items, "training problems")
            examples = [each for pair in train for each in _verdicts(opened.renderer, pair)]
            if config.eval_every and plan.test:
                pairs = await _pairs(config, plan, opened, sampler, plan.test, "test problems")
        else:
            examples = await _played(config, plan, opened, sampler)
    if not examples:
        raise ValueError(
            "no example could be made: no reply was wrong and finished (judge), or none could be read (a protocol). "
            "Raise max_tokens or samples, change the words (prompts, question_template), or use scripted=true or a file"
        )
    lines = [each.record() for each in examples] + [{"pair": vars(pair)} for pair in pairs]
    write_atomic(path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
    note_written([path])
    kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(each.kind for each in examples).items())
    say(f"{counted(len(examples), 'example')} in {path}: {kinds}")


# the judge


@dataclass(frozen=True)
class _Pair:
    """A right and a wrong reply to one problem."""

    question: str
    right: str
    wrong: str


async def _pairs(
    config: Config,
    plan: Plan,
    opened: OpenRun,
    sampler: SamplingClient,
    items: Sequence[PromptItem],
    what: str,
) -> list[_Pair]:
    """One pair for every problem that has a wrong reply to it."""
    from viva.eval.direct import DirectSampler, ask_all
    from viva.recipes.common import say

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
    say(f"asking the model {counted(config.samples, 'time')} each: {len(known)} {what}")
    asked, _ = await ask_all(sampler, direct, known, config.samples)
    return [pair for each in asked if (pair := _pair(each)) is not None]


def _pair(asked: Asked) -> _Pair | None:
    from viva.judging.answers import extract_answer

    finished = [answer for answer in asked.answers if answer.finished and answer.vote is not None]
    wrong = next((answer for answer in finished if not answer.right), None)
    if wrong is None:
        return None
    own = next((answer for answer in finished if answer.right), None)
    if own is not None:
        return _Pair(asked.question, own.text, wrong.text)
    said, known = extract_answer(wrong.text) or "", extract_answer(asked.answer) or asked.answer
    before, found, after = wrong.text.rpartition(said)
    right = f"{before}{known}{after}" if found else known
    return _Pair(asked.question, right, wrong.text if found else wrong.text.strip())


def _verdicts(renderer: Renderer, pair: _Pair) -> list[Example]:
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
class _JudgeEvaluator:
    """The policy as judge of held-out pairs, each in both orders, by the probabilities of its labels."""

    pairs: Sequence[_Pair]
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
class _Unpaid(Reward):
    """No reward: conversations are only played."""

    name: str = "unpaid"

    async def score(self, played: Played) -> Scored:
        """Nothing for everybody."""
        return Scored(rewards=dict.fromkeys(((agent, 0) for agent in played.agents), 0.0))


@dataclass(frozen=True, kw_only=True)
class _Kept(_Unpaid):
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


async def _played(config: Config, plan: Plan, opened: OpenRun, sampler: SamplingClient) -> list[Example]:
    from viva.recipes.common import say
    from viva.training.data import derive_seed
    from viva.training.rollouts import Policy, run_groups

    kept: list[_Kept] = []
    builders: list[Any] = []
    for index in range(config.samples * len(plan.order.items)):
        views: dict[tuple[int, int, str], View] = {}
        game = config.game()
        kept.append(_Kept(views=views, examples=[], scripted=config.scripted))
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

    from viva.conversation.protocol import Round

    rounds = [
        Round(each.name, [watched(segment) for segment in each.segments], each.sights, each.order)
        for each in protocol.rounds
    ]
    return replace(protocol, rounds=tuple(rounds))


# a file


def _read_messages(path: str) -> list[list[Message]]:
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


def _example(renderer: Renderer, messages: Sequence[Message]) -> Example:
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
