"""Conversations of critique self-play between scripted agents, as a run stores them."""

import asyncio
import random
import re
from typing import Any

from conversation_groups import critique_group

from viva.judging.comparison import VERDICT_PREFIX
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.rewards.review import review_rules
from viva.testing import ScriptedSamplingClient, tiny_renderer
from viva.training.rollouts import run_group
from viva.training.sampling import Sampling, SeatSampler

RENDERER = tiny_renderer()
NUM_CONVERSATIONS = 6


def script(prompt: str, call: int) -> str:
    """Agents that say something different to every prompt, and the same to the same one."""
    noise = random.Random(prompt)
    shown = re.findall(r"^Solution ([A-Z]):$", prompt, re.M)
    own = re.search(r"Solution ([A-Z]) is yours", prompt)
    others = [letter for letter in shown if own is None or letter != own[1]]
    noise.shuffle(others)
    if "Check and rank" in prompt:
        signs = [noise.choice(">>=") for _ in others[1:]]
        ranking = "".join(f"{letter} {sign} " for letter, sign in zip(others, [*signs, ""], strict=True))
        return f"Ranking: {ranking}" if noise.random() < 0.9 else "I cannot say."
    if "Criticise" in prompt:
        return "\n".join(f"Critique of {letter}: add again." for letter in others[: noise.randint(0, 3)])
    if "Revise or defend" in prompt:
        mine = re.findall(r"^Your solution:\n> (\d)", prompt, re.M)[0]
        return f"Defend: {mine}" if noise.random() < 0.3 else f"Revise: {noise.randint(1, 3)}"
    return str(noise.randint(1, 3))


def next_token(prompt: str) -> dict[str, float]:
    """The verdict of a judge that goes by the words alone."""
    if not prompt.endswith(VERDICT_PREFIX):
        return {}
    noise = random.Random(prompt)
    return {"A": noise.random() / 2, "B": noise.random() / 2, "T": 0.01}


def play(question: str, seed: int, preset: str, *, agents_compare: bool) -> dict[str, Any]:
    """The record of a conversation of critique self-play by a preset."""
    client = ScriptedSamplingClient(renderer=RENDERER, script=script, next_token=next_token)
    judge = PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER)
    builder = critique_group(
        question=question,
        renderer=RENDERER,
        rules=review_rules(preset),
        judge=None if agents_compare else judge,
        answer="1",
        grader=lambda solution, answer: solution.strip() == answer,
        seed=seed,
    )
    asyncio.run(run_group(builder, SeatSampler(sampler=client, sampling=Sampling(seed=0, max_tokens=400))))
    record = builder.record()
    assert record is not None
    return record
