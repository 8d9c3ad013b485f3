"""The bench of rewards: its plan, its cells, and their learning rates."""

import importlib
import json
import zlib

import pytest
from evidence import beds, run
from evidence import cell as cells
from evidence.arms import ARMS, LEARNING_RATES, THROWN_AWAY, TOTAL_TOKENS
from evidence.beds import BEDS, LARGE, REAL, WARM, bed_named
from evidence.plan import PLAN, RARE_ARMS, RARE_CONTRASTS, Place, wanted
from evidence.tables import arm_table
from evidence_cells import cell

from viva.recipes.config import make_options


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("bed", ["steps", *REAL, *WARM, LARGE])
def test_every_arm_has_options_that_its_recipe_takes(bed, arm):
    given = bed_named(bed).arm(arm)
    recipe = given.recipe if isinstance(given.recipe, str) else "protocol"
    named = {"protocol": "of another test"} if recipe == "protocol" else {}
    module = importlib.import_module(f"viva.recipes.{recipe}")
    make_options(module.Config, {**given.options, **named, "train_prompts": ["2+3?"]})


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
