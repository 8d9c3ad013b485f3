"""The beds of the bench: no shared step, the trap as it is described, warm-ups, and what transcripts show."""

import itertools
import json
import random
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from evidence import beds, run, warm, worked
from evidence.arms import HINT
from evidence.beds import BEDS, CRITIQUE_TEXTS, LARGE, REAL, WARM, bed_named, is_blind, is_trap, trap_solution
from evidence.raise_policy import RarePupil, TrappedPupil, hinted_example
from evidence.rewards import CURRENT, RARE
from evidence.transcripts import scores_table, shortcut_table
from solved import solutions
from view_runs import transcript

from viva.conversation.records import Critique, CritiqueReply
from viva.judging.ballots import Preference, divided
from viva.judging.comparison import Comparison, Outcome
from viva.rewards.serl import LENGTH_BAND, copeland
from viva.tiny.tasks import answer_of, worked_solution


def steps_of(problems):
    """All steps, sums and products with the larger number first."""
    found = set()
    for problem in problems:
        for step in problem.steps:
            pair = (step.left, step.right) if step.operator == "-" else tuple(sorted((step.left, step.right)))
            found.add((step.operator, *pair))
    return found


@pytest.mark.parametrize("name", [*REAL, *WARM])
def test_a_real_model_is_tested_on_sums_and_products_of_which_none_is_trained_on(name):
    bed = bed_named(name)

    def steps(part, seed):
        found = set()
        for each in bed.problems(part, seed=seed):
            numbers = sorted(map(int, re.findall(r"\d+", each.question)))
            sign = re.search(r" [-+*] |buys|away|boxes", each.question).group()
            assert each.answer in (
                sum(numbers),
                numbers[0] * numbers[1],
                *np.diff(numbers),
                -np.diff(numbers)[0],
            )
            found.add((sign, *numbers, each.answer))
        return found

    test = bed.problems("test")
    assert len({each.question for each in test}) == len(test) == 100
    assert test == bed.problems("test", seed=0)
    for seed in range(3):
        trained = steps("train", seed)
        assert len(trained) > (50 if name in WARM else 100)
        assert not steps("test", 0) & trained
        if name in WARM:
            assert len(bed.problems("warmup")) > 90
            assert not steps("warmup", seed) & (trained | steps("test", 0))
            assert steps("warmup", seed) == steps("warmup", 0)
    assert bed.problems("train", seed=1) != bed.problems("train", seed=2)


@pytest.mark.parametrize("name", WARM)
@pytest.mark.parametrize("arm", ["answers", "majority", "r_sol", "critique", "preference", "hint"])
def test_after_a_warm_up_all_arms_start_from_its_weights_and_are_else_as_before(name, arm):
    bed, cold = bed_named(name), bed_named(name.removesuffix("-warm"))
    start = {"load_checkpoint_path": str(bed.start)}
    assert bed.arm(arm).options == {**cold.arm(arm).options, **start}
    assert (bed.model, bed.total_tokens) == (cold.model, cold.total_tokens)
    assert bed.untrained != cold.untrained == cold.model


def test_the_script_of_a_warm_up_knows_what_is_right():
    shown = "".join(
        f"Solution {letter}:\n> {text}\nEnd of solution {letter}.\n"
        for letter, text in (("A", "The number is 24."), ("B", "It is\n> 20"), ("C", "24"))
    )
    texts = yaml.safe_load(CRITIQUE_TEXTS.read_text())["prompts"]
    asked = f"{shown}{texts['critique'].replace('{others}', 'A, B')}"
    steps = "4 * 6 = 24", "4 * 6 = 25"
    assert warm.reply(asked, *steps) == "Solution A: right, 4 * 6 = 24\nSolution B: wrong, 4 * 6 = 24"
    assert warm.reply(texts["revision"], *steps) == "Revise: 4 * 6 = 25"
    assert warm.reply(texts["proposal"], *steps) is None
    votes = {}
    for pair in itertools.permutations("ABC", 2):
        blocks = [
            re.search(rf"Solution {letter}:.*?solution {letter}\.\n", shown, re.S)[0] for letter in pair
        ]
        votes["".join(pair)] = warm.preferred("".join(blocks), "24").value
    assert votes == {"AB": "A", "BA": "B", "AC": "Tie", "CA": "Tie", "BC": "B", "CB": "A"}


@pytest.mark.parametrize("name", WARM)
def test_the_script_of_a_warm_up_works_out_every_problem(name):
    for problem in bed_named(name).problems("warmup"):
        step, _, result = warm.worked(problem, problem.answer).partition(" = ")
        assert eval(step) == int(result) == problem.answer
        assert all(number in problem.question for number in re.findall(r"\d+", step))


