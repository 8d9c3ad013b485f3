"""viva eval from the command line, on a model it has never seen: every kind of target, and what is written."""

import hashlib
import json
from functools import partial
from pathlib import Path

import pytest

import viva.cli
from viva.eval.records import read_evaluation
from viva.recipes.config import RecipeConfig
from viva.recipes.evaluation import EvalOptions, recipe_options
from viva.recipes.programs import train_recipe
from viva.testing import ScriptedSamplingClient, tiny_renderer
from viva.view.files import iter_transcripts

train_critique = partial(train_recipe, "critique_self_play")

OPTIONS = {
    "num_agents": 3,
    "batch_size": 3,
    "max_tokens": 6,
    "lora_rank": 4,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "eval_every": 2,
    "save_every": 1,
    "num_test_conversations": 2,
}


@pytest.fixture(scope="module")
def run(model, problems, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    given = {"model_name": model, "train_prompts_path": problems, "test_prompts_path": problems}
    options = OPTIONS | given | {"log_path": folder}
    assert train_critique([f"{name}={value}" for name, value in options.items()]) == 0
    return folder


def evaluate(capsys, target, **options):
    """The printed tables, and the result files they name."""
    arguments = [f"{name}={value}" for name, value in ({"resamples": 100} | options).items()]
    status = viva.cli.main(["eval", str(target), *arguments])
    told = capsys.readouterr()
    assert status == 0, told.err
    files = [Path(line) for line in told.out.splitlines() if line.endswith(".json")]
    return told.out, files


def graded_by(path):
    """Digests of the user's code in a result file."""
    return list(read_evaluation(path).options["user_code"].values())


def last_metrics(run):
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_run_is_evaluated_to_the_very_metrics_it_logged(run, problems, capsys):
    out, (path,) = evaluate(capsys, run)
    found = read_evaluation(path)
    assert path.parent == run / "eval"
    assert path.name.startswith("000002-")
    assert f"measured on 4 problems of {problems}\n" in out
    assert found.problems == f"4 problems of {problems}"
    logged = {key: value for key, value in last_metrics(run).items() if key.startswith("test/")}
    assert found.metrics["direct"] | found.metrics["critique"] == logged
    assert found.figures["direct/avg@4"].value == logged["test/direct_avg@4"]
    assert found.figures["direct/maj@4"].value == logged["test/direct_maj@4"]
    assert "critique/correct/best" in out
    assert "critique/equal_tokens/direct_maj" in out
    assert found.target | {"name": "", "model": ""} == {
        **{"name": "", "kind": "run", "model": ""},
        **{"checkpoint": "000002", "next_step": 2},
    }
    again = path.read_bytes()
    assert evaluate(capsys, run)[1] == [path]
    assert path.read_bytes() == again


def test_base_and_last_checkpoint_are_compared_in_the_figures_that_the_run_logged_first_and_last(run, capsys):
    out, (last, base, compared) = evaluate(capsys, run, against_checkpoint="base", equal_tokens=False)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for path, row in ((last, rows[-1]), (base, rows[0])):
        found = read_evaluation(path)
        logged = {key: value for key, value in row.items() if key.startswith("test/")}
        assert found.metrics["direct"] | found.metrics["critique"] == logged
        assert f"{found.figures['direct/avg@4'].value:.1%}".replace("%", " %") in out
    first, second = rows[-1]["test/direct_avg@4"], rows[0]["test/direct_avg@4"]
    assert json.loads(compared.read_text())["figures"]["direct/avg@4"]["difference"] == first - second


def test_its_conversations_are_left_in_the_form_of_a_runs_transcripts(run, capsys, tmp_path):
    _, (path,) = evaluate(capsys, run, kinds='["critique"]', equal_tokens=False)
    copy = tmp_path / "transcripts.jsonl"
    copy.write_bytes(path.with_suffix(".transcripts.jsonl").read_bytes())
    transcripts = [transcript for _, transcript in iter_transcripts(tmp_path, [])]
    assert [(each.step, each.group, each.void) for each in transcripts] == [(2, 0, False), (2, 1, False)]
    found = read_evaluation(path)
    assert [each.record.question for each in transcripts] == [
        each.question for each in found.played["critique"]
    ]
    # every sampled token is counted: 15 replies, and two label probabilities for every revision that changed
    for each, transcript in zip(found.played["critique"], transcripts, strict=True):
        assert each.num_judge_tokens == len(transcript.record.comparisons)
        assert 15 <= each.num_tokens - each.num_judge_tokens <= 15 * OPTIONS["max_tokens"]


def test_the_exported_adapter_answers_as_the_checkpoint_does(run, problems, capsys, tmp_path):
    options = {"kinds": '["direct"]', "num_samples": 2, "test_prompts_path": problems, "max_tokens": 6}
    _, (saved,) = evaluate(capsys, run, **options, output=tmp_path / "run.json")
    _, (adapter,) = evaluate(capsys, run / "adapter", **options, output=tmp_path / "adapter.json")
    _, (state,) = evaluate(
        capsys, run / "state" / "weights" / "000002", **options, output=tmp_path / "state.json"
    )
    answers = [read_evaluation(path).asked for path in (saved, adapter, state)]
    assert answers[0] == answers[1] == answers[2]
    assert [read_evaluation(path).target["kind"] for path in (saved, adapter, state)] == [
        "run",
        "adapter",
        "weights",
    ]


def test_the_untrained_checkpoint_is_the_model_itself(run, model, problems, capsys, tmp_path):
    options = {"kinds": '["direct"]', "test_prompts_path": problems, "max_tokens": 6}
    _, (base,) = evaluate(capsys, run, **options, checkpoint="base", output=tmp_path / "base.json")
    _, (bare,) = evaluate(capsys, model, **options, output=tmp_path / "model.json")
    assert read_evaluation(base).asked == read_evaluation(bare).asked
    assert read_evaluation(base).target["next_step"] == 0


def test_two_checkpoints_are_compared_on_the_same_problems_and_again_from_their_files(run, capsys):
    out, (first, second, compared) = evaluate(
        capsys, run, against_checkpoint="1", num_samples=2, kinds='["direct","critique"]'
    )
    assert (first.name[:6], second.name[:6]) == ("000002", "000001")
    assert "differences are first less second, on the same problems" in out
    written = json.loads(compared.read_text())
    assert written["format"] == "viva comparison 1"
    assert (written["first"]["next_step"], written["second"]["next_step"]) == (2, 1)
    figures = [read_evaluation(path).figures["direct/reply_tokens"].value for path in (first, second)]
    difference = written["figures"]["direct/reply_tokens"]
    assert [difference["value"], difference["against"]] == figures
    assert difference["difference"] == pytest.approx(figures[0] - figures[1])
    again, _ = evaluate(capsys, first, against=second)
    assert again in out
    assert viva.cli.main(["eval", str(first), "against_checkpoint=base", "num_samples=4"]) == 2
    assert "can be given; got against_checkpoint, num_samples" in capsys.readouterr().err
    assert viva.cli.main(["eval", str(first), "output=x.json"]) == 2
    assert "can be given; got output" in capsys.readouterr().err
    elsewhere = second.parents[1] / "elsewhere" / second.name
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(second.read_bytes())
    options = {"num_samples": 2, "kinds": '["direct","critique"]'}
    *_, other = evaluate(capsys, run, against=elsewhere, **options)[1]
    assert (other != compared, other.parent) == (True, compared.parent)


def test_a_run_is_graded_as_it_was_unless_another_grader_is_given(model, problems, tmp_path, capsys):
    code, folder = tmp_path / "own.py", tmp_path / "run"
    code.write_text("def any_reply(reply, known):\n    return True\n")
    given = {"model_name": model, "train_prompts_path": problems, "test_prompts_path": problems}
    more = {"max_steps": 1, "num_test_conversations": 0, "grader": f"{code}:any_reply", "log_path": folder}
    options = OPTIONS | given | more
    assert train_critique([f"{name}={value}" for name, value in options.items()]) == 0
    (path,) = evaluate(capsys, folder)[1]
    assert read_evaluation(path).options["grader"] == f"{code}:any_reply"
    assert graded_by(path) == [hashlib.sha256(code.read_bytes()).hexdigest()]
    code.write_text("def any_reply(reply, known):\n    return False\n")
    (edited,) = evaluate(capsys, folder)[1]
    assert edited != path
    assert graded_by(edited) == [hashlib.sha256(code.read_bytes()).hexdigest()] != graded_by(path)
    assert viva.cli.main(["eval", str(folder), f"against={path}"]) == 2
    assert "the source of your own code has changed" in capsys.readouterr().err
    code.unlink()
    assert viva.cli.main(["eval", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "the run's grader cannot be had any more: there is no file" in told
    assert "Give another one, as in grader=math" in told
    (path,) = evaluate(capsys, folder, grader="math")[1]
    assert read_evaluation(path).options["grader"] == "math"


def test_the_code_of_a_run_is_found_where_the_run_was_started(model, problems, tmp_path, capsys, monkeypatch):
    started, code = tmp_path / "started", "def any_reply(reply, known):\n    return True\n"
    started.mkdir()
    (started / "own.py").write_text(code)
    monkeypatch.chdir(started)
    given = {"model_name": model, "train_prompts_path": problems, "test_prompts_path": problems}
    more = {"max_steps": 1, "num_test_conversations": 0, "grader": "own.py:any_reply", "log_path": "runs/x"}
    assert train_critique([f"{name}={value}" for name, value in (OPTIONS | given | more).items()]) == 0
    assert "edited" not in capsys.readouterr().out
    (here,) = evaluate(capsys, "runs/x")[1]
    assert read_evaluation(here).options["grader"] == "own.py:any_reply"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(code.replace("True", "False"))  # not the run's
    (there,) = evaluate(capsys, started / "runs/x")[1]
    assert graded_by(there) == graded_by(started / here)
    (started / "own.py").write_text(code.replace("True", "bool(reply)"))
    told, _ = evaluate(capsys, started / "runs/x")
    assert f"note: {started / 'own.py'}:any_reply was edited since {started / 'runs/x'} was trained" in told


def test_another_kind_of_conversation_than_the_trained_one(run, capsys):
    out, (path,) = evaluate(
        capsys, run, kinds='["conversation"]', max_rounds=1, num_agents=2, num_test_conversations=1
    )
    (played,) = read_evaluation(path).played["conversation"]
    assert len(played.agents) == 2
    assert "conversation/correct/best" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "best"}, "no best checkpoint"),
        ({"checkpoint": "77"}, "unknown checkpoint '000077'"),
        ({"kinds": '["critic"]'}, "kinds must be of direct, conversation, critique, protocol; got 'critic'"),
        ({"grader": "maths"}, "grader must be one of math, exact, choice"),
        ({"grader": "choice"}, "grader=choice needs known answers that begin with a letter"),
        ({"num_samples": 0}, "num_samples must be 1 or more; got 0"),
        ({"temperature": -1}, "temperature must be 0 or more; got -1"),
        ({"num_agents": 1}, "num_agents must be 2 or more; got 1"),
        ({"max_rounds": 0, "kinds": '["conversation"]'}, "max_rounds must be 1 or more; got 0"),
        ({"output": "results"}, "output must be a file that ends in .json"),
        ({"output": "."}, "output must be a file that ends in .json"),
        ({"test_prompts_path": "gone.jsonl"}, "gone.jsonl is not a file"),
        ({"against": "./gone"}, "model_name=./gone is not a folder"),
    ],
)
def test_a_mistake_is_told_before_a_model_is_loaded(run, options, message, capsys, monkeypatch):
    monkeypatch.setattr(
        "viva.training.service.make_service", lambda *_, **__: pytest.fail("the engine was opened")
    )
    assert viva.cli.main(["eval", str(run), *(f"{name}={value}" for name, value in options.items())]) == 2
    assert message in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    model, problems, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("viva.recipes.evaluation.build.open_target", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    asked = ["eval", str(model), f"test_prompts_path={problems}"]
    for more in ([], [f"output={tmp_path}/runs/a/b.json"], [f"output={tmp_path}/a.json", f"against={model}"]):
        assert viva.cli.main([*asked, *more]) == 2
        told = capsys.readouterr().err
        assert "runs, which is a file; give another output=FILE.json" in told
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


def test_a_model_needs_a_test_set_and_no_checkpoint(model, capsys):
    assert viva.cli.main(["eval", str(model)]) == 2
    assert "there is no test set" in capsys.readouterr().err
    assert viva.cli.main(["eval", str(model), "checkpoint=last"]) == 2
    assert "checkpoint=last needs the folder of a run" in capsys.readouterr().err


def untested_run(folder, **options):
    """The folder of a run on the built-in policy that has no test set."""
    folder.mkdir()
    config = {"recipe": "critique_self_play", "model_name": "tiny", "train_prompts": ["a", "b"]}
    (folder / "config.json").write_text(json.dumps(config | options))
    return folder


def test_a_run_without_a_test_set_is_not_measured_on_other_problems(tmp_path, problems, capsys, monkeypatch):
    monkeypatch.setattr("viva.recipes.evaluation.build.open_target", None)
    run = untested_run(tmp_path / "run")
    assert viva.cli.main(["eval", str(run), "checkpoint=base"]) == 2
    told = capsys.readouterr().err
    assert f"{run} was trained without a test set" in told
    assert "give test_prompts_path=..." in told
    assert f"viva eval tiny against={run}" in told
    assert (
        viva.cli.main(["eval", str(untested_run(tmp_path / "other", model_name="a/b")), "checkpoint=base"])
        == 2
    )
    assert "arithmetic" not in capsys.readouterr().err


def test_problems_without_known_answers_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("viva.recipes.evaluation.build.open_target", None)
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"query": "Why?"}\n{"query": "How?"}\n')
    run = untested_run(tmp_path / "run", test_prompts_path=str(asked))
    assert viva.cli.main(["eval", str(run), "checkpoint=base"]) == 2
    assert (
        f"no problem with a known answer among the 2 of {asked}; give a test set" in capsys.readouterr().err
    )


