"""The bench of rewards: beds without a shared step, the trap as it is described, and tables that are right."""

import importlib
import itertools
import json
import random
import re
import zlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from _intervals import mean_interval
from evidence import beds, run, warm, worked
from evidence import cell as cells
from evidence.arms import ARMS, HINT, LEARNING_RATES, THROWN_AWAY, TOTAL_TOKENS
from evidence.beds import BEDS, CRITIQUE_TEXTS, LARGE, REAL, WARM, bed_named, is_blind, is_trap, trap_solution
from evidence.plan import CONTRASTS, PLAN, RARE_ARMS, RARE_CONTRASTS, WARM_CONTRASTS, Part, Place, wanted
from evidence.raise_policy import RarePupil, TrappedPupil, hinted_example
from evidence.rewards import CURRENT, RARE
from evidence.tables import (
    RESULTS,
    arm_table,
    contrast,
    contrast_table,
    conversation_table,
    holm,
    long_table,
    rate_table,
    results_table,
    signal_table,
    turns_of,
)
from evidence.transcripts import scores_table, shortcut_table
from scipy import stats
from solved import solutions
from view_runs import transcript

from viva.conversation.records import Critique, CritiqueReply
from viva.judging.ballots import Preference, divided
from viva.judging.comparison import Comparison, Outcome
from viva.recipes.config import make_options
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


def test_one_arm_less_another_is_told_by_a_command(monkeypatch, capsys):
    def cell(arm, seed, greedy):
        problems = {"greedy": greedy, "sampled": [50.0] * len(greedy)}
        return {"bed": "critics-70", "arm": arm, "seed": seed, "problems": problems}

    ledger = [cell("serl", seed, [100.0, 50.0 * seed]) for seed in range(3)]
    ledger += [cell("judged", seed, [0.0, 0.0]) for seed in range(3)]
    ledger += [cell("serl", run.THROWN_AWAY, [0.0, 0.0]), cell("judged", run.THROWN_AWAY, [100.0, 100.0])]
    monkeypatch.setattr(run, "read_ledger", lambda: ledger)
    run.main(["contrast", "critics-70", "serl", "judged"])
    mean, low, high = mean_interval([50.0, 75.0, 100.0])
    told = f"| `serl` - `judged` | 3 | 0 | {mean:+.1f} ({low:+.1f} to {high:+.1f}) |"
    assert told in capsys.readouterr().out


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


def cell(arm, seed, greedy, sampled=None, **more):
    problems = {"greedy": greedy, "sampled": greedy if sampled is None else sampled, "majority": greedy}
    line = {"bed": "steps", "arm": arm, "seed": seed, "learning_rate": 1e-3, "seconds": 60.0}
    return line | {"tokens": {"sampled": 1000, "total": 2000}, "problems": problems} | more


def test_holm_is_that_of_a_hand_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def test_a_contrast_is_the_paired_t_test_over_seeds():
    rng = np.random.default_rng(1)
    first, second = rng.integers(0, 2, (6, 40)) * 100, rng.integers(0, 2, (6, 40)) * 100
    cells = [cell("r_sol", seed, first[seed].tolist()) for seed in range(6)]
    cells += [cell("majority", seed, second[seed].tolist()) for seed in range(6)]
    cells += [cell("majority", 6, second[0].tolist())]  # without a partner
    found = contrast("r_sol", "majority", cells, "greedy")
    expected = stats.ttest_rel(first.mean(axis=1), second.mean(axis=1))
    low, high = expected.confidence_interval()
    assert found.num_seeds == 6
    assert (found.p, found.low, found.high) == pytest.approx((expected.pvalue, low, high))
    assert found.bootstrap_low < found.mean < found.bootstrap_high
    mirrored = contrast("majority", "r_sol", cells, "greedy")
    assert (mirrored.mean, mirrored.low) == pytest.approx((-found.mean, -found.high))