def test_an_audit_counts_true_critiques_and_votes_for_the_right_one():
    def turn(segment, agent_id, text="", **response):
        return SimpleNamespace(
            segment=segment, agent_id=agent_id, text=text, response=SimpleNamespace(**response)
        )

    def critique(target, text):
        return SimpleNamespace(target=target, text=text)

    record = SimpleNamespace(
        turns=[
            turn("proposal", 0, "24"),
            turn("proposal", 1, "It is 20"),
            turn("proposal", 2, "4 * 6 = 24"),
            turn("critique", 0, critiques=[critique(1, "wrong, 4 * 6 = 24"), critique(2, "Wrong, 23")]),
            turn("critique", 1, critiques=[critique(0, "no idea")]),
            turn("ranking", 2, preferences=[divided(0, 1, 0.7)]),
            turn("ranking", 1, preferences=[divided(0, 2, 0.9)]),  # both right: no pair to tell apart
            turn("revision", 0, "Revise: 24"),
            turn("revision", 1, "Revise: 21"),
            turn("verdict", 2, preferences=[divided(1, 0, 0.8)]),
            turn("verdict", 0, preferences=[divided(1, 0, 0.5)]),
        ]
    )
    found = {}
    for name, value in warm.findings(record, "24"):
        found.setdefault(name, []).append(value)
    assert found == {
        "proposals: right": [True, False, True],
        "revisions: right": [True, False],
        "critiques: readable": [True, True, False, False],
        "critiques: true": [True, False],
        "critiques: true, of right ones": [False],
        "critiques: name the answer": [True, False],
        "votes on proposals: share from a half": [pytest.approx(0.2), pytest.approx(0.4)],
        "votes on revisions: share from a half": [pytest.approx(0.3), 0.0],
        "votes on proposals: for the right one": [1.0],
        "votes on proposals: its share": [pytest.approx(0.7)],
        "votes on revisions: for the right one": [0.0, 0.5],
        "votes on revisions: its share": [pytest.approx(0.2), 0.5],
    }


def test_a_proposal_is_paid_by_the_numbers_that_other_critics_give_most_often():
    def turn(agent, *texts):
        said = tuple(Critique(target=9, text=text, start=0, stop=1) for text in texts)
        return SimpleNamespace(agent_id=agent, response=CritiqueReply(critiques=said, dropped={}))

    talk = SimpleNamespace(
        turns=[
            turn(0, "wrong, 4 * 6 = 24", "right, 4 * 6 = 24", "wrong, 4 * 6 = 20"),
            turn(1, "wrong, and the correct number"),  # gives none
            turn(2, "wrong, 24.0"),
            turn(3, "right, 20"),
        ],
        solutions=lambda name: {0: "24", 1: "The answer is 24", 2: "20", 3: "7"},
    )
    assert {agent: float(number) for agent, number in worked.worked_out(talk).items()} == {
        0: 24,
        2: 24,
        3: 20,
    }
    paid = worked.by_critics(talk)
    assert paid == {0: 0.5, 1: pytest.approx(2 / 3), 2: 0.5, 3: 0.0}
    alone = SimpleNamespace(turns=talk.turns[:1], solutions=talk.solutions)
    assert worked.by_critics(alone)[0] == 0.0, "nobody else has worked it out"


def test_a_conversation_that_is_paid_by_critics_has_two_rounds_and_trains_proposals_alone():
    streams = [(each.name, each.stream) for round_ in worked.WORKED.rounds for each in round_.segments]
    assert streams == [("proposal", "r_sol"), ("critique", None)]
    streams = [(each.name, each.stream) for round_ in worked.PEERS.rounds for each in round_.segments]
    assert streams == [("proposal", "r_sol"), ("answer", None)]
    assert not worked.PEERS.rounds[1].sights
    told = {"proposal": {0: "24", 1: "7"}, "answer": {0: "It is 24", 1: "24."}}
    assert worked.by_answers(SimpleNamespace(solutions=told.__getitem__)) == {0: 1.0, 1: 0.0}
    assert [each.name for round_ in worked.ALONE.rounds for each in round_.segments] == ["proposal"]
    told = {"proposal": {0: "24", 1: "7", 2: "It is 24.", 3: "no number"}}
    paid = worked.by_proposals(SimpleNamespace(solutions=told.__getitem__))
    assert paid == {0: pytest.approx(1 / 3), 1: 0.0, 2: pytest.approx(1 / 3), 3: 0.0}


