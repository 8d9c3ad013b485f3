"""A warm-up of critics and voters from known answers: where all arms of ``words-warm`` and ``sums-warm`` start.

The model plays critique self-play with itself on half of the bed's problems to train on. Of its proposals, those that
are right are imitated. A script that knows the answers writes what comes after them, and this is imitated, too:
critiques say of every solution whether it is right and give the step and its result, revisions give them, and votes on
a pair (the label behind the beginning of a verdict) prefer what is right, or tie. Half of the agents revise to a wrong
number, so that there is something to vote on; that is not imitated. Arms see the other half of the problems.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tinker
import yaml
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs

import viva
from evidence.beds import CRITIQUE_TEXTS, REAL_OPTIONS, WARM_STEPS, Question, WarmBed, write_problems
from evidence.cell import open_sampler
from viva.conversation.protocol import Protocol
from viva.conversation.rendering import reply_tokens
from viva.judging.answers import is_correct
from viva.judging.ballots import Tie
from viva.judging.comparison import VERDICT_PREFIX, Comparison, Outcome
from viva.judging.judge import JudgeOptions, PolicyRef
from viva.judging.records import ConversationRecord, Transcript
from viva.recipes.demonstrations import Unpaid
from viva.selfplay.critique import critique_protocol
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.training.rollouts import run_groups
from viva.training.sampling import Sampling, SeatSampler

_OPTIONS = yaml.safe_load(CRITIQUE_TEXTS.read_text(encoding="utf-8"))
_TIMES = 2
"""Conversations about each problem."""
_AUDITED = 30
"""Problems to test on, the first ones, about which an audit has a conversation each; it takes five minutes."""
_VOTED_ON = {"ranking": "proposal", "verdict": "revision"}
"""By segment of a vote, that of the solutions."""
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


def the_protocol() -> Protocol:
    """Critique self-play as the arms have it."""
    protocol = critique_protocol(_OPTIONS["num_agents"], ballots=_OPTIONS["ballots"], on_failure="continue")
    return protocol.with_prompts(_OPTIONS["prompts"])


async def played(
    protocol: Protocol, renderer: Any, seats: Any, problems: Sequence[Question], voters: Sequence[Any]
) -> list[ConversationRecord]:
    """A conversation about each problem, with a voter each."""
    builders = [
        MultiAgentConversationEnvGroupBuilder(
            question=problem.question,
            renderer=renderer,
            protocol=protocol,
            reward=Unpaid(),
            voter=voter,
            num_agents=_OPTIONS["num_agents"],
            seed=place,
        )
        for place, (problem, voter) in enumerate(zip(problems, voters, strict=True))
    ]
    await run_groups(builders, seats, max_retries=0)
    return [ConversationRecord.model_validate(each.record()) for each in builders]


def _policy(sampler: Any) -> SeatSampler:
    sizes = {name: REAL_OPTIONS[name] for name in ("max_tokens", "temperature")}
    return SeatSampler(sampler=sampler, sampling=Sampling(seed=0, **sizes))


async def examples(model: str, problems: Sequence[Question]) -> list[list[dict[str, str]]]:
    """The messages of all examples: what was said, and as many votes, a third of them for each label."""
    opened, protocol = await open_sampler(model), the_protocol()
    problems = [each for each in problems for _ in range(_TIMES)]
    voters = [Voter(answer=str(each.answer)) for each in problems]
    seats = Seats(model=_policy(opened.client), renderer=opened.renderer, problems=problems)
    records = await played(protocol, opened.renderer, seats, problems, voters)
    said = [
        [*protocol.messages(turn.prompt), {"role": "assistant", "content": turn.text}]
        for problem, record in zip(problems, records, strict=True)
        for turn in record.turns
        if turn.segment == "critique"
        or (turn.segment in ("proposal", "revision") and is_correct(turn.text, str(problem.answer)))
    ]
    votes = [vote for voter in voters for vote in voter.votes]
    return said + _balanced(votes, len(said) // 3, random.Random(0))


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


# what a policy sees


def audit_table(policies: Mapping[str, str], bed: WarmBed) -> str:
    """The figures of `audit` for policies by name, on the bed's first problems to test on."""
    problems = bed.problems("test")[:_AUDITED]
    return _table({name: asyncio.run(audit(policy, problems)) for name, policy in policies.items()})


