"""viva eval on prompts without known answers: a judge compares two policies, and what is written can be seen."""

import json
from pathlib import Path

import pytest
from chat_server import Said, chat_server, completion, in_turn
from random_models import make_model

import viva
import viva.cli
from viva.eval.records import read_evaluation
from viva.recipes.programs import train_recipe
from viva.run.files import strangers
from viva.run.kept_answers import ANSWERS_FILE
from viva.view.files import iter_transcripts, kind_of, read_evaluations

PROMPTS = ["Say something.", "Say another thing.", "And one more."]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Results of targets that are no runs are written below the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "open.jsonl"
    path.write_text("".join(json.dumps({"query": prompt}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / name, name) for name in ("qwen3", "llama")]


@pytest.fixture(scope="module")
def run(models, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    options = {
        "model_name": models[0],
        "train_prompts_path": prompts,
        "log_path": folder,
        **{"num_agents": 2, "batch_size": 2, "max_tokens": 6, "lora_rank": 4, "max_steps": 1},
        **{"learning_rate": 1e-1, "save_every": 1},
    }
    assert train_recipe("critique_self_play", [f"{name}={value}" for name, value in options.items()]) == 0
    return folder


def evaluate(capsys, target, **options):
    """The printed tables, and the result files they name."""
    given = {"resamples": 100, "max_tokens": 6} | options
    status = viva.cli.main(["eval", str(target), *(f"{name}={value}" for name, value in given.items())])
    told = capsys.readouterr()
    assert status == 0, told.err
    return told.out, [Path(line) for line in told.out.splitlines() if line.endswith(".json")]


def test_a_run_is_compared_with_its_base_by_its_base_without_an_answer_key(run, prompts, capsys):
    out, (first, second, compared) = evaluate(
        capsys, run, against="base", test_prompts_path=prompts, num_samples=2
    )
    assert "judged by" in out
    assert f"measured on 3 problems of {prompts}, 3 without a known answer" in out
    assert {each.answer for each in read_evaluation(first).asked} == {None}
    assert set(read_evaluation(second).figures) == {"direct/finish_rate", "direct/reply_tokens"}
    written = json.loads(compared.read_text())
    assert (written["format"], written["second"]["checkpoint"]) == ("viva comparison 1", "base")
    (judge,) = written["judges"]
    assert (judge["name"], judge["checkpoint"], judge["mode"]) == ("base", "base", "logprob")
    figure = written["figures"]["judge/base/win_rate"]
    assert 0 <= figure["value"] <= 1
    assert figure["num_problems"] == 3
    assert kind_of(compared) == "result"
    shown = {each["name"]: each for each in read_evaluations(run)}
    assert shown[compared.stem]["figures"]["judge/base/win_rate"] == figure


def test_the_verdicts_lie_beside_it_as_conversations_of_two_agents(run, prompts, capsys, tmp_path):
    _, (first, second, compared) = evaluate(
        capsys, run, against="base", test_prompts_path=prompts, num_samples=2
    )
    (tmp_path / "transcripts.jsonl").write_bytes(compared.with_suffix(".transcripts.jsonl").read_bytes())
    records = [each.record for _, each in iter_transcripts(tmp_path, [])]
    assert len(records) == 6
    answers = [
        [a.text for each in read_evaluation(path).asked for a in each.answers] for path in (first, second)
    ]
    assert [[turn.text for turn in record.turns] for record in records] == [
        list(pair) for pair in zip(*answers, strict=True)
    ]
    for record in records:
        assert [(each.first, each.second) for each in record.comparisons] == [(0, 1), (1, 0)]
        assert record.correct is None


def test_two_judges_stand_side_by_side_with_their_agreement(run, models, prompts, capsys):
    out, (*_, compared) = evaluate(
        capsys, run, against="base", test_prompts_path=prompts, judge=f"[current,{models[1]}]"
    )
    figures = json.loads(compared.read_text())["figures"]
    assert {
        "judge/current/win_rate",
        f"judge/{models[1]}/win_rate",
        f"judges/current+{models[1]}/kappa",
    } <= set(figures)
    assert "between judges" in out


def test_swapped_policies_have_the_mirrored_win_rate(models, prompts, capsys):
    rates = []
    for target, other in (models, models[::-1]):
        *_, compared = evaluate(capsys, target, against=other, test_prompts_path=prompts, judge=models[0])[1]
        rates.append(json.loads(compared.read_text())["figures"][f"judge/{models[0]}/win_rate"]["value"])
    assert rates[0] == pytest.approx(1 - rates[1])


def test_stored_answers_are_judged_by_another_judge_without_sampling_them_again(
    models, prompts, capsys, tmp_path
):
    _, (first, second, compared) = evaluate(capsys, models[0], against=models[1], test_prompts_path=prompts)
    anew = tmp_path / "anew.json"
    before = first.read_bytes()
    arguments = [f"against={second}", "judge=base", f"output={anew}", "resamples=100"]
    assert viva.cli.main(["eval", str(first), *arguments]) == 0
    assert "judged by" in capsys.readouterr().out
    same, other = (json.loads(path.read_text())["figures"] for path in (compared, anew))
    assert same == other
    assert first.read_bytes() == before


def test_problems_with_known_answers_tell_how_often_the_judge_is_right(models, capsys, tmp_path):
    path = tmp_path / "mixed.jsonl"
    rows = [{"query": prompt} for prompt in PROMPTS] + [{"query": "1 + 1?", "answer": "2"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, (first, _, compared) = evaluate(
        capsys, models[0], against=models[1], test_prompts_path=path, judge="base"
    )
    found = read_evaluation(first)
    assert found.figures["direct/avg@1"].num_problems == 1
    assert found.figures["direct/finish_rate"].num_problems == 4
    assert "judge/base/accuracy" in json.loads(compared.read_text())["figures"]
    _, (alone,) = evaluate(capsys, models[0], test_prompts_path=path)
    assert len(read_evaluation(alone).asked) == 1


def test_the_python_face(run):
    found = viva.evaluate(
        viva.load_run(run), PROMPTS, against="base", judge=["base", "current"], max_tokens=6, resamples=100
    )
    assert [each.question for each in found.asked] == PROMPTS


def test_a_rubric_scores_both_policies(run, prompts, capsys, tmp_path):
    rubric = tmp_path / "rubric.yaml"
    rubric.write_text("- is polite\n- {text: is short, weight: 2}\n")
    out, (*_, compared) = evaluate(
        capsys, run, against="base", test_prompts_path=prompts, criteria=rubric, seed=7
    )
    written = json.loads(compared.read_text())
    assert written["judges"][0]["criteria"] == {"is polite": 1.0, "is short": 2.0}
    found = written["figures"]["rubric/base/score"]
    assert "rubric/base/criterion_2" in out
    assert "criterion_2: is short" in out
    lines = compared.with_suffix(".transcripts.jsonl").read_text().splitlines()
    scores = [json.loads(line)["record"]["rubric"] for line in lines]
    assert len(scores) == len(PROMPTS)
    for agent, name in (("0", "value"), ("1", "against")):
        means = [_weighted(each[agent]) for each in scores]
        known = [mean for mean in means if mean is not None]
        assert found[name] == (pytest.approx(sum(known) / len(known)) if known else None)


def test_what_a_judge_is_asked_stands_in_a_file_of_its_own(run, prompts, capsys):
    prompt = "Reply with a JSON object with preference."
    asked = [
        ({}, {}),
        ({"judge_answers_first": True}, {"answers_first": True}),
        ({"judge_max_tokens": 20}, {"max_tokens": 20}),
        ({"judge_prompt": prompt}, {"system_prompt": prompt}),
        ({"criteria": '["is short"]'}, {"criteria": {"is short": 1.0}}),
        ({"criteria": '["is long"]'}, {"criteria": {"is long": 1.0}}),
    ]
    written = []
    for given, told in asked:
        _, (*_, compared) = evaluate(capsys, run, against="base", test_prompts_path=prompts, **given)
        written.append(compared)
        (judge,) = json.loads(compared.read_text())["judges"]
        assert {name: judge[name] for name in judge.keys() - {"name", "model", "checkpoint", "mode"}} == told
    assert len(set(written)) == len(asked)


def _weighted(scores):
    known = [(weight, value) for weight, value in zip((1, 2), scores, strict=True) if value is not None]
    return (
        sum(weight * value for weight, value in known) / sum(weight for weight, _ in known) if known else None
    )


def longest(request, number):
    """A judge that prefers the longer answer."""
    asked = request["messages"][1]["content"]
    first, second = asked.partition("Solution B:")[::2]
    return completion(json.dumps({"reasoning": "", "preference": "A" if len(first) > len(second) else "B"}))


def files_below(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_an_endpoint_is_asked_nothing_twice_and_its_key_is_nowhere(run, models, prompts, capsys, monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-very-secret-0123456789")
    options = {"against": models[1], "test_prompts_path": prompts, "judge_model": "great", "seed": 5}
    options |= {"judge_key_variable": "MY_JUDGE_KEY", "judge_prices": "[1.0,2.0]"}
    with chat_server(longest) as server:
        out, (*_, compared) = evaluate(capsys, run, judge=server.url, **options)
        asked = len(server.requests)
        assert set(server.keys) == {"Bearer sk-very-secret-0123456789"}
        written = json.loads(compared.read_text())
        again, _ = evaluate(capsys, run, judge=server.url, **options)
        assert len(server.requests) == asked > 0
    (judge,) = written["judges"]
    assert (judge["name"], judge["url"], judge["mode"]) == ("great", server.url, "verdict")
    assert (judge["usage"]["requests"], judge["usage"]["prompt_tokens"]) == (asked, 100 * asked)
    assert f"{asked} requests, 0 answers kept from before" in out
    assert f"price {(100 * asked + 20 * asked) / 1e6:.4f}" in out
    assert f"0 requests, {asked} answers kept from before" in again
    assert written["figures"] == json.loads(compared.read_text())["figures"]
    assert (run / "eval" / ANSWERS_FILE).is_file()
    assert strangers(run) == []
    assert all(b"very-secret" not in path.read_bytes() for path in files_below(run))


def test_an_endpoint_that_fails_at_times_leaves_failed_comparisons_with_their_reason(
    run, models, prompts, capsys
):
    options = {"against": models[1], "test_prompts_path": prompts, "judge_model": "great", "seed": 6}
    refused = Said(status=400, body=b'{"error": "too long"}')
    with chat_server(in_turn(completion('{"preference": "A"}'), refused)) as server:
        out, (*_, compared) = evaluate(capsys, run, judge=server.url, **options)
    figures = json.loads(compared.read_text())["figures"]
    assert 0 < figures["judge/great/failed_rate"]["value"] < 1
    assert "by great failed; the first: " in out
    assert "status 400: too long" in out
    lines = compared.with_suffix(".transcripts.jsonl").read_text().splitlines()
    told = [each for line in lines for each in json.loads(line)["record"]["comparisons"] if each["failure"]]
    assert told
    assert all(each["outcome"] == "invalid" and "too long" in each["failure"] for each in told)


def test_a_judge_that_answers_nothing_gives_no_win_rate(run, models, prompts, capsys):
    given = {"against": models[1], "test_prompts_path": prompts, "judge_model": "great", "seed": 8}
    with chat_server(in_turn(Said(status=401, body=b'{"error": "no key"}'))) as server:
        given["judge"] = server.url
        status = viva.cli.main(["eval", str(run), *(f"{name}={value}" for name, value in given.items())])
    told = " ".join(capsys.readouterr().err.split())
    assert status == 2
    assert "the judge great could be asked about none of" in told
    assert "status 401: no key; judge_key_variable=NAME says which environment variable holds its key" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "have a judge compare the answers with another policy's: against=base"),
        ({"judge": "base"}, "have a judge compare"),
        ({"against": "base", "judge": "[base,base]"}, "judge must be a name, or names that differ"),
        ({"against": "base", "judge": "bass"}, "bass is not in the local cache"),
        ({"against": "base", "judge_max_tokens": 0}, "judge_max_tokens must be 1 or more; got 0"),
        ({"against": "base", "judge": "http://127.0.0.1:1/v1"}, "judge_model must name the model"),
        ({"against": "base", "judge_model": "great"}, "judge_model would change nothing: no judge is behind"),
        (
            {"against": "base", "judge": "ftp://host/v1"},
            "an endpoint's address begins with https:// or http://",
        ),
        (
            {"against": "base", "judge": "http://127.0.0.1:1/v1", "judge_model": "m", "judge_body": "[1]"},
            "judge_body must",
        ),
        ({"against": "base", "kinds": '["critique"]'}, "kinds must be left out, or be direct"),
    ],
)
def test_mistakes_are_told_before_anything_is_sampled(run, prompts, capsys, options, message):
    before = sorted((run / "eval").iterdir()) if (run / "eval").is_dir() else []
    given = {"test_prompts_path": prompts} | options
    assert viva.cli.main(["eval", str(run), *(f"{name}={value}" for name, value in given.items())]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert (sorted((run / "eval").iterdir()) if (run / "eval").is_dir() else []) == before


def test_a_judge_of_nothing_is_refused(run, capsys, tmp_path):
    path = tmp_path / "known.jsonl"
    path.write_text('{"query": "1 + 1?", "answer": "2"}\n')
    arguments = ["eval", str(run), f"test_prompts_path={path}", "judge=base"]
    assert viva.cli.main(arguments) == 2
    assert "judge would change nothing: a judge compares two policies" in capsys.readouterr().err
