"""A warm-up of critics and voters from known answers: where all arms of ``words-warm`` and ``sums-warm`` start.

    python benchmarks/evidence/warm.py sums-warm [RUN]     # what critics and voters see before and after, or of RUN

The model plays critique self-play with itself on half of the bed's problems to train on. Of its proposals, those that
are right are imitated. A script that knows the answers writes what comes after them, and this is imitated, too:
critiques say of every solution whether it is right and give the step and its result, revisions give them, and votes on
a pair (the label behind the beginning of a verdict) prefer what is right, or tie. Half of the agents revise to a wrong
number, so that there is something to vote on; that is not imitated. Arms see the other half of the problems.
"""

import asyncio
import json
import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.append(str(Path(__file__).parents[1]))

import tinker
import yaml
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs

import viva
from evidence.beds import (
    CRITIQUE_TEXTS,
    REAL_OPTIONS,
    WARM,
    WARM_STEPS,
    Question,
    WarmBed,
    bed_named,
    write_problems,
)
from viva.conversation.rendering import reply_tokens
from viva.judging.answers import is_correct
from viva.judging.ballots import Tie
from viva.judging.comparison import VERDICT_PREFIX, Comparison, Outcome
from viva.judging.judge import JudgeOptions, PolicyRef
from viva.judging.records import ConversationRecord
from viva.recipes.demonstrations import Unpaid
from viva.recipes.evaluation.target import find_target, open_policy
from viva.selfplay.critique import critique_protocol
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.training.rollouts import run_groups
from viva.training.sampling import Policy, Sampling
from viva.training.service import EngineConfig
from viva.training.sessions import Engines

_TIMES = 2
"""Conversations about each problem."""
_AUDITED = 30
"""Problems to test on, the first ones, about which an audit has a conversation each; it takes five minutes."""
_VOTED = {"ranking": "proposal", "verdict": "revision"}
_SHOWN = re.compile(r"Solution ([A-Z]):\n((?:> .*\n)+)End of solution \1\.")
_STEP = re.compile(r"\d+ [-+*] \d+")
_OTHERS = re.compile(r"Check the other solutions ([A-Z, ]+)\.")


def worked(problem: Question, result: int) -> str:
    """The problem's one step with a result."""
    step = _STEP.search(problem.question)
    if step is not None:
        return f"{step[0]} = {result}"
    left, right = map(int, re.findall(r"\d+", problem.question))
    signs = {left * right: "*", left - right: "-", left + right: "+"}
    return f"{left} {signs[problem.answer]} {right} = {result}"


def reply(prompt: str, right: str, revised: str) -> str | None:
    """What the script says to a prompt that asks for critiques or a revision; ``None`` to any other.

    Args:
        prompt: With the solutions that it shows.
        right: The step with its true result.
        revised: What it revises to.
    """
    asked = _OTHERS.search(prompt)
    if asked is not None:
        texts, answer = dict(_SHOWN.findall(prompt)), right.rpartition("= ")[2]
        verdicts = {
            letter: "right" if is_correct(texts[letter], answer) else "wrong"
            for letter in asked[1].split(", ")
            if letter in texts
        }
        return "\n".join(f"Solution {letter}: {verdict}, {right}" for letter, verdict in verdicts.items())
    return f"Revise: {revised}" if "Revise: the correct number" in prompt else None


def preferred(prompt: str, answer: str) -> Outcome:
    """What the script prefers of the two solutions that a prompt shows."""
    first, second = (is_correct(text, answer) for _, text in _SHOWN.findall(prompt))
    return Outcome.TIE if first == second else Outcome.A if first else Outcome.B


@dataclass(frozen=True, kw_only=True)
class Voter:
    """Votes by the script, and keeps what it was asked."""

    answer: str
    votes: list[tuple[list[dict[str, str]], Outcome]] = field(default_factory=list)

    async def compare_by_labels(self, messages: Any, first: int, second: int, seed: int) -> Comparison:
        """The script's comparison."""
        outcome = preferred(messages[-1]["content"], self.answer)
        self.votes.append((list(messages), outcome))
        score = {Outcome.A: -1.0, Outcome.B: 1.0, Outcome.TIE: 0.0}[outcome]
        return Comparison(first=first, second=second, outcome=outcome, score=score)