def test_an_adapter_of_another_form_says_how_to_merge_it(run, problems, capsys, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((run / "adapter" / name).read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 16}))
    assert viva.cli.main(["eval", str(tmp_path), f"test_prompts_path={problems}"]) == 2
    assert "has lora_alpha=16; the engine reads 32 only: merge it" in capsys.readouterr().err


def test_a_second_policy_that_cannot_be_opened_is_told_before_anything_is_sampled(
    run, problems, capsys, tmp_path, monkeypatch
):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((run / "adapter" / name).read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 16}))
    monkeypatch.setattr(
        "viva.recipes.evaluation.build.DirectEvaluator", None
    )  # calling it would be another error
    assert viva.cli.main(["eval", str(run), f"against={tmp_path}", f"test_prompts_path={problems}"]) == 2
    assert "has lora_alpha=16" in capsys.readouterr().err


def test_another_data_set_is_not_read_by_the_runs_columns():
    config = RecipeConfig(
        log_path="", hf_dataset_name="a", hf_dataset_name_config="main", hf_prompt_column="problem"
    )
    same = recipe_options(config, EvalOptions(hf_dataset_name="a", hf_answer_column="final"))
    assert (same.hf_dataset_name_config, same.hf_prompt_column, same.hf_answer_column) == (
        "main",
        "problem",
        "final",
    )
    other = recipe_options(config, EvalOptions(hf_dataset_name="b", hf_answer_column="final"))
    assert (other.hf_dataset_name_config, other.hf_prompt_column, other.hf_answer_column) == (
        None,
        "query",
        "final",
    )