def test_scores_are_counted_by_how_far_they_are_apart(tmp_path):
    def row(final, correct, **changes):
        errors = dict.fromkeys(final, 0.3)
        scores = {"initial": final, "final": final, "initial_error": errors, "final_error": errors}
        record = {"question": "?", "scores": scores, "correct": correct, "num_agents": len(final)}
        return transcript(0, 0) | {"record": record} | changes

    rows = [
        row({0: 0.5, 1: 0.5}, {0: True, 1: True}),
        row({0: 0.51, 1: 0.49, 2: 0.5}, {0: True, 1: False, 2: False}),  # 0.047 standard errors
        row({0: 0.9, 1: 0.1, 2: 0.5}, {0: False, 1: True, 2: True}),  # 1.9
        row({0: 0.9, 1: 0.2}, {0: True, 1: False}),  # 1.65
        row({}, {}, void=True, record=None),
    ]
    path = tmp_path / "transcripts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert scores_table([path]).splitlines()[2:] == [
        "| 0 | 25 % | - |",
        "| 0.1 | 25 % | 100 % of 2 |",
        "| 0.5 | 0 % | - |",
        "| 1 | 0 % | - |",
        "| 2 | 50 % | 33 % of 3 |",
        "| inf | 0 % | - |",
    ]


def test_groups_whose_most_frequent_answer_is_a_shortcut_are_counted_by_step(tmp_path):
    def row(step, replies, rewards, **changes):
        turns = [
            {
                "agent_id": place,
                "round_index": 0,
                "segment": "turn",
                "text": text,
                "response": {"solution": text},
            }
            for place, text in enumerate(replies)
        ]
        record = {
            "question": "Jan has 4 boxes with 3 forks and buys 9 more.",
            "answer": "21",
            "num_agents": len(replies),
        }
        return transcript(step, 0) | {"record": record | {"turns": turns}, "rewards": rewards} | changes

    rows = [
        row(0, ["21", "21", "12"], [0.9, 0.9, 0.3]),  # right
        row(0, ["12", " 12", "21"], [0.5, 0.5, 0.8]),  # 4 * 3
        row(0, ["40", "40", "21"], [0.1, 0.1, 0.1]),  # wrong, and no one operation
        row(1, ["13", "13", "5"], [1.0, 1.0, 0.4]),  # 4 + 9
        row(1, [], None, void=True, record=None),
    ]
    path = tmp_path / "transcripts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert shortcut_table(path).splitlines()[2:] == [
        "| 0 | 0.47 | 44 % | 1 of 3 |",
        "| 1 | 0.80 | 0 % | 1 of 1 |",
    ]


def test_a_runs_conversations_are_shown_by_thirds_of_its_steps_and_void_ones_left_out(tmp_path, monkeypatch):
    rows = [transcript(step, group) for step in range(7) for group in range(2)]
    rows[-1] |= {"void": True, "record": None}
    path = tmp_path / "transcripts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def findings(record, answer):
        step, group = map(int, re.findall(r"\d+", record.question))
        yield "step", step / 100
        if step < 3:
            yield f"group with answer {answer}", group / 100

    monkeypatch.setattr(warm, "findings", findings)
    assert warm.transcript_table(path).splitlines() == [
        "| | from step 1 | from step 4 | from step 7 |",
        "|---|---|---|---|",
        "| group with answer 10 | 0.5 | - | - |",
        "| step | 1.0 | 4.0 | 6.0 |",
    ]


@pytest.mark.parametrize("name", sorted({*BEDS} - {*REAL, *WARM}))
def test_no_step_of_a_test_problem_is_trained_on(name):
    bed = bed_named(name)
    test = bed.problems("test")
    smallest = 30 if bed.level else 100 if name == LARGE else 300
    assert len({(each.kind, each.numbers) for each in test}) == len(test) >= smallest
    for seed in range(3):
        assert not steps_of(test) & steps_of(bed.problems("train", seed=seed))
    assert not steps_of(test) & steps_of(bed.validation())
    assert bed.problems("train", seed=1) != bed.problems("train", seed=2)
    assert bed.problems("test", seed=0) == bed.problems("test", seed=0)


@pytest.mark.parametrize("dial", beds.DIALS)
def test_the_dial_is_the_share_of_the_traps_problems_that_a_critic_sees(dial):
    bed = bed_named(f"trap-{dial}")
    for problems, tolerance in ((bed.problems("test"), 0.02), (bed.problems("train"), 0.05)):
        trapped = [each for each in problems if is_trap(each)]
        assert len(trapped) / len(problems) == pytest.approx(0.5, abs=0.03)
        assert 1 - sum(map(is_blind, trapped)) / len(trapped) == pytest.approx(dial / 100, abs=tolerance)