@dataclass(frozen=True, kw_only=True)
class Seats:
    """The model where it proposes, the script where it criticises and revises."""

    model: Any
    renderer: Any
    problems: Sequence[Question]
    """By conversation."""

    def seat(self, *, group: int, attempt: int, seat: int) -> TokenCompleter:
        """The policy of a seat."""
        problem, rng = self.problems[group], random.Random(f"{group} {seat}")
        wrong = problem.answer + rng.choice((-3, -2, -1, 1, 2, 3))
        return _Seat(
            model=self.model.seat(group=group, attempt=attempt, seat=seat),
            renderer=self.renderer,
            right=worked(problem, problem.answer),
            revised=worked(problem, problem.answer if rng.random() < 0.5 else wrong),
        )


@dataclass(frozen=True, kw_only=True)
class _Seat(TokenCompleter):
    model: TokenCompleter
    renderer: Any
    right: str
    revised: str

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        text = reply(self.renderer.tokenizer.decode(model_input.to_ints()), self.right, self.revised)
        if text is None:
            return await self.model(model_input, stop, max_tokens=max_tokens)
        (end,) = self.renderer.get_stop_sequences()
        tokens = [*reply_tokens(self.renderer, text), end]
        return TokensWithLogprobs(tokens=tokens, maybe_logprobs=[0.0] * len(tokens), stop_reason="stop")


class Table:
    """Critique self-play of a policy as the arms have it, a conversation a problem."""

    def __init__(self, opened: Any, problems: Sequence[Question], voters: Sequence[Any]):
        options = yaml.safe_load(CRITIQUE_TEXTS.read_text(encoding="utf-8"))
        protocol = critique_protocol(options["num_agents"], ballots="labels", on_failure="continue")
        self.protocol = protocol.with_prompts(options["prompts"])
        self.problems = problems
        sizes = {name: REAL_OPTIONS[name] for name in ("max_tokens", "temperature")}
        self.policy = Policy(sampler=opened.client, sampling=Sampling(seed=0, **sizes))
        self.builders = [
            MultiAgentConversationEnvGroupBuilder(
                question=each.question,
                renderer=opened.renderer,
                protocol=self.protocol,
                reward=Unpaid(),
                voter=voter,
                num_agents=options["num_agents"],
                seed=place,
            )
            for place, (each, voter) in enumerate(zip(problems, voters, strict=True))
        ]

    async def play(self, policy: Any) -> list[tuple[Question, ConversationRecord]]:
        """Hold all conversations."""
        await run_groups(self.builders, policy, max_retries=0)
        records = [ConversationRecord.model_validate(each.record()) for each in self.builders]
        return list(zip(self.problems, records, strict=True))


async def _opened(policy: str) -> Any:
    engine = EngineConfig()
    service = Engines().service(engine)
    return await open_policy(find_target(policy), engine, renderer_name=None, service=service)


