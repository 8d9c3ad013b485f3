import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import Trajectory

from viva.conversation.coordinator import MultiAgentCoordinator
from viva.conversation.env import MultiAgentConversationEnv
from viva.conversation.protocol import View
from viva.conversation.records import Conversation, CritiqueReply, Revision
from viva.judging.ballots import Preference
from viva.judging.ranking import RankingReply
from viva.selfplay.critique_prompts import critique_messages, proposal_instruction, shown
from viva.selfplay.critique_protocol import compared_items, critique_protocol
from viva.testing import Reply, Script, ScriptedPolicy, crashing, tiny_renderer

RENDERER = tiny_renderer()


def honest(prompt: str, call: int) -> Reply:
    """Solves, ranks in order of the letters, criticises everybody, revises."""
    closing = prompt[prompt.rindex("\nYou are ") :]
    if "full solution." in closing and "Revise" not in closing:
        return Reply(text=f"proposal of {closing.split('the ')[1].split(':')[0]}")
    letters = [line[9] for line in prompt.splitlines() if line.startswith("Solution ") and line.endswith(":")]
    own = closing.split("Solution ")[1][0] if "is yours" in closing else None
    others = [letter for letter in letters if letter != own]
    if "rank" in closing:
        ranked = letters if "rank all" in closing else others
        return Reply(text=f"Checked.\nRanking: {' > '.join(ranked)}")
    if "Criticise" in closing:
        return Reply(text="\n".join(f"Critique of {letter}: text on {letter}" for letter in others))
    return Reply(text="Revise: " + prompt.split("Your solution:\n> ")[1].split("\n")[0] + ", revised")


def play(
    script: Script = honest, *, num_agents: int = 4, seed: int = 0, **options: Any
) -> tuple[Conversation, list[Trajectory | str], ScriptedPolicy]:
    protocol = critique_protocol(num_agents, **options)
    coordinator = MultiAgentCoordinator("2 + 2?", num_agents, protocol, seed=seed)
    envs = [
        MultiAgentConversationEnv(agent_id, coordinator, RENDERER, lane)
        for agent_id, lane in protocol.seats(num_agents)
    ]
    policy = ScriptedPolicy(renderer=RENDERER, script=script)

    async def seat(env: MultiAgentConversationEnv) -> Trajectory | str:
        try:
            return await do_single_rollout(policy, env)
        except RuntimeError as error:
            await env.abort(str(error))
            return str(error)

    async def run() -> Sequence[Trajectory | str]:
        return await asyncio.gather(*(seat(env) for env in envs))

    results = asyncio.run(run())
    return coordinator.conversation, list(results), policy


def test_four_rounds_five_segments_and_one_call_for_each() -> None:
    conversation, results, policy = play()
    assert len(policy.prompts) == 4 * 5
    segments = {(turn.round_index, turn.lane): turn.segment for turn in conversation.turns}
    assert segments == {
        (0, 0): "proposal",
        (1, 0): "ranking",
        (1, 1): "critique",
        (2, 0): "revision",
        (3, 0): "verdict",
    }
    lengths = [len(result.transitions) for result in results if isinstance(result, Trajectory)]
    assert lengths == [4, 1] * 4
    assert {turn.status.value for turn in conversation.turns if turn.segment != "ranking"} == {"ok"}
    assert conversation.final_solutions == {
        agent_id: f"{text}, revised" for agent_id, text in conversation.solutions("proposal").items()
    }
    assert conversation.solutions("revision") == conversation.final_solutions


def test_the_prompts_are_those_that_the_built_in_policy_is_raised_on() -> None:
    conversation, _, _ = play()
    turns = {(turn.agent_id, turn.segment): turn for turn in conversation.turns}
    protocol = critique_protocol(4)
    prompt = turns[2, "proposal"].prompt
    persona = "the Skeptic: look for the step that fails."
    wanted = critique_messages("2 + 2?", [], proposal_instruction(persona))
    assert protocol.messages(prompt) == wanted
    revise = turns[1, "revision"].prompt
    critiques = [
        next(critique for critique in turns[critic, "critique"].response.critiques if critique.target == 1)
        for critic in (0, 2, 3)
    ]
    blocks = [shown("Your solution", "proposal of Pattern-Finder")]
    blocks += [shown("Critique of it", critique.text) for critique in critiques]
    assert revise.startswith(f"{shown('Problem', '2 + 2?')}{''.join(blocks)}You are the Pattern-Finder")