@pytest.mark.parametrize("name", ["critics-70", "trap-70"])
def test_the_traps_solution_is_shorter_than_the_right_one_by_more_than_serl_lets_win(name):
    """So on these beds SERL pays nothing for a win of one over the other."""
    problems = [each for each in bed_named(name).problems("test") if is_trap(each)]
    texts = [{0: worked_solution(each), 1: trap_solution(each)} for each in problems]
    shorter = [1 - len(trap) / len(right) for right, trap in (each.values() for each in texts)]
    assert len(problems) == 165
    assert LENGTH_BAND < 0.21 < min(shorter) < max(shorter) < 0.29
    for winner in (0, 1):
        won = [Preference(winner, 1 - winner)]
        assert all(copeland(won, each) == {0: 0.0, 1: 0.0} for each in texts)
        assert copeland(won, texts[0], band=None)[winner] == 1.0


def test_a_bed_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"unknown bed 'trap-75'; there are steps, trap-50"):
        bed_named("trap-75")


def test_the_pupil_falls_into_the_trap_and_sees_it_as_critic_where_it_is_not_blind():
    pupil, rng = TrappedPupil(right=0.25, trapped=0.8), random.Random(0)
    counts = {"direct": [], "seen": [], "blind": []}
    for _ in range(4000):
        problem = pupil.problem(rng)
        if not is_trap(problem):
            assert answer_of(pupil.holds(problem)) == str(problem.answer)
            continue
        assert answer_of(trap_solution(problem)) != str(problem.answer)
        counts["direct"].append(pupil.attempt(problem, rng).solution == trap_solution(problem))
        where = "blind" if is_blind(problem) else "seen"
        assert pupil.holds(problem) == (trap_solution if where == "blind" else worked_solution)(problem)
        counts[where].append(pupil.critic(problem, rng).right)
    shares = {name: np.mean(values) for name, values in counts.items()}
    assert shares["direct"] == pytest.approx(0.6, abs=0.04)
    assert shares["seen"] == pytest.approx(0.9, abs=0.04)
    assert shares["blind"] == pytest.approx(0.09, abs=0.04)


def test_the_pupil_of_rare_successes_is_right_as_its_levels_say_and_more_often_with_the_hint():
    pupil, rng = RarePupil(), random.Random(0)
    right = {level: [] for level in beds.LEVELS}
    for level in right:
        for problem in bed_named(f"rare-{level}").problems("train"):
            right[level].append(pupil.attempt(problem, rng).right)
    for level, values in right.items():
        assert np.mean(values) == pytest.approx(level / 100, abs=0.04)
    hinted = [hinted_example(random.Random(seed), pupil) for seed in range(400)]
    assert all(each.messages[0]["content"] == HINT for each in hinted)
    assert 0.2 < np.mean([each.reply.count("=") == 2 for each in hinted]) < 0.3


def test_without_points_for_ties_a_judge_that_knows_nothing_pays_the_rarer_answer_more():
    tied = {0, 1, 2}  # in the same words; else the first place wins
    comparisons = [
        Comparison(
            first=one, second=other, outcome=Outcome.TIE if {one, other} <= tied else Outcome.A, score=0
        )
        for one, other in itertools.permutations(range(4), 2)
    ]
    group = replace(solutions(["a", "a", "a", "b"]), comparisons=comparisons)
    assert RARE.pay(group) == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert CURRENT.pay(group) == [0.5] * 4


def test_the_groups_of_a_bed_are_written_apart(tmp_path):
    run.main(["problems", "trap-70", str(tmp_path)])
    lines = {path.stem: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert sorted(lines["plain"] + lines["seen"] + lines["unseen"]) == sorted(lines["trap-70"])
    assert len(lines["seen"]) / (len(lines["seen"]) + len(lines["unseen"])) == pytest.approx(0.7, abs=0.02)


def test_sums_are_told_by_family_and_other_beds_by_their_own_groups():
    def counted(name):
        bed = bed_named(name)
        return Counter(bed.group_of(each) for each in bed.problems("test"))

    assert counted("sums") == {"chain_sum": 72, "products": 28}
    assert counted("trap-70") == {"plain": 165, "seen": 115, "unseen": 50}
    assert set(counted("steps")) == set(counted("words")) == {""}