async def examples(model: str, problems: Sequence[Question]) -> list[list[dict[str, str]]]:
    """The messages of all examples: what was said, and as many votes, a third of them for each label."""
    opened = await _opened(model)
    problems = [each for each in problems for _ in range(_TIMES)]
    voters = [Voter(answer=str(each.answer)) for each in problems]
    table = Table(opened, problems, voters)
    played = await table.play(Seats(model=table.policy, renderer=opened.renderer, problems=problems))
    said = [
        [*table.protocol.messages(turn.prompt), {"role": "assistant", "content": turn.text}]
        for problem, record in played
        for turn in record.turns
        if turn.segment == "critique"
        or (turn.segment in ("proposal", "revision") and is_correct(turn.text, str(problem.answer)))
    ]
    votes = [vote for voter in voters for vote in voter.votes]
    return said + _balanced(votes, len(said) // 3, random.Random(0))


async def audit(policy: str, problems: Sequence[Question]) -> dict[str, float]:
    """What the policy's solutions, critiques and votes are worth, in a conversation about each problem, in per cent.

    ``first`` and ``final`` solutions that are right; critiques that can be read, of those the ones that call a solution
    rightly right or wrong and the ones that name the answer, and of right solutions those called right; of pairs of a
    right and a wrong solution, those in which both orders together prefer the right one.
    """
    opened = await _opened(policy)
    voter = JudgeOptions().make(PolicyRef(sampling_client=opened.client), opened.renderer)
    table = Table(opened, problems, [voter] * len(problems))
    found: dict[str, list[bool | float]] = {}

    def note(name: str, value: bool | float) -> None:
        found.setdefault(name, []).append(value)

    for problem, record in await table.play(table.policy):
        answer = str(problem.answer)
        right: dict[tuple[str, int], bool] = {}
        for turn in record.turns:
            if turn.segment in ("proposal", "revision"):
                is_right = right[turn.segment, turn.agent_id] = is_correct(turn.text, answer)
                note("first" if turn.segment == "proposal" else "final", is_right)
        for turn in record.turns:
            if turn.segment == "critique":
                _note_critiques(turn, right, answer, note)
            elif turn.segment in _VOTED:
                for vote in getattr(turn.response, "preferences", ()):
                    _note_vote(vote, _VOTED[turn.segment], right, note)
    return {name: 100 * sum(values) / len(values) for name, values in sorted(found.items())}


def _note_critiques(turn: Any, right: Any, answer: str, note: Any) -> None:
    critiques = {each.target: each.text for each in getattr(turn.response, "critiques", ())}
    for target in {agent for _, agent in right} - {turn.agent_id}:
        said = critiques.get(target, "").partition(",")[0].strip().lower()
        note("critiques: readable", said in ("right", "wrong"))
        if said in ("right", "wrong") and ("proposal", target) in right:
            is_right = right["proposal", target]
            note("critiques: true", (said == "right") == is_right)
            note("critiques: names the answer", is_correct(critiques[target], answer))
            if is_right:
                note("critiques: of a right solution, true", said == "right")


def _note_vote(vote: Any, segment: str, right: Any, note: Any) -> None:
    if isinstance(vote, Tie):
        one, other, share = vote.first, vote.second, 0.5
    else:
        one, other, share = vote.winner, vote.loser, vote.share
    is_right, is_other = (right.get((segment, agent)) for agent in (one, other))
    if is_right is not None and is_other is not None and is_right != is_other:
        share = share if is_right else 1.0 - share
        note(f"votes on a {segment}: for the right one", 1.0 if share > 0.5 else 0.5 if share == 0.5 else 0.0)


def _balanced(votes: Any, count: int, rng: random.Random) -> list[list[dict[str, str]]]:
    """So many votes for each label, or as many as there are for the rarest."""
    found: list[list[dict[str, str]]] = []
    by_label = {
        label: [messages for messages, outcome in votes if outcome is label]
        for label in (Outcome.A, Outcome.B, Outcome.TIE)
    }
    count = min(count, *map(len, by_label.values()))
    for label, own in by_label.items():
        verdict = f'{VERDICT_PREFIX}{label.value}"}}'
        found += [
            [*messages, {"role": "assistant", "content": verdict}] for messages in rng.sample(own, count)
        ]
    return found


def warm_up(bed: WarmBed) -> None:
    """Train the bed's policy, unless its run is there."""
    if bed.start.exists():
        return
    folder = bed.run.parent
    made = asyncio.run(examples(bed.model, bed.problems("warmup")))
    write_problems(folder / "train.jsonl", bed.problems("warmup"))
    lines = "".join(f"{json.dumps({'messages': each})}\n" for each in made)
    (folder / "examples.jsonl").write_text(lines, encoding="utf-8")
    viva.train(
        "warmup",
        model=bed.model,
        prompts=str(folder / "train.jsonl"),
        steps=WARM_STEPS,
        seed=0,
        learning_rate=bed.learning_rates[0],
        log_path=str(bed.run),
        config={
            "examples": str(folder / "examples.jsonl"),
            "lora_rank": REAL_OPTIONS["lora_rank"],
            "batch_size": 16,
            "eval_every": 0,
            "behavior_if_exists": "delete",
            "trackers": [],
        },
    )


def main(argv: Sequence[str]) -> None:
    """Print the audit of the model and of its warm-up, or of a run."""
    if not argv or argv[0] not in WARM or len(argv) > 2:
        sys.exit(
            f"give one of {', '.join(WARM)}, and a run if it is to be of another policy; got {' '.join(argv)}"
        )
    bed = bed_named(argv[0])
    policies = {"run": argv[1]} if len(argv) > 1 else {"before": bed.model, "after": bed.untrained}
    found = {
        name: asyncio.run(audit(policy, bed.problems("test")[:_AUDITED])) for name, policy in policies.items()
    }
    print(f"| | {' | '.join(found)} |\n|---{'|---' * len(found)}|")
    for name in dict.fromkeys(each for figures in found.values() for each in figures):
        cells = (f"{figures[name]:.0f}" if name in figures else "-" for figures in found.values())
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
