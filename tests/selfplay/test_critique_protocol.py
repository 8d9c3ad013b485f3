import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import Trajectory

from viva.conversation.coordinator import MultiAgentCoordinator
from viva.conversation.critiques import (
    CRITIQUE_PERSONAS,
    critique_instruction,
    critique_messages,
    proposal_instruction,
    ranking_instruction,
    revision_instruction,
    shown,
)
from viva.conversation.protocol import View, shown_solution
from viva.conversation.protocol import persona as persona_of
from viva.conversation.records import Conversation, CritiqueReply, Revision
from viva.judging.ballots import Preference
from viva.judging.ranking import RankingReply
from viva.selfplay.critique import compared_items, critique_protocol
from viva.selfplay.group import MultiAgentConversationEnv
from viva.testing import Script, ScriptedPolicy, ScriptedReply, crashing, tiny_renderer

RENDERER = tiny_renderer()


def honest(prompt: str, call: int) -> ScriptedReply:
    """Solves, ranks in order of the letters, criticises everybody, revises."""
    closing = prompt[prompt.rindex("\nYou are ") :]
    if "full solution." in closing and "Revise" not in closing:
        return ScriptedReply(text=f"proposal of {closing.split('the ')[1].split(':')[0]}")
    letters = [line[9] for line in prompt.splitlines() if line.startswith("Solution ") and line.endswith(":")]
    own = closing.split("Solution ")[1][0] if "is yours" in closing else None
    others = [letter for letter in letters if letter != own]
    if "rank" in closing:
        ranked = letters if "rank all" in closing else others
        return ScriptedReply(text=f"Checked.\nRanking: {' > '.join(ranked)}")
    if "Criticise" in closing:
        return ScriptedReply(text="\n".join(f"Critique of {letter}: text on {letter}" for letter in others))
    return ScriptedReply(text="Revise: " + prompt.split("Your solution:\n> ")[1].split("\n")[0] + ", revised")


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

    def view_of(agent_id: int, aliases: Sequence[int] = ()) -> View:
        author = persona_of(agent_id, CRITIQUE_PERSONAS)
        return View(agent_id=agent_id, num_agents=4, round_index=1, aliases=tuple(aliases), persona=author)

    assert view_of(2).persona == "the Skeptic: look for the step that fails."
    wanted = critique_messages("2 + 2?", [], proposal_instruction(view_of(2)))
    assert protocol.messages(prompt) == wanted
    revise = turns[1, "revision"].prompt
    critiques = [
        next(critique for critique in turns[critic, "critique"].response.critiques if critique.target == 1)
        for critic in (0, 2, 3)
    ]
    blocks = [shown("Your solution", "proposal of Pattern-Finder")]
    blocks += [shown("Critique of it", critique.text) for critique in critiques]
    assert protocol.messages(revise) == critique_messages("2 + 2?", blocks, revision_instruction(view_of(1)))
    for segment, source in (("ranking", "proposal"), ("critique", "proposal"), ("verdict", "revision")):
        prompt, texts = turns[2, segment].prompt, conversation.solutions(source)
        own = next(letter for letter in "ABCD" if f"Solution {letter} is yours" in prompt)
        shown_as = {letter: _quoted(prompt, letter) for letter in "ABCD"}
        assert sorted(shown_as.values()) == sorted(texts.values())
        assert shown_as[own] == texts[2]
        agents = {text: agent_id for agent_id, text in texts.items()}
        view = view_of(2, [agents[text] for text in shown_as.values()])
        closing = critique_instruction(view) if segment == "critique" else ranking_instruction(view)
        assert f"Solution {own} is yours" in closing
        blocks = [shown_solution(letter, text) for letter, text in shown_as.items()]
        assert protocol.messages(prompt) == critique_messages("2 + 2?", blocks, closing)


def _quoted(prompt: str, letter: str) -> str:
    return prompt.partition(f"\nSolution {letter}:\n> ")[2].partition("\n")[0]


