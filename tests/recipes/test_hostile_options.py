"""Hostile values of every option: each is taken, or refused in words; planning never ends in a traceback."""

import ast
import importlib
import json
import re
from pathlib import Path

import chz
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import make_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from web_servers import QuietHandler, serving

import viva
from viva.cli import main
from viva.engine.lora import AdapterSettings, target_modules
from viva.engine.model import load_base_model
from viva.recipes.config import parse_options
from viva.recipes.evaluation import EvalOptions, ScreenOptions
from viva.recipes.export import ExportOptions
from viva.recipes.programs import RECIPES, train_recipe
from viva.recipes.strategies import find_strategies

NUMBERS = [
    "0",
    "-1",
    "1.5",
    "nan",
    "inf",
    "1e400",
    "100000000000",
    "1" + 30 * "0",
    f"-{2**63 + 1}",
    "0x10",
    "٣",
]
COLLECTIONS = [
    *("[]", "{}", '[""]', "[1]", "[[]]", "[null]", '["os:system"]', '["json:dumps"]', "a,b", "()"),
    *(
        "{'gamma': 'x'}",
        "{'gamma': True}",
        "{1: 2}",
        "{0: ''}",
        "{'x': 1e999}",
        "{'iid': 1e308}",
        "lambda: 0",
    ),
]
TEXTS = [
    *(
        "",
        "x",
        "None",
        "true",
        "=",
        "~nosuchuser/x",
        "/dev/null",
        "/dev/null/x",
        "\0",
        "\x1b[31m",
        "../" * 20,
    ),
    *("a" * 5000, "é\u202e", "\ud800", "module:x", "http://", "https://user:pw@[::1", "wandb:", "lambda: 0"),
]
VALUES = st.sampled_from([*NUMBERS, *COLLECTIONS, *TEXTS]) | st.text(max_size=20) | st.floats().map(str)


def plan(recipe, argv):
    """What a run is planned from; ends as the program would."""
    module = importlib.import_module(f"viva.recipes.{recipe}")
    return parse_options(module.Config, argv, recipe).make_plan()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "p.jsonl").write_text(
        '{"query": "2 + 2?", "answer": "4"}\n{"query": "3 + 4?", "answer": "7"}\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
        patch.delenv("TINKER_API_KEY", raising=False)
        yield folder


@pytest.mark.parametrize("recipe", RECIPES)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_value_of_any_option_ends_planning_in_a_traceback(recipe, data, folder, capsys):
    config_class = importlib.import_module(f"viva.recipes.{recipe}").Config
    name = data.draw(st.sampled_from(sorted(chz.chz_fields(config_class))))
    options = {"log_path": "run"} | ({} if recipe == "environment" else {"train_prompts_path": "p.jsonl"})
    needed = {
        "protocol": {"protocol": "round_robin"},
        "environment": {"environment": "arithmetic"},
        "agent": {"command": "python agent.py"},
    }
    options |= needed.get(recipe, {})
    options[name] = data.draw(VALUES)
    mistake = None
    try:
        plan(recipe, [f"{key}={value}" for key, value in options.items()])
    except (SystemExit, ValueError, OSError) as error:
        mistake = error
    told = capsys.readouterr().err
    if isinstance(mistake, SystemExit):
        assert (mistake.code, told[:7]) == (2, "error: ")
    elif isinstance(mistake, OSError):
        assert mistake.filename is not None  # which the program tells
    elif mistake is not None:
        assert str(mistake)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("estimator_options={'gamma': 'x'}", "shaped: gamma must be a number; got 'x'"),
        ("estimator_options={'gamma': True}", "shaped: gamma must be a number; got True"),
        ("log_path=~nosuchuser/x", "a user who has no folder here"),
        ("lora_rank=100000000000", "lora_rank must be 10,000 or less; got 100,000,000,000"),
        ("batch_size=1000000000000", "batch_size must be 1,000,000 or less; got 1,000,000,000,000"),
        ("num_agents=100000000000", "num_agents must be 1,000 or less"),
        ("max_tokens=100000000000", "max_tokens must be 1,000,000,000 or less"),
        (f"max_training_datapoints={10**30}", "max_training_datapoints must be 1,000,000,000,000 or less"),
        (f"seed={2**63}", "seed must be a whole number of at most 63 bits"),
        ('leak_phrases=[""]', "leak_phrases must hold words"),
        ('leak_phrases=["a", " "]', "leak_phrases must hold words"),
        (
            'strategies=["os:system"]',
            "must be a function of a Task that you wrote; got a function built into Python",
        ),
        ('strategies=["os:rename"]', "must be a function of a Task that you wrote"),
        ("personas=lambda: 0", "personas must be pairs of a whole number and text"),
        ("weights=lambda: 0", "weights must be pairs of text and a number"),
    ],
)
def test_a_hostile_value_is_refused_in_words(option, told, folder, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        plan("math_efficiency", ["train_prompts_path=p.jsonl", option])
    assert told in f"{error.value}{capsys.readouterr().err}"


def test_a_strategy_takes_a_task_alone(tmp_path):
    (tmp_path / "mine.py").write_text("def none(): ...\ndef two(a, b): ...\ndef one(task, more=1): ...\n")
    for name in ("none", "two"):
        with pytest.raises(ValueError, match="must be a function of a Task, its only argument"):
            find_strategies([f"{tmp_path}/mine.py:{name}"])
    assert list(find_strategies([f"{tmp_path}/mine.py:one"])) == ["one"]


def test_a_strategy_of_ones_own_has_no_name_of_the_recipes(tmp_path):
    (tmp_path / "mine.py").write_text("def conversation(task): ...\n")
    with pytest.raises(ValueError, match="has the name of a strategy of the recipe; rename"):
        find_strategies([f"{tmp_path}/mine.py:conversation"])


def test_a_strategy_that_makes_no_group_is_refused_before_the_first_step(folder, capsys):
    (folder / "mine.py").write_text(
        "def nothing(task):\n    return 3\n\n\ndef broken(task):\n    return 1 + task\n"
    )
    argv = ["train_prompts_path=p.jsonl", "batch_size=8", "max_steps=1", "trackers=[]", "device=cpu"]
    for name, told in (
        ("nothing", "must return an EnvGroupBuilder for a Task; got int"),
        ("broken", "unsupported"),
    ):
        assert (
            train_recipe(
                "math_efficiency", [*argv, f'strategies=["iid", "mine.py:{name}"]', f"log_path={name}"]
            )
            == 2
        )
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "view", "export", "eval", "rescore", "estimate"])
def test_a_folder_of_nobody_is_refused_by_every_command(command, capsys):
    assert main([command, "~nosuchuser/x"]) == 2
    assert "a user who has no folder here" in capsys.readouterr().err


