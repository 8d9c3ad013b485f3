"""The command that counts a run before it: its page, its options, and what it refuses."""

import shlex
from dataclasses import replace
from pathlib import Path

import chz
import pytest
from pages import blocks, codes, page, printed, tables

from viva.cli import main
from viva.recipes.conversation_preference_rl import Config as PreferenceConfig
from viva.recipes.cost import COUNTED, CostOptions, parse_cost, recipe_cost
from viva.recipes.critique_self_play import Config as CritiqueConfig
from viva.recipes.math_efficiency import Config as MathConfig
from viva.recipes.reward import ENDPOINT_BOUNDS
from viva.recipes.strategies import STRATEGIES
from viva.scaling.counts import Template
from viva.scaling.groups import Lengths, Text

NOTHING = Text(
    lengths=Lengths(prompt_tokens=17, solution_tokens=30.0, remark_tokens=11.0, ranking_tokens=23.0),
    count=lambda text: 0.0,
    template=Template(system=0, user=0, assistant=0, reply=0),
)


@pytest.mark.parametrize("agents", [2, 3, 7])
@pytest.mark.parametrize("rounds", [1, 4])
def test_the_pages_formulas_are_those_of_the_counts(agents: int, rounds: int) -> None:
    """With prompts of the package that take no tokens: what grows with agents and rounds."""
    question, solution, remark, ranking = 17, 30, 11, 23
    reply = solution + 2 * remark
    turns = agents * rounds
    config = PreferenceConfig(num_agents=agents, max_rounds=rounds, batch_size=agents)
    counts = recipe_cost(config, NOTHING).counts
    assert counts.sampled == turns * (reply + 1)
    assert counts.prompts.rows.tokens == turns * question + reply * turns * (turns - 1) / 2
    assert counts.prompts.tree.tokens == question + reply * (turns - 1)
    assert counts.judge_prompts.rows.tokens == agents * (agents - 1) * (question + 2 * solution)
    assert counts.judge_prompts.tree.tokens == question + agents * agents * solution
    assert counts.trained.rows.tokens == counts.prompts.rows.tokens + turns * reply
    assert counts.trained.tree.tokens == counts.prompts.tree.tokens + turns * reply
    at_once = recipe_cost(chz.replace(config, order="simultaneous"), NOTHING).counts
    assert at_once.prompts.rows.tokens == turns * question + reply * agents**2 * rounds * (rounds - 1) / 2
    reviewed = recipe_cost(CritiqueConfig(num_agents=agents, batch_size=agents), NOTHING).counts
    others = agents - 1
    assert reviewed.sampled == agents * (2 * solution + 2 * ranking + others * remark + 5)
    assert reviewed.prompts.rows.tokens == agents * (
        5 * question + (3 * agents + 1) * solution + others * remark
    )
    assert reviewed.num_judge_calls == 2 * agents


PAGE = page("scaling.md")


def test_every_table_of_the_page_is_what_the_command_prints(capsys) -> None:
    shown = blocks(PAGE, "console")
    assert len(shown) >= 3
    for block in shown:
        command, _, text = block.removeprefix("$ ").partition("\n")
        assert printed(capsys, command) == text


