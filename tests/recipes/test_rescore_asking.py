"""`viva rescore` with a judge or scorer: what is asked anew pays what training pays, for any run."""

import asyncio
import json
import zlib
from pathlib import Path

import pytest
from chat_server import Said, chat_server, completion

import viva
import viva.cli
from viva.recipes.config import make_options
from viva.recipes.rescore import AskedRescoreOptions, plan_rescoring, rescore_run
from viva.run.files import strangers
from viva.tiny.tasks import problems as problems_of
from viva.view.files import iter_transcripts
from viva.view.rescoring import rescore_text

COMMON = {
    **{"batch_size": 6, "num_agents": 3, "max_tokens": 80, "max_steps": 1, "learning_rate": 1e-3},
    **{"model": "tiny", "eval_every": 0, "num_test_conversations": 0, "lora_rank": 4, "trackers": []},
}
ASKED = {
    **{name: {"judge": "base"} for name in ("judge_answer", "serl", "tournament")},
    "peer_prediction": {"scorer_policy": "initial"},
}
"""Options of `viva rescore` by reward."""
NEEDS_CRITICS = {"comas", "peer_review", "r_diag", "r_meta", "r_sol", "serl_votes"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One step of the built-in policy, paid by a reward and judged as it was at the start; its folder."""
    done: dict[str, Path] = {}
    asked = [{"query": each.question, "answer": each.answer} for each in problems_of("test", 2, seed=0)]

    def _run(reward, recipe="conversation_preference_rl", **options):
        key = f"{recipe} {reward} {options}"
        if key not in done:
            folder = tmp_path_factory.mktemp("run") / "run"
            own = {"max_rounds": 1} if recipe == "conversation_preference_rl" else {}
            judge = {"judge": "initial"} if "judge" in ASKED.get(reward, {}) else {}
            given = COMMON | own | judge | ({} if reward is None else {"reward": reward}) | options
            viva.train(recipe, prompts=asked, log_path=str(folder), **given)
            done[key] = folder
        return done[key]

    return _run


def rescored(folder, **options):
    return asyncio.run(rescore_run(folder, make_options(AskedRescoreOptions, options)))


def paid_by(folder):
    return [each.record.rewards for _, each in iter_transcripts(folder, [])]


def new_of(result, name="total"):
    return [new for _, new, _ in result.rewards[name]]


def close_to(rewards):
    return [pytest.approx(each, abs=1e-5) for each in rewards]


@pytest.mark.parametrize("reward", ASKED)
def test_a_run_of_another_reward_is_paid_as_training_by_this_one_pays(run, reward):
    """With one seed and one policy, the first step of both runs has the same conversations."""
    paid = paid_by(run(reward))
    values = {round(value, 9) for each in paid for value in each.values()}
    assert len(values) > 1, "all are paid alike, so the test could not fail"
    result = rescored(run("majority"), reward=reward, **ASKED[reward])
    assert new_of(result) == close_to(paid)
    (note,) = result.notes
    assert "tokens read" in note
    with pytest.raises(ValueError, match=r"viva rescore RUN .*anew"):
        rescored(run("majority"), reward=reward)


@pytest.mark.parametrize("reward", ASKED)
def test_what_a_run_stored_counts_unless_somebody_is_asked(run, reward):
    folder = run(reward)
    stored, asked = rescored(folder, reward=reward), rescored(folder, reward=reward, **ASKED[reward])
    assert new_of(stored) == close_to(paid_by(folder))
    assert new_of(asked) == close_to(paid_by(folder))
    assert (stored.notes, len(asked.notes)) == ((), 1)


def test_revised_solutions_are_compared_anew_for_a_joint_fit(run):
    robust = run(None, "critique_self_play", preset="robust", judge="initial")
    paper = run(None, "critique_self_play", preset="paper")
    paid = paid_by(robust)
    assert new_of(rescored(robust, reward="r_sol", judge="base")) == close_to(paid)
    by_rules = rescored(paper, preset="robust", judge="base")
    assert new_of(by_rules) == close_to(paid)
    assert "tokens read" in by_rules.notes[0]
    by_name = rescored(paper, reward="r_sol", judge="base")  # by the rules of that run, which fit separately
    assert by_name.notes == ("judge base: nothing was asked",)
    comas = rescored(paper, reward="comas", judge="base")
    assert new_of(comas) == close_to(new_of(rescored(robust, reward="comas")))


def test_all_rewards_ask_both_and_two_calls_print_the_same(run):
    folder = run("majority")
    given = {"reward": "all", "judge": "base", "scorer_model": "tiny"}
    result = rescored(folder, **given)
    # the built-in policy says neither yes nor no, and of one conversation no tokens were kept
    assert set(result.unpaid) == NEEDS_CRITICS | {"rubric", "log_probability"}
    assert "judge could not be read" in result.unpaid["rubric"]
    for name in ASKED:
        alone = rescored(folder, reward=name, **ASKED[name])
        assert new_of(result, name) == close_to(new_of(alone))
    assert len(result.notes) == 2
    assert rescore_text(rescored(folder, **given)) == rescore_text(result)
    assert set(rescored(folder, reward="all").unpaid) == {*result.unpaid, *ASKED}


def test_the_policy_as_it_is_judges_otherwise(run):
    folder = run("tournament", learning_rate=3e-2)

    def judged(**by):
        return new_of(rescored(folder, reward="tournament", **by))

    first, last = judged(judge="base"), judged(judge="current")
    assert last != close_to(first)
    assert judged(judge="current", checkpoint="base") == judged(judge="tiny") == close_to(first)
    assert judged(judge=str(folder)) == close_to(last)


def test_plain_samples_are_paid_as_in_training(run):
    options = {"strategies": ["iid"], "group_size": 4, "batch_size": 8, "system_prompt": "Be short."}
    folder = run("judge_answer", "math_efficiency", **options)
    assert new_of(rescored(folder, reward="judge_answer", judge="base")) == close_to(paid_by(folder))


def test_logprobs_are_those_of_the_tokens_that_were_kept(run):
    folder = run("log_probability", tokens_every=1)
    result = rescored(folder, reward="log_probability")
    assert (result.num_conversations, result.num_without_tokens) == (1, 1)
    assert "(1 without kept tokens, 0 void and 0 of another kind left out)" in rescore_text(result)
    ((old, new, _),) = result.rewards["total"]
    assert new == pytest.approx(old, abs=1e-4)
    assert len(set(new.values())) > 1
    shuffled = rescored(folder, reward="shuffled_log_probability")
    assert sorted(new_of(shuffled)[0].values()) == pytest.approx(sorted(new.values()))
    with pytest.raises(ValueError, match=r"kept the tokens of no conversation.*tokens_every=1"):
        rescored(run("majority", tokens_every=0), reward="log_probability")


# judges behind an endpoint


def says_a(_request, _=0):
    return completion(json.dumps({"preference": "A"}))


def at(server, **options):
    return {"judge": server.url, "judge_model": "m", "judge_retries": 0} | options


def yes_or_no(request, _=0):
    is_even = zlib.crc32(request["messages"][-1]["content"].encode()) % 2 == 0
    return completion(json.dumps({"fulfilled": "yes" if is_even else "no"}))


def test_criteria_are_those_of_the_run_unless_others_are_given(run):
    criteria = {"It is long.": 2.0, "It is polite.": 1.0, "It is short.": 4.0}
    plain = run("majority")
    with chat_server(yes_or_no) as server:
        own = run("rubric", criteria=criteria, **at(server))
        paid, by = paid_by(own), at(server, reward="rubric")
        assert len({value for each in paid for value in each.values()}) > 2
        assert new_of(rescored(own, reward="rubric")) == close_to(paid)
        assert new_of(rescored(own, **by)) == close_to(paid)
        assert new_of(rescored(plain, criteria=criteria, **by)) == close_to(paid)
        right = new_of(rescored(plain, **by))
        assert new_of(rescored(own, criteria={"The answer is right.": 1.0}, **by)) == close_to(right)
    assert right != close_to(paid)


def test_an_endpoint_is_asked_nothing_twice(run):
    folder = run("majority", tokens_every=2)
    with chat_server(says_a) as server:
        first = rescored(folder, reward="tournament", **at(server))
        number = len(server.requests)
        again = rescored(folder, reward="tournament", **at(server))
    assert 0 < number == len(server.requests)
    assert first.rewards == again.rewards
    assert "requests" in first.notes[0]
    assert f"{number} answers kept from before" in again.notes[0]
    assert strangers(folder) == []


def test_a_judge_that_fails_is_no_number(run):
    folder = run("majority")
    with chat_server(lambda *_: Said(status=400, body=b"not this one")) as server:
        with pytest.raises(ValueError, match=r"transcripts\.jsonl:1: .*status 400: not this one"):
            rescored(folder, reward="tournament", **at(server))
        result = rescored(folder, reward="all", **at(server))
    assert {"tournament", "serl", "rubric", "judge_answer"} <= set(result.unpaid)
    assert "status 400" in result.unpaid["tournament"]
    assert not any(result.rewards[name] for name in ("tournament", "serl", "rubric", "judge_answer"))
    assert len(result.rewards["majority"]) == 2


def test_a_budget_that_is_spent_ends_the_command(run):
    with chat_server(says_a) as server, pytest.raises(ValueError, match="budget"):
        rescored(run("majority", seed=1), reward="all", **at(server, judge_max_requests=1))


def test_the_command_prints_who_was_asked(run, capsys):
    folder = run("majority")
    assert viva.cli.main(["rescore", str(folder), "reward=serl", "judge=base"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("judge base: ")
    assert viva.cli.main(["rescore", str(folder), "reward=serl"]) == 2
    assert "judge=... asks a judge anew" in capsys.readouterr().err


# options


URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reward": "majority", "judge": "base"},
            "'majority' asks no judge; got judge='base'; give reward=judge_answer",
        ),
        ({"reward": "majority", "judge_mode": "verdict"}, "judge_mode would change nothing: nobody is asked"),
        ({"reward": "rubric", "criteria": {"It is short.": 1.0}}, "criteria would change nothing: nobody"),
        (
            {"reward": "serl", "judge": "base", "criteria": {"It is short.": 1.0}},
            "criteria would change nothing: no judge is asked about criteria",
        ),
        (
            {"reward": "judge_answer", "judge": "base", "judge_mode": "verdict"},
            "judge_mode would change nothing: the judge of the reward 'judge_answer' answers the problem",
        ),
        (
            {"preset": "paper", "judge": "base"},
            "with fit=separate no judge is asked; got judge='base'; add fit=joint",
        ),
        (
            {"reward": "majority", "scorer_model": "tiny"},
            "'majority' asks no scorer; got scorer_model='tiny'; give reward=peer_pred",
        ),
        (
            {"scorer_policy": "initial"},
            "scorer_policy would change nothing: no scorer is asked; got .*give reward=peer_prediction",
        ),
        (
            {"reward": "peer_prediction", "scorer_model": "tiny", "scorer_policy": "current"},
            "scorer_policy would change nothing: scorer_model=tiny is asked",
        ),
        ({"reward": "all", "engine": "local"}, "engine would change nothing: nobody is asked"),
        ({"reward": "all", "judge": "tiny", "checkpoint": "last"}, "the run's own policy is not asked"),
        ({"reward": "all", "judge": "base", "checkpoint": "last"}, "base is the policy before training"),
        ({"reward": "all", "judge": "[base,tiny]"}, "judge must name one"),
        ({"noise_floor": -1.0, "judge": "tiny"}, "noise_floor must be"),
        ({"reward": "majority", "fit": "joint", "judge": "tiny"}, "fit are rules of critique self-play"),
        (
            {"reward": "all", "judge": "initial"},
            "judge=initial is a run's judge of its steps.*give judge=base",
        ),
        ({"reward": "all", "judge": "tiny", "judge_max_tokens": 0}, "max_tokens of at least 1"),
        ({"reward": "all", "judge": "tiny", "judge_model": "m"}, "no judge is behind an endpoint"),
        ({"reward": "all", "judge": URL}, "judge_model must name the model"),
        ({"reward": "all", "judge": URL, "device": "cpu"}, "device would change nothing: an endpoint has"),
        ({"reward": "all", "scorer_model": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_what_would_change_nothing_is_refused_before_a_model_is_opened(run, options, message):
    with pytest.raises(ValueError, match=message):
        plan_rescoring(run("majority"), make_options(AskedRescoreOptions, options))


def test_a_folder_without_conversations_is_refused_before_a_model_is_looked_for(tmp_path):
    options = make_options(AskedRescoreOptions, {"reward": "rubric", "judge": "no/such/model"})
    with pytest.raises(ValueError, match=r"has no transcripts\.jsonl"):
        plan_rescoring(tmp_path, options)