def test_stored_results_of_other_problems_or_options_are_not_compared(run, problems, capsys, tmp_path):
    options = {"kinds": '["direct"]'}
    _, (one,) = evaluate(capsys, run, **options, output=tmp_path / "one.json")
    _, (other,) = evaluate(capsys, run, **options, num_samples=2, output=tmp_path / "other.json")
    assert viva.cli.main(["eval", str(one), f"against={other}"]) == 2
    assert "made with other options: num_samples was 2 and is 4" in capsys.readouterr().err
    _, (fewer,) = evaluate(capsys, run, **options, max_test_samples=2, output=tmp_path / "fewer.json")
    assert viva.cli.main(["eval", str(one), f"against={fewer}"]) == 2
    assert "is of other problems" in capsys.readouterr().err
    assert viva.cli.main(["eval", str(one), f"against={run}"]) == 2
    assert "can be compared with another such file only" in capsys.readouterr().err


def test_the_built_in_policy_has_problems_of_its_own(monkeypatch, tmp_path, capsys):
    renderer = tiny_renderer()
    client = ScriptedSamplingClient(renderer=renderer, script=lambda prompt, call: "The answer is 7.")
    client.get_tokenizer = lambda: renderer.tokenizer

    class Service:
        def create_sampling_client(self, model_path=None, base_model=None):
            return client

        async def close(self, status):
            assert status == "success"

    monkeypatch.setattr("viva.training.service.make_service", lambda *_, **__: Service())
    monkeypatch.chdir(tmp_path)
    out, (path,) = evaluate(capsys, "tiny", max_test_samples=5, num_samples=4)
    assert path.parent == Path("runs/eval")
    assert "tiny, 5 problems asked directly 4 times" in out
    assert (
        out.count("5 problems of the built-in arithmetic, which the built-in policy was not raised on") == 2
    )
    found = read_evaluation(path)
    assert found.figures["direct/pass@4"].value == found.figures["direct/avg@4"].value
    assert found.options["kinds"] == ["direct"]