def test_every_option_is_documented_with_its_default() -> None:
    rows = [row for table in tables(PAGE, "option") for row in table]
    documented = {codes(row[0])[0]: (codes(row[1]) or row[1:])[0] for row in rows}
    assert documented.pop("recipe") == "needed"
    options = chz.asdict(CostOptions(recipe="r"))
    assert documented == {name: str(value) for name, value in options.items() if name != "recipe"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["recipe=nothing"],
            "unknown recipe 'nothing'; allowed: math_efficiency, conversation_preference_rl",
        ),
        (
            ["recipe=math_efficiency", 'strategies=["mine.py:f"]'],
            "the cost of the strategy 'mine.py:f' is not known",
        ),
        (["recipe=critique_self_play", "model=9b"], "neither 8b nor 70b nor a folder"),
        (["recipe=critique_self_play", "steps=0"], "steps must be above 0"),
        (["recipe=critique_self_play", "prompt_tokens=inf"], "prompt_tokens must be above 0 and finite"),
        (["recipe=critique_self_play", "accelerators=8,-8"], "accelerators must be numbers of 1 or more"),
        (["recipe=critique_self_play", "batch_size=6"], "batch_size must be divisible by num_agents"),
        (["recipe=math_efficiency", "strategies=[]"], "strategies must name at least one"),
        (["recipe=math_efficiency", "group_size=0"], "group_size must be 1 or more; got 0"),
        (["recipe=conversation_preference_rl", "max_rounds=0"], "max_rounds must be 1 or more; got 0"),
        (["recipe=conversation_preference_rl", "judge_prompt_path=/no/such/file"], "/no/such/file"),
    ],
)
def test_what_cannot_be_counted_is_refused(capsys, arguments, message) -> None:
    assert main(["cost", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_judge_behind_https_is_counted_without_its_key(capsys, monkeypatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    judge = "judge=https://host/v1 judge_model=m judge_prices=[0.1,0.2]"
    assert "of the endpoint, price" in printed(capsys, f"viva cost recipe=conversation_preference_rl {judge}")


def test_the_passes_of_a_scorer_are_called_its_own(capsys) -> None:
    told = printed(capsys, "viva cost recipe=math_efficiency strategies=iid reward=peer_prediction")
    assert "by the scorer" in told
    assert "prompts of the scorer" in told
    assert "judge" not in told


@pytest.mark.parametrize(("longest", "answer"), [(9, 9), (256, 256), (999, 401)])
def test_a_judges_own_answer_is_as_long_as_its_options_let_it_be(longest: int, answer: int) -> None:
    config = CritiqueConfig(num_agents=2, batch_size=2, judge_answers_first=True, max_tokens=16)
    counts = recipe_cost(chz.replace(config, judge_max_tokens=longest), CostOptions(recipe="").text).counts
    assert counts.judged == answer + counts.num_judge_calls - 1


def test_an_assumption_that_makes_no_sense_is_refused(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cost", "recipe=critique_self_play", "mfu_train=2"])
    assert "mfu_train must be above 0 and at most 1" in capsys.readouterr().err


def test_options_of_recipe_and_command_find_their_place() -> None:
    options, config = parse_cost(
        ["recipe=critique-self-play", "num_agents=6", "--prompt_tokens=99", "model=8b"]
    )
    assert (options.prompt_tokens, options.model) == (99.0, ["8b"])
    assert isinstance(config, CritiqueConfig)
    assert config.num_agents == 6


def test_a_protocol_of_ones_own_is_counted_by_its_name() -> None:
    name = f"{Path(__file__).parents[2]}/examples/debate.py:DEBATE"
    _, named = parse_cost([f"recipe={name}", "num_agents=2"])
    assert named == parse_cost(["recipe=protocol", f"protocol={name}", "num_agents=2"])[1]


def test_an_option_of_neither_is_refused(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cost", "recipe=critique_self_play", "num_agent=6"])
    assert "num_agent" in capsys.readouterr().err


def test_the_recipes_model_and_steps_are_counted_unless_the_commands_own_say_otherwise(capsys) -> None:
    command = "viva cost recipe=critique_self_play accelerators=[8]"
    told = printed(capsys, f"{command} model_name=tiny max_steps=7")
    assert "\ntiny, " in told
    assert "hours of 7 steps" in told
    assert "8b" not in told
    for both in ("model_name=tiny model=8b", "max_steps=7 steps=8"):
        assert main([*shlex.split(command)[1:], *both.split()]) == 2
        assert "leave one of them out" in capsys.readouterr().err
    assert main([*shlex.split(command)[1:], "model_name=Qwen/Qwen3-8B-none"]) == 2
    assert "model=Qwen/Qwen3-8B-none is neither" in capsys.readouterr().err


def test_what_a_file_gives_is_counted_unless_the_line_says_otherwise(tmp_path, capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name: tiny\nmax_steps: 20\nnum_agents: 3\n")
    command = f"viva cost recipe=critique_self_play accelerators=[8] config={file}"
    assert main(shlex.split(command)[1:]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "of 3 agents" in told.out
    assert "\ntiny, " in told.out
    assert "8b" not in told.out
    assert "hours of 20 steps" in told.out
    told = printed(capsys, f"{command} model=8b steps=7")
    assert "\n8b, " in told
    assert "tiny" not in told
    assert "hours of 7 steps" in told
    assert "hours of 9 steps" in printed(capsys, f"{command} max_steps=9")
    file.write_text("recipe: math_efficiency\n")
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(command)[1:])
    assert "is of the recipe math_efficiency" in capsys.readouterr().err


@pytest.mark.parametrize("is_filed", [False, True])
def test_options_that_change_no_figure_are_named(capsys, tmp_path, is_filed) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1\n" if is_filed else "lora_rank: 8\n")
    given = [f"config={file}", "num_agents=3", "log_path=x"] + ["learning_rate=1"] * (not is_filed)
    assert main(["cost", "recipe=critique_self_play", *given]) == 0
    assert capsys.readouterr().err == "note: without effect on these figures: learning_rate, log_path\n"


AT = {"judge": "http://127.0.0.1:9/v1", "judge_model": "m"}


@pytest.mark.parametrize("config_class", [PreferenceConfig, CritiqueConfig, MathConfig])
def test_what_an_endpoint_reads_is_counted_and_costs_no_work_here(config_class, capsys) -> None:
    text = CostOptions(recipe="").text
    talk = {"strategies": ["conversation"], "conversation_reward": "own"}
    config = config_class(**(talk if config_class is MathConfig else {}))
    own, outside = (
        recipe_cost(chz.replace(config, judge_mode="logprob", **judge), text).counts for judge in ({}, AT)
    )
    assert outside.outside == (own.judge_prompts.rows.tokens, own.judged)
    assert (outside.num_outside_calls, outside.num_judge_calls) == (own.num_judge_calls, 0)
    assert own.num_judge_calls > own.num_outside_calls == 0
    assert outside.total == pytest.approx(own.total)
    assert outside.judge_prompts.rows.tokens == outside.judged == 0
    assert outside.decoded.tokens == own.decoded.tokens - own.judged
    recipe = config_class.__module__.rpartition(".")[2]
    more = "strategies=conversation conversation_reward=own" if config_class is MathConfig else ""
    command = f"viva cost recipe={recipe} {more} judge={AT['judge']} judge_model=m judge_mode=logprob"
    told = printed(capsys, f"{command} 'judge_prices=[1.0,2.0]'")
    price = (outside.outside[0] + 2 * outside.outside[1]) / 1e6
    assert f"answers of the endpoint, price {price:,.4f}" in told


@pytest.mark.parametrize("config_class", [PreferenceConfig, CritiqueConfig, MathConfig])
def test_an_option_without_effect_has_none(config_class) -> None:
    """Options that are looked at count, but for some that only say how what is counted goes on."""
    other = {
        "judge_every": {"judge": "every", "judge_every": 3},
        "judge_decay": {"judge": "ema", "judge_decay": 0.5},
        "judge_checkpoint": {"judge": "runs/past", "judge_checkpoint": "last"},
        "judge_max_off_set_mass": {"judge_max_off_set_mass": 0.5},
        "judge_body": {"judge_body": "{}"},
        "judge_key_variable": {"judge_key_variable": "HOME"},
        "judge_max_price": {"judge_max_price": 2.0, "judge_prices": [0.0, 1.0]},
        **{name: {name: 3} for name in ENDPOINT_BOUNDS[1:-2]},
        "on_failure": {"on_failure": "continue"},
    }
    read = set()

    @chz.chz
    class Watched(config_class):
        __module__ = config_class.__module__

        def __getattribute__(self, name):
            read.add(name)
            return object.__getattribute__(self, name)

    text = CostOptions(recipe="").text
    for more in (
        {},
        {"judge_mode": "verdict"},
        {"strategies": list(STRATEGIES)},
        {"strategies": list(STRATEGIES), "conversation_reward": "own"},
        {"revision_votes": "agents"},
    ):
        is_math = config_class is MathConfig
        if set(more) <= set(chz.chz_fields(config_class)) and not (is_math and "judge_mode" in more):
            config = Watched(**more)
            read.clear()
            cost = recipe_cost(config, text)
            options = read & set(chz.chz_fields(config_class))
            assert len(options) > 3
            assert options - COUNTED <= set(other)
            asks_judge = "conversation_reward" in more if is_math else more.get("revision_votes") != "agents"
            for name in options & set(other):
                outside = AT if name in (*ENDPOINT_BOUNDS, "judge_body") else {}
                changed = chz.replace(config, **outside, **other[name])
                if name.startswith("judge") and not asks_judge:
                    with pytest.raises(ValueError, match="would change nothing"):
                        recipe_cost(changed, text)
                else:
                    same = cost if not outside else recipe_cost(chz.replace(config, **outside), text)
                    assert replace(recipe_cost(changed, text), prices=None) == same


def test_a_model_that_does_not_fit_says_so(capsys) -> None:
    assert "does not fit" in printed(capsys, "viva cost recipe=critique_self_play model=70b accelerators=1")


def test_policies_that_only_take_part_are_sampled_and_not_trained_and_share_no_prefix():
    def counts(**options):
        given = {"train_prompts": ["a"], "num_agents": 2, "batch_size": 4, "max_rounds": 1}
        config = PreferenceConfig(**(given | {"order": "simultaneous"} | options))
        return recipe_cost(config, CostOptions(recipe="conversation_preference_rl").text).counts

    shared, apart = counts(), counts(policies="per_agent")
    frozen = counts(policies={"agent_0": "trained", "agent_1": "initial"})
    assert shared.sampled == apart.sampled == frozen.sampled
    assert shared.total == apart.total == frozen.total
    # personas are not equally long
    assert frozen.trained.rows.tokens == pytest.approx(apart.trained.rows.tokens / 2, rel=0.01)
    assert apart.trained.rows.tokens == shared.trained.rows.tokens
    assert apart.prompts.tree.tokens > shared.prompts.tree.tokens
