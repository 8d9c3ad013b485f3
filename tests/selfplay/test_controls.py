"""Controls: what is read differs as declared, everything else is asked, sampled and paid as ever."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from review_agents import (
    HONEST,
    IMPROVING,
    Behaviour,
    Place,
    Population,
    builder_of,
    but,
    crashing_at,
    everyone,
    streams_of,
)
from tinker_cookbook.completers import TokenCompleter

from viva.conversation.protocol import Control, Protocol, Round, Sight, View
from viva.conversation.records import Critique, CritiqueReply, ReplyStatus, Turn
from viva.rewards import comas, peer_review, r_diag, r_sol
from viva.selfplay.check import dry_runs
from viva.selfplay.controls import as_read, controlled, foreign, shuffled
from viva.selfplay.critique import critique_protocol
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.selfplay.round_robin import round_robin_protocol
from viva.testing import ScriptedReply, crashing
from viva.training.rollouts import GroupOutcome, run_group, run_groups

CONTROLS: tuple[Control, ...] = ("foreign_critiques", "shuffled_critiques", "no_critiques", "no_exchange")


def turns_of(targets: Mapping[int, list[int]], problem: str) -> list[Turn]:
    """Critiques by critic, each with a text of its own."""
    return [
        Turn(
            agent_id=critic,
            round_index=1,
            prompt="",
            text="",
            response=CritiqueReply(
                critiques=tuple(
                    Critique(target=target, text=f"{problem} {critic} of {target}", start=0, stop=1)
                    for target in own
                ),
                dropped={},
            ),
            status=ReplyStatus.OK,
            segment="critique",
            lane=1,
        )
        for critic, own in targets.items()
    ]


def critiqued(num_agents: int, smallest: int = 0) -> st.SearchStrategy[dict[int, list[int]]]:
    """Who criticises whom."""

    def of(critic: int) -> st.SearchStrategy[list[int]]:
        others = [agent for agent in range(num_agents) if agent != critic]
        return st.lists(st.sampled_from(others), unique=True, min_size=smallest)

    return st.fixed_dictionaries({critic: of(critic) for critic in range(num_agents)})


@given(st.data(), st.integers(3, 6), st.integers())
def test_a_shuffled_critique_is_read_by_neither_its_target_nor_its_critic(
    data: st.DataObject, num_agents: int, seed: int
) -> None:
    targets = data.draw(critiqued(num_agents))
    dealt = list(shuffled(turns_of(targets, "here"), num_agents, str(seed)).values())
    assert all(each.reader not in (each.target, each.critic) for each in dealt)
    assert sorted(each.text for each in dealt) == sorted(
        f"here {critic} of {target}" for critic, own in targets.items() for target in own
    )
    for (
        critic,
        own,
    ) in targets.items():  # as many for each, of the same critics; a lone one has to go elsewhere
        if len(own) > 1:
            assert sorted(each.reader for each in dealt if each.critic == critic) == sorted(own)


@given(st.data(), st.integers(2, 5))
def test_foreign_critiques_are_as_many_none_twice_and_none_of_ones_own(
    data: st.DataObject, num_agents: int
) -> None:
    here, there = data.draw(critiqued(num_agents)), data.draw(critiqued(num_agents))
    dealt = list(foreign(turns_of(here, "here"), turns_of(there, "there")).values())
    num_there = sum(map(len, there.values()))
    asked = Counter(target for own in here.values() for target in own)
    read = Counter(each.reader for each in dealt)
    assert read == {agent: min(count, num_there) for agent, count in asked.items() if num_there}
    assert all(each.text == f"there {each.critic} of {each.target}" for each in dealt)
    assert len({(each.reader, each.text) for each in dealt}) == len(dealt)


def test_where_the_same_agents_criticise_the_same_agents_each_critique_has_its_counterpart() -> None:
    everybody = {critic: [agent for agent in range(4) if agent != critic] for critic in range(4)}
    here, there = turns_of(everybody, "here"), turns_of(everybody, "there")
    read = as_read(here, foreign(here, there))
    assert [turn.response.critiques for turn in read] == [
        tuple(
            Critique(target=each.target, text=each.text, start=0, stop=0) for each in turn.response.critiques
        )
        for turn in there
    ]


@dataclass(kw_only=True)
class Populations:
    """Every group has agents of its own."""

    groups: list[Population]

    def seat(self, *, group: int, attempt: int, seat: int) -> TokenCompleter:
        return self.groups[group].seat(group=group, attempt=attempt, seat=seat)


def naming(
    problem: str, seen: dict[tuple[str, int], tuple[str, ...]], base: Behaviour = IMPROVING
) -> Behaviour:
    """Critiques that name the problem; notes what an agent reads about its solution."""

    def revise(place: Place) -> ScriptedReply | str:
        seen[problem, place.agent_id] = place.critiques
        return base(place)

    def criticise(place: Place) -> str:
        return "\n".join(
            f"Critique of {letter}: {problem}, {place.letters[letter]}" for letter in place.others
        )

    return but(base, revision=revise, critique=criticise)


def controlled_builder(
    control: Control | None, question: str = "Which?", **options: Any
) -> MultiAgentConversationEnvGroupBuilder:
    builder = builder_of(4, question=question, **options)
    return builder if control is None else replace(builder, protocol=controlled(builder.protocol, control, 4))


async def play(
    control: Control | None, agents: Mapping[int, Behaviour]
) -> tuple[GroupOutcome, MultiAgentConversationEnvGroupBuilder]:
    builder = controlled_builder(control)
    return await run_group(builder, Population(agents=agents), max_retries=0), builder


async def batch(
    first: Mapping[int, Behaviour],
    second: Mapping[int, Behaviour],
    *,
    latencies: int | None = None,
    max_retries: int = 0,
    questions: tuple[str, str] = ("Which?", "Who?"),
    **options: Any,
) -> tuple[list[GroupOutcome], list[dict[str, Any]]]:
    """Two conversations that read each other's critiques, and their records."""
    builders = [controlled_builder("foreign_critiques", question, **options) for question in questions]
    rng = None if latencies is None else random.Random(latencies)
    policy = Populations(groups=[Population(agents=agents, latencies=rng) for agents in (first, second)])
    outcomes = await run_groups(builders, policy, max_retries=max_retries)
    return outcomes, [builder.record() or {} for builder in builders]