def test_a_remote_engine_is_asked_for_the_named_model(monkeypatch, problems, tmp_path, capsys):
    asked = []
    renderer = tiny_renderer()
    client = ScriptedSamplingClient(renderer=renderer, script=lambda prompt, call: "1")
    client.get_tokenizer = lambda: renderer.tokenizer

    async def get_base_model_async():
        return "some/model"

    client.get_base_model_async = get_base_model_async

    class Service:
        def __init__(self, base_url, api_key):
            asked.append(base_url)

        def create_sampling_client(self, model_path=None, base_model=None):
            asked.append((model_path, base_model))
            return client

        async def close(self, status):
            asked.append(status)

    monkeypatch.setattr("tinker.ServiceClient", Service)
    monkeypatch.setattr("viva.training.service.check_address", lambda address: None)
    monkeypatch.setattr("viva.training.service.awaitable_service", lambda service: service)
    options = {
        "test_prompts_path": problems,
        "base_url": "http://localhost:8000",
        "output": tmp_path / "x.json",
    }
    evaluate(capsys, "some/model", **options)
    evaluate(capsys, "tinker://run/sampler_weights/final", **options)
    assert asked == [
        *("http://localhost:8000", (None, "some/model"), "success"),
        *("http://localhost:8000", ("tinker://run/sampler_weights/final", None), "success"),
    ]


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit, match="0"):
        viva.cli.main(["eval", "tiny", "--help"])
    told = capsys.readouterr().out
    assert all(name in told for name in ("checkpoint", "against", "num_samples", "grader", "equal_tokens"))
