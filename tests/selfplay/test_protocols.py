"""Every protocol that ships passes its own check; a broken one does not."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viva.conversation.protocol import Protocol, Reading, Sight, View
from viva.conversation.records import ReplyStatus, Solution
from viva.selfplay.check import BUILT_IN, check_protocol, dry_runs, find_protocol
from viva.selfplay.critique import critique_protocol
from viva.selfplay.round_robin import round_robin_protocol
from viva.selfplay.user_code import load_target

DEBATE = Path(__file__).resolve().parents[2] / "examples" / "debate.py"


def debate() -> Protocol:
    return find_protocol(f"{DEBATE}:DEBATE", 2)


def with_segment(protocol: Protocol, index: int, **changes: Any) -> Protocol:
    """The same protocol with a change to the first segment of a round."""
    rounds = list(protocol.rounds)
    first, *others = rounds[index].segments
    rounds[index] = replace(rounds[index], segments=(replace(first, **changes), *others))
    return replace(protocol, rounds=tuple(rounds))


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("num_agents", [2, 4])
def test_the_protocols_that_ship_work(name: str, num_agents: int) -> None:
    lines, problems = check_protocol(find_protocol(name, num_agents), num_agents)
    assert problems == []
    assert lines[0].startswith(f"protocol {name}")
    assert not [line for line in lines if "no scripted reply could be read" in line]


def test_the_example_is_a_debate_in_alternate_turns_of_under_thirty_lines() -> None:
    lines, problems = check_protocol(debate(), 2)
    assert problems == []
    assert "  agent 1 sees the problem; opening of 0, 1; rebuttal of 0" in lines
    assert "  agent 0 sees the problem; opening of 0, 1; rebuttal of 0, 1" in lines
    assert len(DEBATE.read_text(encoding="utf-8").splitlines()) < 30


def test_a_report_says_who_sees_and_who_earns_what() -> None:
    lines, _ = check_protocol(critique_protocol(3, on_failure="continue"), 3)
    text = "\n".join(lines)
    assert "an agent's failure leaves it going with 2 or more" in text
    assert "asks for ranking: earns nothing" in text
    assert "asks for critique: earns r_diag" in text
    assert "  agent 1 sees the problem; proposal of 1; critique of 0, 2" in lines
    failing = lines[lines.index("  agent 2 fails in round 3:") :]
    assert failing[1] == "    agent 2 leaves in round 3: the policy call failed"
    assert failing[2] == "    r_sol: agent 0 (2), agent 1 (2)"


def test_every_case_ends_and_slowness_changes_nothing() -> None:
    runs = dry_runs(critique_protocol(4), 4)
    assert [run.case for run in runs] == [
        "all honest",
        "agent 3 silent",
        "agent 3 malformed",
        *(f"agent 3 fails in round {number}" for number in (1, 2, 3, 4)),
        "agent 3 slow",
    ]
    assert runs[-1].conversation == runs[0].conversation
    assert [run.is_void for run in runs] == [False] * 3 + [True] * 4 + [False]


def fails_to_read(text: str, view: View) -> Reading:
    return Reading(response=Solution(solution=text[3]), status=ReplyStatus.OK)


def test_code_that_raises_is_a_problem_with_its_case() -> None:
    _, problems = check_protocol(with_segment(debate(), 2, read=fails_to_read), 2)
    assert "agent 1 silent: IndexError: string index out of range" in problems


def test_an_instruction_that_is_no_text_is_a_problem() -> None:
    _, problems = check_protocol(with_segment(debate(), 0, instruction=lambda view: None), 2)
    told = f"the instruction of segment {debate().rounds[0].segments[0].name!r} must return a text; got None"
    assert problems
    assert all(told in each for each in problems)


def test_a_reader_that_reads_nothing_is_noted() -> None:
    def reads_nothing(text: str, view: View) -> Reading:
        return Reading(response=Solution(solution=""), status=ReplyStatus.UNSTRUCTURED)

    lines, problems = check_protocol(with_segment(debate(), 2, read=reads_nothing, on_invalid="keep"), 2)
    assert problems == []
    assert len([line for line in lines if "(no scripted reply could be read)" in line]) == 1


def test_a_protocol_that_depends_on_speed_is_a_problem() -> None:
    calls: list[int] = []

    def counts(view: View) -> str:
        calls.append(view.agent_id)
        return f"You are call {len(calls)}."

    _, problems = check_protocol(with_segment(debate(), 2, instruction=counts), 2)
    assert problems == ["agent 1 slow: the conversation depends on who is fast"]


def test_all_mistakes_of_a_declaration_are_told() -> None:
    later = Sight(segments=("conclusion",), whose="all", show=lambda turns, view: "")
    protocol = debate()
    first = replace(protocol.rounds[0], sights=(later,))
    bad = replace(protocol, rounds=(first, *protocol.rounds[1:]), min_agents=0)
    with pytest.raises(ValueError, match="asked for only later") as caught:
        check_protocol(bad, 2)
    assert "min_agents must be at least 1; got 0" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("debate", "unknown protocol 'debate'; allowed: critique, round_robin, module:ATTRIBUTE"),
        ("nowhere.at.all:X", "cannot import 'nowhere.at.all'"),
        ("nowhere.py:X", "there is no file 'nowhere.py'"),
        (f"{DEBATE}:__doc__", "must be a viva.Protocol.*got str"),
        (f"{DEBATE}:GONE", "has no attribute .GONE"),
    ],
)
def test_a_target_that_is_no_protocol_is_refused(target: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        find_protocol(target, 3)


def test_a_file_takes_the_place_of_no_module(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "random.py" for folder in ("one", "two")]
    code = "from dataclasses import dataclass\n\n\n@dataclass\nclass Mine:\n    size: int = %d\n"
    for size, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text(code % size)
    assert [load_target(f"{path}:Mine")().size for path in paths] == [0, 1]
    assert sys.modules["random"] is random


def test_what_a_file_defines_is_itself_until_the_file_is_edited(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("class Mine:\n    pass\n\nSEEN = []\n")
    mine, seen = load_target(f"{path}:Mine"), load_target(f"{path}:SEEN")
    seen.append(1)
    assert load_target(f"{tmp_path}/../{tmp_path.name}/own.py:Mine") is mine
    assert load_target(f"{path}:SEEN") == [1]
    path.write_text("class Mine:\n    is_edited = True\n")
    assert load_target(f"{path}:Mine").is_edited
    path.write_text("class Mine:\n    is_edited = True\nthis is no code\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="is no Python code"):
            load_target(f"{path}:Mine")


@pytest.mark.parametrize(
    ("parameters", "num_rounds"),
    [("max_rounds=1, num_agents=3", 1), ("*, num_agents", 4), ("num_agents, /", 4), ("max_rounds=2", 2)],
)
def test_a_function_that_makes_a_protocol_is_given_the_number_of_agents_under_that_name(
    parameters: str, num_rounds: int, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    count = "max_rounds" if "max_rounds" in parameters else "num_agents"
    path.write_text(
        f"from viva import Protocol, Round\n\ndef make({parameters}):\n"
        f"    return Protocol(rounds=[Round(f'round {{i}}', 'Say.') for i in range({count})])\n\n"
        "def other(size):\n    return make()\n"
    )
    assert len(find_protocol(f"{path}:make", 4).rounds) == num_rounds
    with pytest.raises(
        ValueError, match="must take nothing, or num_agents: missing a required argument: 'size'"
    ):
        find_protocol(f"{path}:other", 4)


def test_a_function_that_returns_a_protocol_is_a_target() -> None:
    protocol = find_protocol("viva.selfplay.critique:critique_protocol", 5)
    assert protocol.name == "critique_self_play"


@settings(max_examples=15, deadline=None)
@given(
    num_agents=st.integers(2, 5),
    max_rounds=st.integers(1, 3),
    order=st.sampled_from(["sequential", "simultaneous"]),
    on_failure=st.sampled_from(["void", "continue"]),
)
def test_every_round_robin_conversation_works(
    num_agents: int, max_rounds: int, order: Any, on_failure: Any
) -> None:
    protocol = round_robin_protocol(max_rounds, order=order, on_failure=on_failure)
    runs = dry_runs(protocol, num_agents)
    assert [run.problems for run in runs] == [()] * len(runs)