async def test_two_conversations_read_each_others_critiques_and_say_so() -> None:
    seen: dict[tuple[str, int], tuple[str, ...]] = {}
    outcomes, records = await batch(everyone(naming("P", seen)), everyone(naming("Q", seen)))
    assert [outcome.void_reason for outcome in outcomes] == [None, None]
    for problem, other in ("PQ", "QP"):
        for agent_id in range(4):
            texts = seen[problem, agent_id]
            assert len(texts) == 3
            assert all(
                text.startswith(f"{other}, quality") and text.endswith(f"by {agent_id}") for text in texts
            )
    assert [record["control"]["question"] for record in records] == ["Who?", "Which?"]
    shown = records[0]["control"]["shown"]
    assert [(each["reader"], each["critic"]) for each in shown] == [
        (reader, critic) for reader in range(4) for critic in range(4) if critic != reader
    ]
    assert tuple(each["text"] for each in shown if each["reader"] == 2) == seen["P", 2]


async def test_what_foreign_critics_wrote_does_not_depend_on_who_is_fast() -> None:
    records = [
        (await batch(everyone(naming("P", {})), everyone(naming("Q", {})), latencies=latencies))[1]
        for latencies in (None, 1, 2, 3)
    ]
    assert all(each == records[0] for each in records)


async def test_critics_are_paid_for_the_gain_of_their_targets_on_their_own_tokens() -> None:
    outcomes, records = await batch(everyone(naming("P", {})), everyone(naming("Q", {})))
    real, builder = await play(None, everyone(naming("P", {})))
    assert records[0]["streams"] == (builder.record() or {})["streams"]
    assert outcomes[0].group is not None
    assert real.group is not None
    assert outcomes[0].group.get_total_rewards() == real.group.get_total_rewards()


async def test_nobody_waits_for_a_conversation_that_never_gets_to_its_critiques() -> None:
    seen: dict[tuple[str, int], tuple[str, ...]] = {}
    outcomes, records = await batch(
        everyone(naming("P", seen)), everyone(crashing_at(HONEST, "proposal")), max_retries=2
    )
    assert [outcome.group is None for outcome in outcomes] == [False, True]
    assert set(seen.values()) == {()}
    assert records[0]["control"]["shown"] == []