def test_a_contrast_needs_two_seeds_and_the_same_arm_differs_by_nothing():
    cells = [cell("r_sol", seed, [0, 100]) for seed in range(3)]
    assert contrast("r_sol", "majority", cells, "greedy") is None
    same = contrast("r_sol", "r_sol", cells, "greedy")
    assert (same.mean, same.p) == (0.0, 1.0)


def test_an_interval_of_one_seed_has_no_width():
    assert mean_interval([3.0]) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("bed", ["steps", *REAL, *WARM, LARGE])
def test_every_arm_has_options_that_its_recipe_takes(bed, arm):
    given = bed_named(bed).arm(arm)
    recipe = given.recipe if isinstance(given.recipe, str) else "protocol"
    named = {"protocol": "of another test"} if recipe == "protocol" else {}
    module = importlib.import_module(f"viva.recipes.{recipe}")
    make_options(module.Config, {**given.options, **named, "train_prompts": ["2+3?"]})


def test_tables_name_arms_and_leave_out_what_was_not_run():
    cells = [cell("majority", seed, [0, 100, 100]) for seed in range(2)]
    text = arm_table(cells, None, {arm: ARMS[arm].text for arm in ARMS})
    assert "`majority`" in text
    assert "`r_sol`" not in text
    assert contrast_table(cells, CONTRASTS) == ""
    assert {arm for pair in WARM_CONTRASTS for arm in pair} <= ARMS.keys()


def test_replies_that_name_the_answer_have_a_column_where_some_were_so_measured():
    cells = [cell("majority", seed, [0, 100, 100]) for seed in range(3)]
    texts = {"majority": ARMS["majority"].text}
    assert "named" not in arm_table(cells, None, texts)
    cells[1]["problems"] |= {"greedy_lenient": [0, 0, 75], "sampled_lenient": [100, 50, 0]}
    titles, _, untrained, row = arm_table(cells, cell("untrained", 0, [0]), texts).splitlines()
    assert titles.endswith("| named, T = 0 and 1 (seeds) |")
    assert row.endswith("| 25.0, 50.0 (1) |")
    assert len({text.count("|") for text in (titles, untrained, row)}) == 1


def test_cells_of_replies_that_name_the_answer_are_in_no_other_column(monkeypatch):
    ledger = [cell("majority", seed, [0, 100]) for seed in range(2)]
    own = cell("majority", run.NAMED, [100, 100])
    own["problems"] |= {"greedy_lenient": [100, 75], "sampled_lenient": [50, 0]}
    monkeypatch.setattr(run, "read_ledger", lambda: [*ledger, own])
    (row,) = [line for line in run.tables(["steps"]).splitlines() if line.startswith("| `majority`")]
    assert "| 2 |" in row
    assert "| 50.0 (50.0 to 50.0) |" in row
    assert row.endswith("| 87.5, 25.0 (1) |")
    assert run.plan_of({"beds": "steps", "arms": "majority", "seeds": "named"}) == [
        [Part(["steps"], ["majority"], (run.NAMED,))]
    ]


def test_a_learning_rate_is_chosen_when_all_were_tried_and_only_by_the_seed_that_is_thrown_away():
    slow, fast = sorted(LEARNING_RATES)
    tried = [cell("r_sol", THROWN_AWAY, [0, 100], learning_rate=slow)]
    assert run.rate_of(tried, bed_named("steps"), "r_sol") is None
    tried.append(cell("r_sol", THROWN_AWAY, [100, 100], learning_rate=fast))
    tried.append(cell("r_sol", 0, [100, 100], learning_rate=slow))
    assert run.rate_of(tried, bed_named("steps"), "r_sol") == fast
    assert run.rate_of(tried, bed_named("trap-70"), "r_sol") is None