@pytest.mark.parametrize("body", ["null", "[]", "3", '"text"'])
def test_a_server_that_answers_something_else_is_told_in_words(body, folder, capfd):
    class Answer(QuietHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.answer(200, body.encode(), Content_Type="application/json")

        do_POST = do_GET

    with serving(Answer) as port:
        where = [f"base_url=http://127.0.0.1:{port}", "model_name=Qwen/Qwen3-0.6B"]
        statuses = [
            main(["doctor", *where]),
            train_recipe("critique_self_play", [*where, "train_prompts_path=p.jsonl", "log_path=remote"]),
        ]
    told = capfd.readouterr()
    assert statuses == [2, 2]
    assert "Traceback" not in told.err
    assert told.err.count("error: ") == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", "many"),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", -1),
        ("head_dim", 0),
        ("hidden_size", "wide"),
        ("hidden_size", None),
        ("rms_norm_eps", "small"),
    ],
)
def test_a_model_whose_config_makes_no_sense_is_told_in_words(key, value, tmp_path):
    model = Path(make_model(tmp_path / "model", "qwen3"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=r"cannot be loaded: .*(Fetch it anew|save_pretrained)"):
        load_base_model(str(model), torch.device("cpu"), torch.float32)


OF_PROGRAMS = {
    *("add_special_tokens", "clip_high_threshold", "clip_low_threshold", "force", "groups_per_batch"),
    *(
        "config",
        "include_prompt_logprobs",
        "num_groups",
        "r",
        "overwrite",
        "prompt_alt_tokens_k",
        "python",
        "rank",
        "report",
        "stop",
        "tinker",
    ),
}
"""Arguments of functions, of the SDK and of pip, which only programs meet."""


def named_in_messages(path):
    """Names that stand before an equals sign in what a file raises, warns of or says."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        said = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "warn",
            "say",
            "complain",
        )
        if said or isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield from re.findall(r"(?<![\w.(])([a-z_]\w*)=", part.value)


def test_every_option_that_an_error_or_advice_names_is_there():
    configs = [importlib.import_module(f"viva.recipes.{recipe}").Config for recipe in RECIPES]
    known = {
        name
        for each in (*configs, EvalOptions, ExportOptions, ScreenOptions)
        for name in chz.chz_fields(each)
    }
    source = Path(viva.__file__).parent
    rooms = ("engine", "training", "run", "conversation", "judging", "experts", "selfplay", "recipes")
    named = {
        name for room in rooms for path in (source / room).rglob("*.py") for name in named_in_messages(path)
    }
    assert {"lora_rank", "num_epochs", "model_name"} <= named
    assert named - known - OF_PROGRAMS == set()


def test_a_mixture_of_experts_is_told_with_options_of_recipes(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=2,
    )
    module = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="lora_rank=0 in a recipe") as error:
        target_modules(module, AdapterSettings(rank=4, seed=0))
    assert set(re.findall(r"(\w+)=", str(error.value))) == {"lora_rank"}