async def test_of_several_attempts_the_first_that_has_critiques_is_read() -> None:
    seen: dict[tuple[str, int], tuple[str, ...]] = {}
    crashed: list[bool] = []

    def criticise(place: Place) -> str:
        attempt = len(crashed) + 1
        return "\n".join(f"Critique of {letter}: attempt {attempt}" for letter in place.others)

    def revise(place: Place) -> ScriptedReply | str:
        if crashed or place.agent_id != 3:
            return IMPROVING(place)
        crashed.append(True)
        return crashing("once")

    flaky = but(IMPROVING, critique=criticise, revision=revise)
    outcomes, _ = await batch(everyone(naming("P", seen)), everyone(flaky), max_retries=1)
    assert [outcome.retries for outcome in outcomes] == [0, 1]
    assert {text for texts in seen.values() for text in texts} == {"attempt 1"}


async def test_a_batch_with_one_problem_alone_reads_nothing() -> None:
    seen: dict[tuple[str, int], tuple[str, ...]] = {}
    agents = everyone(naming("P", seen))
    _, records = await batch(agents, agents, questions=("Which?", "Which?"))
    assert set(seen.values()) == {()}
    assert records[0]["control"] == {"name": "foreign_critiques", "question": None, "shown": []}


async def test_a_conversation_by_itself_has_nobody_to_read() -> None:
    with pytest.raises(ValueError, match="play batches with"):
        await controlled_builder("foreign_critiques").make_envs()


async def test_shuffled_critiques_are_of_somebody_else() -> None:
    seen: dict[tuple[str, int], tuple[str, ...]] = {}
    outcome, builder = await play("shuffled_critiques", everyone(naming("P", seen)))
    assert outcome.void_reason is None
    for (_, agent_id), texts in seen.items():
        assert len(texts) == 3
        assert not any(text.endswith(f"by {agent_id}") for text in texts)
    shown = (builder.record() or {})["control"]["shown"]
    assert len(shown) == 12
    assert all(each["reader"] not in (each["critic"], each["target"]) for each in shown)
    assert all(agent["r_diag"] > 0 for agent in streams_of(builder).values())


@pytest.mark.parametrize("control", ["shuffled_critiques", "foreign_critiques"])
async def test_where_whole_turns_are_shown_agents_read_what_is_dealt_to_them_and_nothing_else(
    control: Control,
) -> None:
    builders = [controlled_builder(None, question) for question in ("Which?", "Who?")]
    protocol = builders[0].protocol
    first, review, revise, verdict = protocol.rounds
    revise = replace(revise, sights=(revise.sights[0], Sight(segments=("critique",), whose="addressed")))
    protocol = controlled(replace(protocol, rounds=(first, review, revise, verdict)), control, 4)
    builders = [replace(builder, protocol=protocol) for builder in builders]
    policy = Populations(groups=[Population(agents=everyone(naming(problem, {}))) for problem in "PQ"])
    await run_groups(builders, policy, max_retries=0)
    for builder in builders:
        record = builder.record() or {}
        for agent_id in range(4):
            (prompt,) = (
                turn["prompt"]
                for turn in record["turns"]
                if (turn["segment"], turn["agent_id"]) == ("revision", agent_id)
            )
            read = [each["text"] for each in record["control"]["shown"] if each["reader"] == agent_id]
            assert [line[2:] for line in prompt.splitlines() if ", quality" in line] == read
            assert len(read) == 3


async def test_without_critiques_agents_rank_and_revise_and_r_diag_is_empty() -> None:
    outcome, builder = await play("no_critiques", everyone(IMPROVING))
    assert outcome.void_reason is None
    record = builder.record() or {}
    assert {turn["segment"] for turn in record["turns"]} == {"proposal", "ranking", "revision", "verdict"}
    assert all("Critique of it" not in turn["prompt"] for turn in record["turns"])
    assert {agent["r_diag"] for agent in streams_of(builder).values()} == {0.0}
    credit = builder.credit()
    assert credit is not None
    assert {span.stream for span in credit.spans} == {"r_sol", "r_meta"}


