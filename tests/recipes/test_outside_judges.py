"""A judge behind an endpoint pays whole runs: what it is asked, what is kept and counted, and what ends them."""

import json
import zlib
from functools import partial
from pathlib import Path

import pytest
from chat_server import Said, chat_server, completion
from random_models import make_model
from served_policies import TOKEN, serving_policy

import viva
from viva.recipes.conversation_preference_rl import Config as PreferenceConfig
from viva.recipes.critique_self_play import Config as CritiqueConfig
from viva.recipes.math_efficiency import Config as MathConfig
from viva.recipes.programs import train_recipe
from viva.recipes.protocol import Config as ProtocolConfig
from viva.run.files import strangers
from viva.tiny import model_path
from viva.tiny.tasks import problems as problems_of
from viva.view.rescore import RescoreOptions, rescore

KEY = "sk-very-secret-0123456789"
COMMON = {
    "num_agents": 2,
    "batch_size": 4,
    "max_tokens": 5,
    "lora_rank": 4,
    "max_steps": 2,
    "learning_rate": 3e-2,
    "eval_every": 0,
    "save_every": 1,
    "num_test_conversations": 0,
    "trackers": "[]",
}
MATH = {"group_size": 2}
RECIPES = {
    "conversation_preference_rl": {"max_rounds": 1},
    "critique_self_play": {},
    "math_efficiency reward": MATH | {"strategies": "iid", "reward": "serl", "num_agents": 3},
    "math_efficiency conversation": MATH
    | {"strategies": "conversation", "conversation": "round_robin", "max_rounds": 1}
    | {"conversation_reward": "own"},
}
"""Options by recipe, whose name may have more words behind it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    path.write_text("".join(f'{{"query": "{n} + 1?", "answer": {n + 1}}}\n' for n in range(4)))
    return path


@pytest.fixture
def run(model, problems, capsys):
    """Do a run with a judge at an address; its exit code and what it wrote on the error stream."""

    def _run(folder, url, recipe="conversation_preference_rl", **options):
        given = {"model_name": model, "train_prompts_path": problems, "log_path": folder}
        judge = {"judge": url} | ({"judge_model": "m", "judge_retries": 0} if "/" in url else {})
        everything = COMMON | given | judge | RECIPES[recipe] | options
        capsys.readouterr()
        argv = [f"{name}={value}" for name, value in everything.items()]
        return train_recipe(recipe.partition(" ")[0], argv), capsys.readouterr().err

    return _run


def label_of(question):
    """The verdict on a question, one for each, whoever is asked when."""
    return ("A", "B", "Tie")[zlib.crc32(question.encode()) % 3]


def verdict(request, _=0):
    return completion(json.dumps({"preference": label_of(request["messages"][-1]["content"])}))


def rows_of(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def left_by(folder):
    """What a run leaves that depends on its judge."""
    metrics = [
        {key: value for key, value in row.items() if not key.startswith("time/")} for row in rows_of(folder)
    ]
    weights = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    return metrics, rows_of(folder, "transcripts.jsonl"), weights


def comparisons_of(folder):
    found = [one for row in rows_of(folder, "transcripts.jsonl") for one in row["record"]["comparisons"]]
    return [one for one in found if one["was_asked"]]


def questions_of(server):
    return [json.dumps(request["messages"]) for request in server.requests]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_paid_by_the_verdicts_of_the_endpoint(recipe, run, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", KEY)
    given = {"judge_key_variable": "MY_JUDGE_KEY", "judge_prices": "[1.0,10.0]"}
    folder = tmp_path / "run"
    with chat_server(verdict) as server:
        assert run(folder, server.url, recipe, **given) == (0, "")
    judged = comparisons_of(folder)
    assert judged
    assert [each["outcome"].casefold() for each in judged] == [
        label_of(each["prompt"]).casefold() for each in judged
    ]
    assert {each["prompt"] for each in judged} == {
        each["messages"][-1]["content"] for each in server.requests
    }
    number = len(server.requests)
    assert number == len(set(questions_of(server))) == len(rows_of(folder, "judge_answers.jsonl"))
    last = rows_of(folder)[-1]
    assert last["judge/so_far/answers"] == number
    assert last["judge/so_far/tokens"] == 110 * number
    assert last["judge/so_far/price"] == pytest.approx(number * (100 * 1.0 + 10 * 10.0) / 1e6)
    # where all solutions of a step are the same, nobody is asked
    assert sum(row.get("judge/prompt_tokens", 0) for row in rows_of(folder)) >= 100 * number
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert strangers(folder) == []
    assert not [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize("recipe", ["conversation_preference_rl", "critique_self_play"])
@pytest.mark.parametrize("budget", ["judge_max_requests", "judge_max_price"])
def test_a_run_whose_budget_is_spent_ends_and_goes_on_as_if_it_never_had(recipe, budget, run, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    prices = {"judge_prices": "[1.0,10.0]"}
    with chat_server(verdict) as server:
        assert run(whole, server.url, recipe, **prices)[0] == 0
        asked = questions_of(server)
        server.requests.clear()
        enough = len(asked) - 1 if budget == "judge_max_requests" else (len(asked) - 1.5) * 200 / 1e6
        given = {"judge_concurrency": 1, budget: enough, "behavior_if_exists": "resume"} | prices
        code, told = run(folder, server.url, recipe, **given)
        assert code == 1
        assert "stopped before the end of step 2: the judge's budget of" in told
        assert f"raise {budget} and repeat: answers are kept. The state before that step is saved" in told
        assert len(server.requests) == len(asked) - 1
        assert len(rows_of(folder)) == 1
        code, told = run(folder, server.url, recipe, **given)
        assert (code, len(server.requests)) == (1, len(asked) - 1), "the budget is that of the run"
        assert run(folder, server.url, recipe, **given | {budget: 2 * enough + 1})[0] == 0
    assert sorted(questions_of(server)) == sorted(asked), "nothing is asked twice"
    assert left_by(folder) == left_by(whole)


def test_a_judge_that_refuses_ends_the_run_and_a_judge_that_fails_voids_conversations(run, tmp_path):
    with chat_server(lambda request, _: Said(status=402, body=b'{"error": "no money"}')) as server:
        code, told = run(tmp_path / "refused", server.url)
    assert code == 1
    assert "stopped before the end of step 1" in told
    assert "status 402: no money" in told
    assert not (tmp_path / "refused" / "metrics.jsonl").exists() or not rows_of(tmp_path / "refused")

    def moody(request, _):
        question = request["messages"][-1]["content"]
        return Said(status=400, body=b"not this one") if label_of(question) == "A" else verdict(request)

    folder = tmp_path / "moody"
    with chat_server(moody) as server:
        assert run(folder, server.url, batch_size=8, max_steps=1, max_retries=0)[0] == 0
    (row,) = rows_of(folder)
    assert 0 < row["rollout/void"] == row["rollout/errors/EndpointError"] < row["rollout/groups"]
    for each in rows_of(folder, "transcripts.jsonl"):
        assert ("status 400: not this one" in (each["void_reason"] or "")) == each["void"]
        assert (not each["record"]["rewards"]) == each["void"], "no score is made up"


def test_a_run_is_rescored_without_its_judge(run, tmp_path):
    folder = tmp_path / "run"
    with chat_server(verdict) as server:
        assert run(folder, server.url)[0] == 0
    number = len(server.requests)
    (change,) = rescore(folder, RescoreOptions(reward="tournament")).streams  # the server is gone
    assert change.agreement == pytest.approx(1.0)
    assert rescore(folder, RescoreOptions(reward="serl")).num_conversations == 4
    assert len(server.requests) == number


def test_test_conversations_and_evaluations_of_a_run_ask_its_judge_once(run, problems, tmp_path):
    folder = tmp_path / "run"
    given = {"test_prompts_path": problems, "num_test_conversations": 1, "eval_every": 1, "max_steps": 1}
    with chat_server(verdict) as server:
        assert run(folder, server.url, **given)[0] == 0
        assert rows_of(folder)[0]["test/conversation/judge/prompt_tokens"] > 0
        trained = len(server.requests)
        for _ in range(2):
            viva.evaluate(folder, problems, kinds=["conversation"], num_test_conversations=2)
    assert len(server.requests) > trained
    assert len(rows_of(folder / "eval", "judge_answers.jsonl")) == len(server.requests) - trained
    assert len(rows_of(folder, "judge_answers.jsonl")) == trained


@pytest.mark.parametrize("recipe", ["conversation_preference_rl", "critique_self_play"])
def test_a_second_model_behind_viva_serve_judges_a_run(recipe, run, tmp_path, monkeypatch):
    """The built-in policy judges a random model; as it is, it says the same as behind the endpoint."""
    monkeypatch.setenv("MY_JUDGE_KEY", TOKEN)
    folder = tmp_path / "run"
    with serving_policy(str(model_path())) as served:
        given = {"judge_model": "policy", "judge_key_variable": "MY_JUDGE_KEY", "judge_max_tokens": 40}
        assert run(folder, f"{served.address}/v1", recipe, **given) == (0, "")
    inside = tmp_path / "inside"
    given = {"judge_mode": "verdict", "judge_max_tokens": 40}
    assert run(inside, "tiny", recipe, **given)[0] == 0
    assert comparisons_of(folder)
    assert [(each["text"], each["outcome"]) for each in comparisons_of(folder)] == [
        (each["text"], each["outcome"]) for each in comparisons_of(inside)
    ]


# options

URL = "http://127.0.0.1:9/v1"
AT = {"judge": URL, "judge_model": "m"}


def config(kind, **options):
    given = {"train_prompts": ["a"], "model_name": "some/model", "learning_rate": 1e-4}
    return kind(**(given | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"judge": URL}, "needs the model's name there: judge_model=NAME"),
        ({"judge_model": "m"}, "judge_model would change nothing: it belongs to judge=https://host/v1"),
        ({"judge": "ema", "judge_max_requests": 3}, "judge_max_requests would change nothing"),
        (AT | {"judge_every": 3}, "judge_every would change nothing"),
        (AT | {"judge_checkpoint": "last"}, "judge_checkpoint would change nothing"),
        (AT | {"judge": "https://host/v1"}, "OPENAI_API_KEY is not set"),
        (AT | {"judge_key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
        (AT | {"judge": "http://me:pass@host/v1"}, "must not hold a user name or key"),
        (AT | {"judge_concurrency": 0}, "a concurrency of 1 or more"),
        (AT | {"judge_prices": [1.0]}, "judge_prices must be two"),
        (AT | {"judge_max_price": 1.0}, "needs prices to count with"),
        (AT | {"judge_max_price": 0.0, "judge_prices": [1.0, 1.0]}, "budget of money must be above 0"),
        (AT | {"judge_body": "3"}, "judge_body must be a JSON object"),
        (AT | {"judge_max_tokens": 0}, "judge_max_tokens must be 1 or more"),
        (AT | {"reward": "majority"}, "judge, judge_model would change nothing"),
    ],
)
def test_a_judge_that_could_not_be_asked_is_refused_before_anything_is_computed(
    options, message, monkeypatch
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    kinds = [PreferenceConfig, CritiqueConfig, partial(ProtocolConfig, protocol="round_robin")]
    for kind in [*kinds, partial(MathConfig, strategies=["iid"], **{"reward": "serl"} | options)]:
        with pytest.raises(ValueError, match=message):
            config(kind, **options).make_plan()


def test_a_judge_of_a_protocol_whose_reward_names_its_own_is_refused():
    debate = f"{Path(__file__).parents[2]}/examples/debate.py:DEBATE"
    message = r"a value that names its judge itself; say it there, or give its name \(reward=tournament\)"
    with pytest.raises(ValueError, match=message):
        config(ProtocolConfig, protocol=debate, judge="ema").make_plan()
    assert config(ProtocolConfig, protocol=debate, judge="ema", reward="tournament").make_plan()


def test_an_endpoint_in_python_is_a_value():
    from viva.judging.endpoint import EndpointOptions

    endpoint = EndpointOptions(url=URL, model="m")
    judge = viva.rewards.tournament(endpoint=endpoint, mode="verdict").judge
    assert (judge.endpoint, judge.model, judge.mode) == (endpoint, None, "verdict")
    with pytest.raises(ValueError, match="the policy 'ema' and an endpoint both say who judges"):
        viva.rewards.tournament(endpoint=endpoint, policy="ema")
    with pytest.raises(ValueError, match=r"is an endpoint's address; give a .* as endpoint"):
        viva.rewards.tournament(policy=URL)


def test_a_screening_as_planned_asks_the_endpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problems = [{"query": each.question, "answer": each.answer} for each in problems_of("test", 6, seed=0)]
    planned = {"recipe": "conversation_preference_rl", "num_agents": 2, "max_rounds": 1, "max_tokens": 60}
    asked = {"num_problems": 6, "num_samples": 4, "conversations": 2, "resamples": 100}
    with chat_server(verdict) as server:
        judge = {"judge": server.url, "judge_model": "m", "judge_retries": 0}
        found = viva.screen("tiny", problems, **planned, **asked, **judge)
    shown = [request["messages"][-1]["content"] for request in server.requests]
    pairs = [each for each in found.problems if each.judged is not None]
    assert pairs
    for each in pairs:
        answers = [each.tries_N[place].answer.text for place in (each.judged.first, each.judged.second)]
        about = [text for text in shown if all(part in text for part in (each.question, *answers))]
        assert {label_of(text) for text in about} == {str(one.outcome) for one in each.judged.both}
    assert len(rows_of(tmp_path / "runs" / "screen", "judge_answers.jsonl")) == len(shown)