def test_finished_cells_are_not_run_again(tmp_path, monkeypatch):
    ledger = tmp_path / "cells.jsonl"
    monkeypatch.setattr(run, "LEDGER", ledger)
    monkeypatch.setattr(
        run,
        "read_ledger",
        lambda: [
            *(cell("r_sol", THROWN_AWAY, [0], learning_rate=rate) for rate in LEARNING_RATES),
            cell("r_sol", 0, [0]),
        ],
    )
    ran = []
    monkeypatch.setattr(run, "_run", lambda bed, arm, seed, rate, folder: ran.append((arm, seed)) or True)
    assert not run.run_one(bed_named("steps"), "r_sol", 0, tmp_path)
    assert run.run_one(bed_named("steps"), "r_sol", 1, tmp_path)
    assert ran == [("r_sol", 1)]


def test_cells_at_the_learning_rate_that_was_not_chosen_stand_in_a_table_of_their_own(tmp_path, monkeypatch):
    slow, fast = sorted(LEARNING_RATES)
    ledger = [
        *(cell(arm, THROWN_AWAY, [100], learning_rate=slow) for arm in ("r_sol", "majority")),
        cell("r_sol", THROWN_AWAY, [0], learning_rate=fast),
        cell("majority", THROWN_AWAY, [100], learning_rate=fast),
        *(
            cell(arm, seed, [50, 50], learning_rate=slow)
            for arm in ("r_sol", "majority")
            for seed in (0, 1, 2)
        ),
        *(cell("r_sol", seed, [100, 50], learning_rate=fast, other_rate=True) for seed in (0, 1, 2)),
    ]
    monkeypatch.setattr(run, "read_ledger", lambda: ledger)
    ran = []

    def keep(bed, arm, seed, rate, folder, *, is_other=False):
        ran.append((arm, seed, rate, is_other))
        return True

    monkeypatch.setattr(run, "_run", keep)
    assert not run.run_one(bed_named("steps"), "r_sol", 0, tmp_path)
    assert run.run_one(bed_named("steps"), "majority", 0, tmp_path, is_other=True)
    assert ran == [("majority", 0, fast, True)]
    found = contrast_table(run.counted(ledger), [("r_sol", "majority")])
    assert "+0.0 (+0.0 to +0.0)" in found
    assert "+25.0" not in found
    arm = f"| `r_sol` | {fast:g} | 3 | 75, 75, 75 | 75, 75, 75 |"
    pair = [("r_sol", "majority")]
    assert rate_table(run.counted(ledger), pair) == ""
    assert rate_table(run.of_any_rate(ledger), pair).splitlines()[2:] == [arm]  # no new rate has both
    ledger.extend(cell("majority", seed, [0, 50], learning_rate=fast, other_rate=True) for seed in (0, 1, 2))
    assert rate_table(run.of_any_rate(ledger), pair).splitlines()[2:] == [
        arm,
        f"| `majority` | {fast:g} | 3 | 25, 25, 25 | 25, 25, 25 |",
        f"| `r_sol` - `majority` | {fast:g} | 3 | +50.0 (+50.0 to +50.0) | +50.0 (+50.0 to +50.0) |",
    ]