async def test_without_exchange_critiques_are_written_and_paid_and_nobody_reads_them() -> None:
    seen: dict[tuple[str, int], tuple[str, ...]] = {}
    outcome, builder = await play("no_exchange", everyone(naming("P", seen)))
    assert outcome.void_reason is None
    assert set(seen.values()) == {()}
    real = (await play(None, everyone(naming("P", {}))))[1]
    assert streams_of(builder) == streams_of(real)
    for turn in (builder.record() or {})["turns"]:
        if turn["segment"] == "revision":
            others = [f"by {agent_id}" for agent_id in range(4) if agent_id != turn["agent_id"]]
            assert f"by {turn['agent_id']}" in turn["prompt"]
            assert not any(other in turn["prompt"] for other in others)


def seen_by(protocol: Protocol, num_agents: int) -> dict[tuple[int, int], set[int]]:
    """Agents whose turns are shown, by (round, agent)."""
    honest = dry_runs(protocol, num_agents)[0]
    return {place: {agent_id for _, agent_id in turns} for place, turns in honest.seen.items()}


@pytest.mark.parametrize("order", ["sequential", "simultaneous"])
def test_in_turns_without_exchange_everybody_sees_itself_alone(order: Any) -> None:
    protocol = round_robin_protocol(3, order=order)
    alone = seen_by(controlled(protocol, "no_exchange", 3), 3)
    assert alone == {
        (index, agent): ({agent} if index else set()) for index in range(3) for agent in range(3)
    }
    assert seen_by(protocol, 3)[2, 2] == {0, 1, 2}


def test_a_users_protocol_without_exchange_keeps_what_votes_are_about() -> None:
    ranking = critique_protocol(3).rounds[3].segments[0]
    debate = Protocol(
        rounds=[
            Round("open", "Argue."),
            Round("close", "Conclude.", ["open"]),
            Round("vote", [ranking], [Sight(segments=("close",))]),
        ]
    )
    alone = seen_by(controlled(debate, "no_exchange", 3), 3)
    assert [alone[1, agent] for agent in range(3)] == [{0}, {1}, {2}]
    assert alone[2, 0] == {0, 1, 2}


@pytest.mark.parametrize("control", CONTROLS)
def test_every_control_is_a_protocol_that_can_be_played_and_paid(control: Control) -> None:
    protocol = controlled(critique_protocol(3), control, 3)
    assert protocol.control == control
    assert not [problem for run in dry_runs(protocol, 3) for problem in run.problems]
    peer_review().check(protocol, 3)
    r_sol().check(protocol, 3)


@pytest.mark.parametrize("reward", [r_diag(), comas()], ids=["r_diag", "comas"])
def test_rewards_that_pay_for_critique_are_refused_where_there_is_none(reward: Any) -> None:
    with pytest.raises(ValueError, match="does not ask for critique"):
        reward.check(controlled(critique_protocol(3), "no_critiques", 3), 3)


def show_nothing(turns: Any, view: View) -> str:
    return ""


@pytest.mark.parametrize(
    ("protocol", "control", "num_agents", "complaint"),
    [
        (
            round_robin_protocol(2),
            "no_critiques",
            3,
            "needs critiques that only those they address are shown",
        ),
        (round_robin_protocol(2), "shuffled_critiques", 3, "use control=no_exchange"),
        (critique_protocol(2), "shuffled_critiques", 2, "needs num_agents=3 or more"),
        (Protocol(rounds=[Round("solve", "Solve.")]), "no_exchange", 2, "would change nothing"),
    ],
)
def test_a_control_that_a_protocol_cannot_have_is_refused(
    protocol: Protocol, control: Control, num_agents: int, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        controlled(protocol, control, num_agents)


def test_critiques_that_everybody_sees_cannot_be_swapped() -> None:
    protocol = critique_protocol(3)
    public = Round("revise", protocol.rounds[2].segments, [Sight(segments=("critique",), show=show_nothing)])
    rounds = [*protocol.rounds[:2], public, protocol.rounds[3]]
    with pytest.raises(ValueError, match="only those they address"):
        controlled(Protocol(rounds=rounds), "shuffled_critiques", 3)
