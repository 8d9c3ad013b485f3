"""Scripted agents of critique self-play: honest ones, and those that try to get more than they earn.

A solution is a text like ``quality 3 by 0``; honest agents and the scripted judge prefer higher quality. A script is
asked with a `Place`, that is, with what an agent can know of the prompt it has to answer.
"""

import itertools
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from conversation_groups import critique_group
from tinker_cookbook.completers import TokenCompleter

from viva.judging.comparison import VERDICT_PREFIX
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.rewards.review import PRESETS
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.testing import ScriptedPolicy, ScriptedReply, ScriptedSamplingClient, crashing, slow, tiny_renderer
from viva.training.rollouts import GroupOutcome, run_group

RENDERER = tiny_renderer()
SEGMENTS = ("proposal", "ranking", "critique", "revision", "verdict")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one prompt asks of whom, and what it shows."""

    agent_id: int
    segment: str
    letters: dict[str, str]
    """Solutions by letter."""
    own: str | None
    """Letter of the agent's own solution."""
    own_solution: str
    """In the revision: what the agent proposed."""
    critiques: tuple[str, ...]
    """In the revision: what was said about it."""

    @property
    def others(self) -> list[str]:
        return [letter for letter in self.letters if letter != self.own]


Behaviour = Callable[[Place], ScriptedReply | str]


def place_of(prompt: str, segments_before: list[str]) -> Place:
    """Reads a prompt; whether a ranking is the blind one or the verdict depends on what the agent was asked before."""
    closing = prompt[prompt.rindex("\nYou are number ") :]
    agent_id = int(closing.removeprefix("\nYou are number ").split(".")[0])
    if "rank" in closing:
        segment = (
            "comparison" if "is yours" not in closing else "verdict" if "revision" in segments_before else ""
        )
        segment = segment or "ranking"
    else:
        segment = "critique" if "Criticise" in closing else "revision" if "Revise" in closing else "proposal"
    own = re.search(r"Solution ([A-Z]) is yours", closing)
    mine = re.search(r"^Your solution:\n>(.*)$", prompt, re.M)
    return Place(
        agent_id=agent_id,
        segment=segment,
        letters={
            letter: text.strip() for letter, text in re.findall(r"^Solution ([A-Z]):\n>(.*)$", prompt, re.M)
        },
        own=own[1] if own else None,
        own_solution=mine[1].strip() if mine else "",
        critiques=tuple(re.findall(r"^Critique of it:\n> (.*)$", prompt, re.M)),
    )


def quality(solution: str) -> int:
    found = re.search(r"quality (\d+)", solution)
    return int(found[1]) if found else -1


def ranking_of(letters: Mapping[str, str], *, key: Callable[[str], int] = quality) -> str:
    """A ranking by quality, equals tied."""
    ranked = sorted(letters, key=lambda letter: -key(letters[letter]))
    signs = ["=" if key(letters[a]) == key(letters[b]) else ">" for a, b in itertools.pairwise(ranked)]
    chain = "".join(f"{letter} {sign} " for letter, sign in zip(ranked, [*signs, ""], strict=True)).strip()
    return f"Checked.\nRanking: {chain}" if len(ranked) > 1 else "Checked."


def honest(qualities: Mapping[int, int], *, gain: int = 0) -> Behaviour:
    """Proposes its quality, ranks by quality, criticises everybody; its revision is better by ``gain``."""

    def reply(place: Place) -> str:
        if place.segment == "proposal":
            return f"quality {qualities[place.agent_id]} by {place.agent_id}"
        if place.segment in ("ranking", "verdict", "comparison"):
            votes_on_own = len(place.letters) == 2 or place.segment == "comparison"
            shown = (
                place.letters if votes_on_own else {letter: place.letters[letter] for letter in place.others}
            )
            return ranking_of(shown)
        if place.segment == "critique":
            return "\n".join(
                f"Critique of {letter}: mend {place.letters[letter]}." for letter in place.others
            )
        better = quality(place.own_solution) + gain
        return f"Revise: quality {better} by {place.agent_id}" if gain else f"Defend: {place.own_solution}"

    return reply


def but(base: Behaviour, **replies: Behaviour | str) -> Behaviour:
    """The same, but for what is said in the named segments."""

    def reply(place: Place) -> ScriptedReply | str:
        other = replies.get(place.segment, base)
        return other if isinstance(other, str) else other(place)

    return reply


def crashing_at(base: Behaviour, *segments: str) -> Behaviour:
    return but(base, **dict.fromkeys(segments, lambda place: crashing(f"no {place.segment}")))


