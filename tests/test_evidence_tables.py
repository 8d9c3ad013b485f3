"""The tables of the bench, and the claims that its pages make of them."""

import re

import numpy as np
import pytest
from _intervals import mean_interval
from evidence import run
from evidence.arms import ARMS, LEARNING_RATES, THROWN_AWAY
from evidence.beds import bed_named
from evidence.plan import CONTRASTS, WARM_CONTRASTS, Part
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
from evidence_cells import cell
from scipy import stats


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


@pytest.fixture(scope="module")
def page():
    """What the ledger makes of the page, its prose and tables; seconds of resampling."""
    return run.page()


def test_the_page_shows_what_the_ledger_holds(page):
    assert run.PAGE.read_text(encoding="utf-8") == page
    assert run.FRONT_PAGE.read_text(encoding="utf-8") == run.front_page()


def test_the_table_of_results_tells_the_number_of_seeds_that_differs_from_its_beds_usual_one():
    cells = [cell("majority", seed, [0, 100]) for seed in range(4)]
    cells += [cell("r_sol", seed, [0, 100]) for seed in range(4)]
    cells += [cell("critique", seed, [0, 100]) for seed in range(3)]
    rows = {line.split(" |")[0][2:]: line for line in results_table(cells, ["steps"]).splitlines()[2:]}
    assert rows[RESULTS["majority"]].endswith("| 50.0 ± 0.0 | 50.0 ± 0.0 |")
    assert rows[RESULTS["critique"]].endswith("| 50.0 ± 0.0 (3) | 50.0 ± 0.0 |")


def test_tokens_up_to_a_reward_and_to_half_right_are_told_with_those_that_never_got_there():
    found = [cell("few", seed, [0], tokens_to_signal=1000 * (seed + 1)) for seed in range(3)]
    found[0]["tokens_to_half"] = None
    found[1]["tokens_to_half"] = 4200
    found.append(cell("few_hint", 0, [0], tokens_to_signal=None, tokens_to_half=None))
    pair = [("few_hint", "few")]
    assert signal_table(found, ["few", "few_hint", "hint"], pair).splitlines()[2:] == [
        "| `few` | 2.0 ± 2.5 | 4.2 (1 of 2) |",
        "| `few_hint` | never (0 of 1) | never (0 of 1) |",
    ]
    found.extend(cell("few_hint", seed, [0], tokens_to_signal=700 * (seed + 1)) for seed in (1, 2, 3))
    assert signal_table(found, ["few", "few_hint"], pair).splitlines()[-1].startswith("| `few_hint`")
    found.append(cell("few", 3, [0], tokens_to_signal=4000))
    row = signal_table(found, ["few", "few_hint"], pair).splitlines()[-1]
    assert row == "| `few_hint` - `few` | -0.9 (-1.6 to -0.2, 3 seeds) |  |"


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
