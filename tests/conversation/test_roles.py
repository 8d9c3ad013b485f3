"""Which policy speaks at which turn: by agent, by role, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.conversation.protocol import Protocol, Round, Segment
from viva.conversation.roles import assign
from viva.selfplay.critique import critique_protocol
from viva.selfplay.round_robin import round_robin_protocol

CRITIQUE = critique_protocol(3, comparisons=True)
TURNS = round_robin_protocol(2)


def test_one_policy_for_all_is_not_assigned():
    with pytest.raises(ValueError, match="policies=shared is one policy"):
        assign("shared", CRITIQUE, 3)


def test_each_agent_has_a_policy_of_its_own_in_all_its_turns():
    roles = assign("per_agent", CRITIQUE, 3)
    assert roles.trained == ("agent_0", "agent_1", "agent_2")
    assert all(name == f"agent_{agent_id}" for (agent_id, _), name in roles.members.items())


def test_the_solver_proposes_and_revises_and_the_critic_does_all_else():
    roles = assign("per_role", CRITIQUE, 3)
    assert roles.trained == ("solver", "critic")
    played = {segment: name for (_, segment), name in roles.members.items()}
    assert played == {
        "proposal": "solver",
        "revision": "solver",
        "ranking": "critic",
        "critique": "critic",
        "verdict": "critic",
        "comparison": "critic",
    }


def test_a_segment_without_a_role_is_its_own():
    protocol = Protocol(
        rounds=[
            Round("ask", [Segment(name="ask", instruction=str)]),
            Round("reply", [Segment(name="reply", instruction=str, role="tutor")], ["ask"]),
        ]
    )
    assert assign("per_role", protocol, 2).trained == ("ask", "tutor")


def test_others_stand_for_all_that_are_not_named():
    roles = assign({"others": "initial", "agent_1": "trained"}, TURNS, 3)
    assert [roles.members[agent_id, "turn"] for agent_id in range(3)] == ["others", "agent_1", "others"]
    assert (roles.trained, roles.frozen) == (("agent_1",), {"others": "initial"})
    assert [roles.speaker(agent_id, "turn").is_trained for agent_id in range(3)] == [False, True, False]


@given(st.permutations(["agent_0", "agent_1", "agent_2"]))
def test_the_order_of_the_names_changes_nothing(names):
    policies = {"agent_0": "initial", "agent_1": "trained", "agent_2": "trained"}
    assert assign({name: policies[name] for name in names}, TURNS, 3) == assign(policies, TURNS, 3)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("per-agent", r"must be shared, per_agent, per_role or pairs.*Did you mean 'per_agent'"),
        (
            "per_role",
            r"needs two roles or more, and protocol 'round_robin' has one, 'turn'; use policies=per_agent",
        ),
        ({}, "names nobody who speaks for turn"),
        ({"agent_3": "trained"}, r"'agent_3', which is no agent and no role.*agent_2.*Did you mean"),
        ({"agent_0": "trained"}, "names nobody who speaks for agent_1, agent_2; add them, or others"),
        ({"agent_0": "trained", "turn": "trained"}, "names agents and roles, 'agent_0' and 'turn'"),
        ({"others": "trained"}, "has others, and names nobody beside them"),
        ({"turn": "trained"}, "names the role 'turn', and the conversation has no other"),
        ({"agent_0": "initial", "others": "initial"}, "trains nobody"),
        (
            {"agent_0": "trained", "agent_1": "trained", "agent_2": "trained", "others": "initial"},
            "has others, and names all of them already",
        ),
    ],
)
def test_what_nobody_could_play_is_refused(policies, message):
    with pytest.raises(ValueError, match=message):
        assign(policies, TURNS, 3)


def test_a_role_that_could_be_no_folder_is_refused():
    segments = [Segment(name=name, instruction=str) for name in ("../up", "down")]
    protocol = Protocol(rounds=[Round("both", segments)])
    with pytest.raises(ValueError, match=r"the role '../up' would be the name of a folder"):
        assign("per_role", protocol, 2)