def larger_wins(prompt: str) -> Mapping[str, float]:
    """The scripted judge's next token."""
    if not prompt.endswith(VERDICT_PREFIX):
        return {}
    shown = dict(re.findall(r"^Solution ([AB]):\n>(.*)$", prompt, re.M))
    first, second = (quality(shown[letter].strip()) for letter in "AB")
    return {"T": 1.0} if first == second else {"A": 1.0} if first > second else {"B": 1.0}


@dataclass(kw_only=True)
class Population:
    """Hands every seat its agent's behaviour; counts calls, so that nobody is asked more often than it should be."""

    agents: Mapping[int, Behaviour]
    latencies: random.Random | None = None
    asked: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Segments by (attempt, agent), in order of the calls."""
    num_calls: int = 0

    def seat(self, *, group: int, attempt: int, seat: int) -> TokenCompleter:
        del group, seat

        def script(prompt: str, call: int) -> ScriptedReply | str:
            del call
            self.num_calls += 1
            agent_id = place_of(prompt, []).agent_id
            before = self.asked.setdefault((attempt, agent_id), [])
            place = place_of(prompt, before)
            before.append(place.segment)
            answer = self.agents[agent_id](place)
            answer = ScriptedReply(text=answer) if isinstance(answer, str) else answer
            return answer if self.latencies is None else slow(answer, self.latencies.randrange(5))

        return ScriptedPolicy(renderer=RENDERER, script=script)


def judge_of(next_token: Callable[[str], Mapping[str, float]] = larger_wins) -> PolicySelfComparisonJudge:
    client = ScriptedSamplingClient(renderer=RENDERER, next_token=next_token)
    return PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER)


def builder_of(num_agents: int = 4, **options: Any) -> MultiAgentConversationEnvGroupBuilder:
    defaults = {
        "question": "Which?",
        "renderer": RENDERER,
        "judge": judge_of(),
        "num_agents": num_agents,
        "personas": {agent_id: f"number {agent_id}." for agent_id in range(num_agents)},
        "answer": "9",
        "grader": lambda solution, answer: quality(solution) >= int(answer),
    }
    return critique_group(**(defaults | options))


async def play(
    agents: Mapping[int, Behaviour], *, latencies: random.Random | None = None, **options: Any
) -> tuple[GroupOutcome, MultiAgentConversationEnvGroupBuilder, Population]:
    """One conversation through the loop's own rollouts, without retries."""
    builder = builder_of(len(agents), **options)
    population = Population(agents=agents, latencies=latencies)
    outcome = await run_group(builder, population, max_retries=0)
    return outcome, builder, population


QUALITIES = {0: 1, 1: 2, 2: 3, 3: 4}
HONEST = honest(QUALITIES)
IMPROVING = honest(QUALITIES, gain=10)
CHANGING = but(IMPROVING, revision=lambda p: f"Revise: quality {10 * p.agent_id + 1} by {p.agent_id}")
"""Its revisions are worth 1, 11, 21 and 31; that of agent 0 is what it proposed."""
PAPER, ROBUST = PRESETS["paper"], PRESETS["robust"]
BOTH = pytest.mark.parametrize("rules", [PAPER, ROBUST], ids=["paper", "robust"])


def everyone(behaviour: Behaviour, num_agents: int = 4) -> dict[int, Behaviour]:
    return dict.fromkeys(range(num_agents), behaviour)


def streams_of(builder: MultiAgentConversationEnvGroupBuilder) -> dict[int, dict[str, float | None]]:
    record = builder.record()
    assert record is not None
    return {int(agent_id): streams for agent_id, streams in record["streams"].items()}


def column(builder: MultiAgentConversationEnvGroupBuilder, name: str) -> list[float | None]:
    return [streams[name] for streams in streams_of(builder).values()]


async def streams(agents: Mapping[int, Behaviour], **options: Any) -> dict[int, dict[str, float | None]]:
    outcome, builder, _ = await play(agents, **options)
    assert outcome.void_reason is None
    return streams_of(builder)


def metrics_of(outcome: GroupOutcome) -> list[dict[str, float | int]]:
    """Of the first lane of every agent; the second has none."""
    assert outcome.group is not None
    assert not any(outcome.group.metrics_G[1::2])
    return outcome.group.metrics_G[::2]


def others_of(place: Place) -> dict[str, str]:
    """Solutions of all others, by letter."""
    return {letter: place.letters[letter] for letter in place.others}
