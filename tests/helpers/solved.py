"""Solutions of one problem, as rewards take them, and of three agents that are paid by a reward with a judge."""

import asyncio

from viva import Protocol, Round
from viva.judging.answers import is_correct
from viva.rewards.solutions import Solutions
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.testing import ScriptedPolicy, tiny_renderer
from viva.training.rollouts import run_group


def paid_agents(reward, judge):
    """Total rewards and record of three agents who say 1, 0, 2, and then 1, 1, 2, where 1 is right."""
    renderer, replies = tiny_renderer(), iter("102112")
    builder = MultiAgentConversationEnvGroupBuilder(
        question="Which digit?",
        renderer=renderer,
        protocol=Protocol(rounds=[Round("first", "Say it."), Round("last", "Again.", ["first"])]),
        reward=reward,
        num_agents=3,
        answer="1",
        grader=is_correct,
        judge=judge,
    )
    policy = ScriptedPolicy(renderer=renderer, script=lambda prompt, call: next(replies))
    group = asyncio.run(run_group(builder, policy, max_retries=0)).group
    return group.get_total_rewards(), builder.record()


def solutions(final, *, first=None, finished=None, logprobs=None, answer=None, seed=0):
    return Solutions(
        final_G=final,
        first_G=final if first is None else first,
        finished_G=[True] * len(final) if finished is None else finished,
        logprobs_G_T=logprobs,
        graded_G=None if answer is None else [float(is_correct(text, answer)) for text in final],
        seed=seed,
    )