def test_a_prolonged_run_has_the_learning_rate_of_the_arm_that_it_prolongs_and_ten_times_its_steps(
    tmp_path, monkeypatch
):
    tried = [cell("judged", THROWN_AWAY, [100], learning_rate=rate) for rate in LEARNING_RATES]
    monkeypatch.setattr(run, "read_ledger", lambda: tried[:1])
    ran = []
    monkeypatch.setattr(
        run, "_run", lambda bed, arm, seed, rate, folder: ran.append((arm, seed, rate)) or True
    )
    assert run.run_one(bed_named("steps"), "long_ema", 3, tmp_path)
    monkeypatch.setattr(run, "read_ledger", lambda: tried)
    assert run.run_one(bed_named("steps"), "long_ema", 3, tmp_path)
    assert ran == [("judged", THROWN_AWAY, max(LEARNING_RATES)), ("long_ema", 3, min(LEARNING_RATES))]
    monkeypatch.setattr(cells, "train", lambda *_: None)
    monkeypatch.setattr(cells, "tokens_of", lambda _: {"total": TOTAL_TOKENS // 4})
    steps = {
        arm: cells.steps_within(bed_named("steps"), arm, tmp_path, seed=0) for arm in ("judged", "long_ema")
    }
    assert steps == {"judged": 8, "long_ema": 80}


def test_an_arm_with_the_steps_of_another_takes_those_of_its_finished_cells(tmp_path, monkeypatch):
    (tmp_path / "adapter.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(beds.WarmBed, "start", tmp_path)
    voting = {"arm": "majority", "seed": 0, "learning_rate": 2e-4}
    here = {"start": f"{zlib.crc32(b'weights'):08x}"}
    rows = [
        {"bed": "words-warm", "arm": "untrained", "seed": 0, **here},
        {"bed": "words-warm", **voting, "steps": 14},
        {"bed": "words-warm", **voting, "steps": 15, **here},
        {"bed": "sums-warm", **voting, "steps": 20, **here},
    ]
    ledger = tmp_path / "cells.jsonl"
    ledger.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(run, "LEDGER", ledger)
    monkeypatch.setattr(
        cells,
        "cell",
        lambda bed, arm, seed, settings, *_, **__: {
            "bed": bed.name,
            "arm": arm,
            "seed": seed,
            "steps": settings.steps,
        },
    )
    assert run.run_one(bed_named("words-warm"), "r_sol_steps", 1, tmp_path)
    own = {"bed": "words-warm", "arm": "r_sol_steps", "seed": 1, "steps": 15}
    assert json.loads(ledger.read_text().splitlines()[-1]) == own | here
    assert not run.run_one(bed_named("words-warm"), "majority", 0, tmp_path)
    (tmp_path / "adapter.safetensors").write_bytes(b"weights of another processor")
    monkeypatch.setattr(cells, "steps_within", lambda *_, **__: 13)
    assert run.run_one(bed_named("words-warm"), "majority", 0, tmp_path)
    assert json.loads(ledger.read_text().splitlines()[-1])["steps"] == 13


def test_judges_that_are_followed_are_shown_by_tenths_of_the_run():
    curve = {
        "correct": [place // 2 / 10 for place in range(20)],
        "judge/accuracy": [None, 0.9] * 9 + [None] * 2,
    }
    found = [cell("long_ema", seed, [0, 100], [0, 40], curve=curve) for seed in range(2)]
    row = long_table(found, {"long_ema": "average", "long_every": "some"}).splitlines()[-1]
    measured = ["90, 90, 90, ?", "0, 10, 40, 90", "3 to 87 at 20, 3 to 87 at 20", "never, never"]
    ends = ["50.0 (50.0 to 50.0)", "20.0 (20.0 to 20.0)", "50.0 (50.0 to 50.0)"]
    assert row == f"| average | 0.001 | 2 | {' | '.join([*measured, *ends])} |"
    assert long_table([], {"long_ema": "average"}) == ""


def test_a_conversation_is_followed_by_its_first_solutions_and_verdicts_and_voting_has_no_judge():
    falls = {"correct/first": [0.5] * 10 + [0.2] * 10, "judge/verdict/accuracy": [0.75] * 20}
    found = [
        cell("long_r_sol", 0, [100], [80], curve=falls),
        cell("long_r_sol", 0, [50], curve={"correct/first": [0.5] * 20}, learning_rate=7e-4),
        cell("long_majority", 0, [0], curve={"correct": [0.5] * 20}),
    ]
    rows = long_table(found, {"long_r_sol": "talk", "long_majority": "votes"}).splitlines()[2:]
    assert (
        rows[0]
        == "| talk | 0.0007 | 1 | ?, ?, ?, ? | 50, 50, 50, 50 | 50 to 50 at 3 | never | 50.0 | 50.0 | 50.0 |"
    )
    assert (
        rows[1]
        == "| talk | 0.001 | 1 | 75, 75, 75, 75 | 50, 50, 50, 20 | 50 to 50 at 3 | 13 | 100.0 | 80.0 | 100.0 |"
    )
    assert (
        rows[2]
        == "| votes | 0.001 | 1 | ?, ?, ?, ? | 50, 50, 50, 50 | 50 to 50 at 3 | never | 0.0 | 0.0 | 0.0 |"
    )


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


def test_the_turns_of_a_curve_are_its_best_three_steps_and_the_first_three_below_half_of_them():
    assert turns_of([0.2, 0.8, 0.8, 0.8, 0.4, 0.4, 0.3, 0.9]) == pytest.approx((0.6, 0.8, 4, 7))
    *best, fallen = turns_of([0.2, 0.8, 0.8, 0.8, None, 0.5, 0.5, 0.5])  # a step without a figure
    assert best == pytest.approx([0.6, 0.8, 4])
    assert fallen is None
    # in a run of many small steps three of them are a matter of luck
    *best, fallen = turns_of([0.2] * 4 + ([0.9] + [0.1] * 3) * 29)
    assert best == pytest.approx([0.2, 0.375, 5])
    assert fallen is None


def test_test_conversations_have_a_row_an_arm_and_one_an_untrained_kind():
    talks = [{"critique": {"first": [50, 0], "final": [100, final]}} for final in (0, 50)]
    found = [cell("r_sol", 10 + place, [0, 100], conversations=talk) for place, talk in enumerate(talks)]
    found.append(cell("r_sol", 0, [0, 100]))  # its conversations were not played
    untrained = {"conversations": talks[0] | {"conversation": {"first": [0, 25], "final": [0, 0]}}}
    text = conversation_table(found, untrained, ["r_sol", "preference"], ("critique", "conversation"))
    critique, r_sol, conversation = text.splitlines()[2:]
    assert critique == "| untrained, critique |  | 25.0 | 50.0 | +25.0 |"
    assert r_sol.startswith("| `r_sol` | 2 | 25.0 (25.0 to 25.0) | 62.5 (-96.3 to 221.3) | +37.5 (")
    assert conversation == "| untrained, conversation |  | 12.5 | 0.0 | -12.5 |"
    assert conversation_table(found[2:], None, ["r_sol"], ("critique",)) == ""


def test_the_groups_of_a_bed_are_written_apart(tmp_path):
    run.main(["problems", "trap-70", str(tmp_path)])
    lines = {path.stem: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert sorted(lines["plain"] + lines["seen"] + lines["unseen"]) == sorted(lines["trap-70"])
    assert len(lines["seen"]) / (len(lines["seen"]) + len(lines["unseen"])) == pytest.approx(0.7, abs=0.02)


@pytest.fixture(scope="module")
def page():
    """What the ledger makes of the page, its prose and tables; seconds of resampling."""
    return run.page()


def test_the_page_shows_what_the_ledger_holds(page):
    assert run.PAGE.read_text(encoding="utf-8") == page
    assert run.FRONT_PAGE.read_text(encoding="utf-8") == run.front_page()


def test_a_bed_without_its_policy_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setattr(beds, "RARE_POLICY", tmp_path / "rare_policy")
    with pytest.raises(SystemExit, match=r"rare-5 has no policy yet: .*raise_policy\.py rare output="):
        run.main(["beds=rare-5", f"folder={tmp_path}"])


@pytest.mark.slow
def test_a_cell_of_two_steps_is_a_line_of_the_ledger(tmp_path, monkeypatch):
    bed = bed_named("steps")
    monkeypatch.setattr(cells, "items_of", lambda bed, *, validation: cells_of(bed)[:3])
    settings = cells.Settings(learning_rate=1e-4, steps=2)
    line = cells.cell(bed, "majority", 0, settings, tmp_path / "run")
    assert {len(values) for values in line["problems"].values()} == {3}
    assert set(line["problems"]["greedy"]) <= {0, 100}
    assert line["tokens"]["total"] > line["tokens"]["sampled"] > 0
    assert not (tmp_path / "run").exists()
    text = arm_table([line], None, {"majority": ARMS["majority"].text})
    assert "`majority`" in text


@pytest.mark.slow
def test_a_policy_talks_about_every_problem_that_it_is_given(tmp_path):
    file = tmp_path / "talk.json"
    problems = cells.items_of(bed_named("steps"))[:3]
    talk = cells.converse("tiny", "critique", problems, file, **cells.UNTRAINED_TALK["critique"])
    assert talk.keys() == {"first", "final"}
    for shares in talk.values():
        assert len(shares) == 3
        assert set(shares) <= {0, 25, 50, 75, 100}
    played = json.loads(file.read_text())["played"]["critique"]
    assert [each["question"] for each in played] == [each.question for each in problems]
    firsts = [round(25 * sum(agent["first"]["right"] for agent in each["agents"])) for each in played]
    assert talk["first"] == firsts


cells_of = cells.items_of


def test_sums_are_told_by_family_and_other_beds_by_their_own_groups():
    def counted(name):
        bed = bed_named(name)
        return Counter(bed.group_of(each) for each in bed.problems("test"))

    assert counted("sums") == {"chain_sum": 72, "products": 28}
    assert counted("trap-70") == {"plain": 165, "seen": 115, "unseen": 50}
    assert set(counted("steps")) == set(counted("words")) == {""}


def test_the_table_of_results_tells_the_number_of_seeds_that_differs_from_its_beds_usual_one():
    cells = [cell("majority", seed, [0, 100]) for seed in range(4)]
    cells += [cell("r_sol", seed, [0, 100]) for seed in range(4)]
    cells += [cell("critique", seed, [0, 100]) for seed in range(3)]
    rows = {line.split(" |")[0][2:]: line for line in results_table(cells, ["steps"]).splitlines()[2:]}
    assert rows[RESULTS["majority"]].endswith("| 50.0 ± 0.0 | 50.0 ± 0.0 |")
    assert rows[RESULTS["critique"]].endswith("| 50.0 ± 0.0 (3) | 50.0 ± 0.0 |")


@pytest.mark.parametrize(
    ("given", "told"),
    [("beds=nowhere", "unknown bed 'nowhere'; allowed: steps"), ("arms=nobody", "unknown arm 'nobody'")],
)
def test_beds_and_arms_that_are_unknown_are_refused(given, told):
    with pytest.raises(SystemExit, match=told):
        run.main([given])


def test_the_plan_names_beds_and_arms_that_are_there_and_no_cell_twice():
    planned = list(wanted(PLAN))
    assert len(planned) == len(set(planned))
    assert {place.bed for place in planned} <= set(BEDS)
    assert {place.arm for place in planned} <= ARMS.keys()
    for stage in PLAN:
        seeds = [place.seed for place in wanted([stage])]
        assert seeds == sorted(seeds)
    assert {arm for pair in RARE_CONTRASTS for arm in pair} == set(RARE_ARMS)


def test_the_plan_has_every_cell_that_the_page_is_made_of():
    """So ``make evidence`` makes all of it; of the starts after a warm-up, the one that is there."""
    shown = {
        Place(each["bed"], each["arm"], each["seed"], bool(each.get("other_rate")))
        for each in run.read_ledger()
        if each["arm"] != run.UNTRAINED and each["seed"] != THROWN_AWAY
    }
    assert len(shown) > 1000
    assert shown - set(wanted(PLAN)) == set()


def test_the_whole_plan_leaves_out_beds_whose_model_is_not_there_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(beds, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(beds, "model_path", lambda: tmp_path / "none.gguf")
    ran = []
    monkeypatch.setattr(run, "run_untrained", lambda bed, folder: ran.append(bed.name))
    monkeypatch.setattr(run, "run_one", lambda bed, arm, *_, **__: ran.append((bed.name, arm)))
    monkeypatch.setattr(run, "write_pages", lambda: None)
    run.main([f"folder={tmp_path}"])
    beds_run = [each for each in ran if isinstance(each, str)]
    assert sorted(beds_run) == sorted({*BEDS} - {*REAL, *WARM, LARGE, "trap-50", "trap-60", "trap-80"})
    assert len(ran) == len(beds_run) + sum(place.bed in beds_run for place in wanted(PLAN))
    told = capsys.readouterr().out
    assert told.count("`make models` fetches it") == 1
    assert f"`python scripts/fetch_models.py {beds.LARGE_MODEL}` fetches it" in told
    with pytest.raises(SystemExit, match="`make models` fetches it"):
        run.main(["beds=words", f"folder={tmp_path}"])


def test_tokens_up_to_a_reward_and_to_half_right_are_told_with_those_that_never_got_there():
    found = [cell("few", seed, [0], tokens_to_signal=1000 * (seed + 1)) for seed in range(3)]
    found[0]["tokens_to_half"] = None
    found[1]["tokens_to_half"] = 4200
    found.append(cell("few_hint", 0, [0], tokens_to_signal=None, tokens_to_half=None))
    assert signal_table(found, ["few", "few_hint", "hint"]).splitlines()[2:] == [
        "| `few` | 2.0 ± 2.5 | 4.2 (1 of 2) |",
        "| `few_hint` | never (0 of 1) | never (0 of 1) |",
    ]


_NUMBER = r"([+-]?\d+\.\d)"
_ROW = re.compile(
    rf"^\| `\S+` - `\S+` \| (\d+) \| [01] \| {_NUMBER} \({_NUMBER} to {_NUMBER}\) \|[^|]*\|[^|]*\| (\S+) \|$",
    re.M,
)
_CLAIM = re.compile(rf"{_NUMBER} \({_NUMBER} to {_NUMBER}, (\d+) seeds(?:; p (?:by Holm )?(0\.\d+))?\)")


def untrue_p_values(prose, tables):
    """Contrasts whose p by Holm is above 0.05 and not said, or is another one than the one that is said."""
    by_claim = {}
    for seeds, mean, low, high, holm_p in _ROW.findall(tables):
        by_claim.setdefault((abs(float(mean)), abs(float(low) + float(high)), seeds), []).append(
            float(holm_p)
        )
    found = []
    for claim in _CLAIM.finditer(prose):
        mean, low, high, seeds, said = claim.groups()
        true = by_claim.get((abs(float(mean)), abs(float(low) + float(high)), seeds), [])
        is_silent = said is None and float(low) * float(high) > 0 and min(true, default=0.0) > 0.05
        is_other = said is not None and all(abs(each - float(said)) > 0.006 for each in true)
        found += [claim[0]] * (is_silent or is_other)
    return found


def test_p_by_holm_stands_beside_every_contrast_that_it_does_not_bear_out(page):
    prose, _, tables = page.partition("\n## Tables")
    front = run.front_page()
    assert len(_CLAIM.findall(front)) >= 5
    assert len(_CLAIM.findall(prose)) > 40
    assert untrue_p_values(front + prose, tables) == []
    # a claim whose p is left out, and one with another p, are found
    silent = re.sub(r"; p (by Holm )?0\.\d+", "", front + prose)
    assert len(untrue_p_values(silent, tables)) > 10
    assert untrue_p_values(re.sub(r"; p 0\.\d+", "; p 0.01", front), tables) != []


def claims_without_a_row(prose, tables):
    """Differences that no row of a table has at temperature 0 or 1, of as many seeds."""
    return [
        claim
        for claim in {
            (seeds, f"{mean} ({low} to {high})") for mean, low, high, seeds, _ in _CLAIM.findall(prose)
        }
        if not re.search(rf"\| {claim[0]} [^\n]*\| {re.escape(claim[1])} \|", tables)
    ]


def test_contrasts_at_one_learning_rate_are_those_of_the_tables(page):
    prose, _, tables = page.partition("\n## Tables")
    section = prose.partition("### At one learning rate")[2].partition("\n### ")[0]
    assert len(_CLAIM.findall(section)) > 5
    assert claims_without_a_row(section, tables) == []
    assert len(claims_without_a_row(section.replace(" 5 seeds)", " 4 seeds)"), tables)) > 3