def transcript_table(path: Path) -> str:
    """The figures of `audit` for the conversations of a run, by thirds of its steps."""
    rows = [Transcript.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
    size = -(-(1 + max(row.step for row in rows)) // 3)
    parts: dict[str, list[ConversationRecord]] = {}
    for row in rows:
        if row.record is not None:
            parts.setdefault(f"from step {row.step // size * size + 1}", []).append(row.record)
    return _table({name: _means((each, str(each.answer)) for each in part) for name, part in parts.items()})


def _table(found: Mapping[str, Mapping[str, float]]) -> str:
    rows = [f"| | {' | '.join(found)} |", f"|---{'|---' * len(found)}|"]
    for figure in dict.fromkeys(each for figures in found.values() for each in figures):
        cells = (f"{figures[figure]:.1f}" if figure in figures else "-" for figures in found.values())
        rows.append(f"| {figure} | {' | '.join(cells)} |")
    return "\n".join(rows)


async def audit(policy: str, problems: Sequence[Question]) -> dict[str, float]:
    """Means of `findings` in per cent, of a policy in a conversation about each problem."""
    opened = await open_sampler(policy)
    voter = JudgeOptions().make(PolicyRef(sampling_client=opened.client), opened.renderer)
    records = await played(
        the_protocol(), opened.renderer, _policy(opened.client), problems, [voter] * len(problems)
    )
    return _means(zip(records, (str(problem.answer) for problem in problems), strict=True))


def _means(conversations: Iterable[tuple[ConversationRecord, str]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for record, answer in conversations:
        for name, value in findings(record, answer):
            found.setdefault(name, []).append(value)
    return {name: 100 * sum(values) / len(values) for name, values in sorted(found.items())}


def findings(record: ConversationRecord, answer: str) -> Iterator[tuple[str, float]]:
    """What solutions, critiques and votes of a conversation are worth: names, and numbers from 0 to 1.

    Solutions: right. Critiques that were asked for: ``readable``, they begin with "right" or "wrong"; of those, they
    are ``true``, also ``of right ones`` alone, and ``name the answer``. Votes: how far a ``share`` is ``from a half``.
    Votes on a pair of a right and a wrong solution: ``for the right one`` (a tie is a half), and its ``share``.
    """
    right = {
        (turn.segment, turn.agent_id): is_correct(turn.text, answer)
        for turn in record.turns
        if turn.segment in _VOTED_ON.values()
    }
    for (segment, _), is_right in right.items():
        yield f"{segment}s: right", is_right
    for turn in record.turns:
        if turn.segment == "critique":
            said = {each.target: each.text for each in getattr(turn.response, "critiques", ())}
            for (segment, author), is_right in right.items():
                if segment == "proposal" and author != turn.agent_id:
                    yield from _critique_findings(said.get(author, ""), is_right, answer)
        elif turn.segment in _VOTED_ON:
            segment = _VOTED_ON[turn.segment]
            for vote in getattr(turn.response, "preferences", ()):
                yield from _vote_findings(vote, segment, right)


def _critique_findings(text: str, is_right: bool, answer: str) -> Iterator[tuple[str, float]]:
    verdict = text.partition(",")[0].strip().lower()
    yield "critiques: readable", verdict in ("right", "wrong")
    if verdict in ("right", "wrong"):
        yield "critiques: true", (verdict == "right") == is_right
        yield "critiques: name the answer", is_correct(text, answer)
        if is_right:
            yield "critiques: true, of right ones", verdict == "right"


def _vote_findings(
    vote: Any, segment: str, right: Mapping[tuple[str, int], bool]
) -> Iterator[tuple[str, float]]:
    is_tie = isinstance(vote, Tie)
    yield f"votes on {segment}s: share from a half", 0.0 if is_tie else abs(vote.share - 0.5)
    one, other = (vote.first, vote.second) if is_tie else (vote.winner, vote.loser)
    if right[segment, one] != right[segment, other]:
        share = 0.5 if is_tie else vote.share if right[segment, one] else 1.0 - vote.share
        yield f"votes on {segment}s: for the right one", 0.5 if is_tie else float(share > 0.5)
        yield f"votes on {segment}s: its share", share