@pytest.mark.parametrize("num_agents", [2, 5])
def test_parallel_segments_and_agents_of_one_half_share_their_prefix_token_by_token(num_agents: int) -> None:
    _, results, _ = play(num_agents=num_agents)
    prompts = [
        [transition.ob.to_ints() for transition in result.transitions]
        for result in results
        if isinstance(result, Trajectory)
    ]
    tokenizer: Any = RENDERER.tokenizer

    def shared(one: list[int], other: list[int]) -> str:
        length = next(k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        return str(tokenizer.decode(one[:length]))

    for agent_id in range(num_agents):
        ranking, critique = prompts[2 * agent_id][1], prompts[2 * agent_id + 1][0]
        assert shared(ranking, critique).endswith(" is yours. C")  # up to "Check and" and "Criticise"
    for agent_id in range(2, num_agents):
        for round_index in (1, 3):
            prefix = shared(prompts[2 * agent_id][round_index], prompts[2 * agent_id - 4][round_index])
            assert "\nYou are the " in prefix[-20:]


def test_votes_and_critiques_are_about_agents_whatever_letters_they_had() -> None:
    def script(prompt: str, call: int) -> ScriptedReply:
        """Prefers the proposal that is greater, and says so of it."""
        closing = prompt[prompt.rindex("\nYou are ") :]
        blocks = prompt.split("\nSolution ")[1:]
        texts = {block[0]: block.split("> ")[1].split("\n")[0] for block in blocks}
        if "rank" in closing:
            return ScriptedReply(
                text=f"Ranking: {' > '.join(sorted(texts, key=texts.__getitem__, reverse=True))}"
            )
        if "Criticise" in closing:
            return ScriptedReply(text="\n".join(f"Critique of {letter}: {texts[letter]}" for letter in texts))
        return honest(prompt, call)

    for seed in range(3):
        conversation, _, _ = play(script, seed=seed)
        proposals = conversation.solutions("proposal")
        for turn in conversation.turns:
            if isinstance(turn.response, RankingReply) and turn.segment == "ranking":
                votes = [vote for vote in turn.response.preferences if isinstance(vote, Preference)]
                assert len(votes) == 3
                assert all(proposals[vote.winner] > proposals[vote.loser] for vote in votes)  # type: ignore[index]
                assert turn.response.dropped == {"own": 3}
            if isinstance(turn.response, CritiqueReply):
                assert turn.response.dropped == {"own": 1}
                for critique in turn.response.critiques:
                    assert critique.text == proposals[critique.target]


@pytest.mark.parametrize(("votes_on_own", "num_votes"), [(None, 1), (True, 1), (False, 0)])
def test_two_agents_rank_both_solutions_unless_told_otherwise(
    votes_on_own: bool | None, num_votes: int
) -> None:
    conversation, _, policy = play(num_agents=2, votes_on_own=votes_on_own)
    verdicts = [turn.response for turn in conversation.turns if turn.segment == "verdict"]
    assert [len(reply.preferences) for reply in verdicts if isinstance(reply, RankingReply)] == [
        num_votes
    ] * 2
    assert any("rank the other solutions" in prompt for prompt in policy.prompts) == (votes_on_own is False)


@pytest.mark.parametrize("round_index", range(4))
@pytest.mark.parametrize("on_failure", ["void", "continue"])
@pytest.mark.parametrize("num_agents", [2, 3])
def test_an_agent_that_fails_in_any_round_leaves_the_others_by_the_rule(
    round_index: int, on_failure: str, num_agents: int
) -> None:
    marks = ("Write your full", "Criticise", "Revise or defend", "Check and rank")

    def script(prompt: str, call: int) -> ScriptedReply:
        is_last_round = "revised" in prompt.split("Problem:")[1] or round_index < 3
        crashes = marks[round_index] in prompt and "the Pattern-Finder" in prompt and is_last_round
        return crashing() if crashes else honest(prompt, call)

    conversation, results, policy = play(script, num_agents=num_agents, on_failure=on_failure)
    (failure,) = conversation.failures
    assert (failure.agent_id, failure.round_index) == (1, round_index)
    goes_on = on_failure == "continue" and num_agents == 3
    if goes_on:
        assert sorted(conversation.final_solutions) == [0, 2]
        verdicts = [turn for turn in conversation.turns if turn.segment == "verdict"]
        assert [turn.agent_id for turn in verdicts] == [0, 2]
        # two agents left rank both of their solutions; before the failure was known, only those of others
        assert ("rank all" in verdicts[0].prompt) == (round_index < 3)
    else:
        assert len(policy.prompts) <= num_agents * (1, 3, 4, 5)[round_index]
    lengths = [len(result.transitions) for result in results if isinstance(result, Trajectory)]
    assert len(lengths) == 2 * num_agents - 1


def test_replies_say_how_they_were_read_by_segment() -> None:
    conversation, results, _ = play(lambda prompt, call: "Nothing.")
    statuses = {turn.segment: turn.status.value for turn in conversation.turns}
    assert statuses == {
        "proposal": "ok",
        "ranking": "unstructured",
        "critique": "unstructured",
        "revision": "repaired",
        "verdict": "unstructured",
    }
    (first, *_), critic = results[0].transitions, results[1].transitions[0]  # type: ignore[union-attr]
    assert (first.metrics["parse/ok"], first.metrics["parse/proposal/ok"]) == (1.0, 1.0)
    assert critic.metrics["parse/critique/unstructured"] == 1.0
    assert "parse/proposal/ok" not in critic.metrics
    revisions = [turn.response for turn in conversation.turns if turn.segment == "revision"]
    assert all(isinstance(reply, Revision) and reply.decision == "unstated" for reply in revisions)


# comparisons of revised with first solutions


def test_a_comparison_is_blind_and_about_both_solutions_of_all_others() -> None:
    conversation, results, _ = play(comparisons=True)
    assert [len(result.transitions) for result in results if isinstance(result, Trajectory)] == [5, 1] * 4
    comparisons = [turn for turn in conversation.turns if turn.segment == "comparison"]
    texts = {
        **{("initial", agent): text for agent, text in conversation.solutions("proposal").items()},
        **{("revised", agent): text for agent, text in conversation.solutions("revision").items()},
    }
    for turn in comparisons:
        assert isinstance(turn.response, RankingReply)
        assert turn.status.value == "ok"
        items = {item for vote in turn.response.preferences for item in (vote.winner, vote.loser)}  # type: ignore[union-attr]
        assert items == {item for item in texts if item[1] != turn.agent_id}
        (best, *_) = [turn.response.preferences[0].winner]  # type: ignore[union-attr]
        assert f"Solution A:\n> {texts[best]}\n" in turn.prompt  # type: ignore[index]
        assert "is yours" not in turn.prompt


def test_comparisons_are_shuffled_and_reversed_for_every_other_agent() -> None:
    def items(agent_id: int, seed: int) -> list[Any]:
        view = View(
            agent_id=agent_id, num_agents=5, round_index=4, aliases=(0, 1, 2, 3, 4), persona="", seed=seed
        )
        return [item for item in compared_items(view).values() if item[1] not in (0, 1)]  # type: ignore[index]

    assert items(0, 1) == items(1, 1)[::-1]
    first = [items(0, seed)[0][0] for seed in range(40)]
    assert 8 < first.count("initial") < 32


@pytest.mark.parametrize(("num_agents", "comparisons"), [(1, False), (27, False), (1, True), (15, True)])
def test_numbers_of_agents_without_enough_letters_are_refused(num_agents: int, comparisons: bool) -> None:
    with pytest.raises(ValueError, match=rf"num_agents must be from 2 to \d+.*; got {num_agents}"):
        critique_protocol(num_agents, comparisons=comparisons)


def test_as_many_agents_as_letters_can_play() -> None:
    conversation, _, _ = play(num_agents=26)
    assert len(conversation.final_solutions) == 26
    assert {turn.status.value for turn in conversation.turns} == {"ok"}
