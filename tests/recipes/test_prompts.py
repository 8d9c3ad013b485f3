"""The words that a user gives: system message, question template, and what a protocol asks for."""

import json
from pathlib import Path

import pytest
from random_models import make_model

from viva import load_run
from viva.conversation.protocol import Protocol, Round, View
from viva.conversation.rendering import build_prompt, direct_messages, system_messages
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.recipes.config import DataOptions, parse_options
from viva.recipes.critique_self_play import Config as CritiqueConfig
from viva.recipes.data import check_sources, load_prompts, load_test_prompts
from viva.recipes.evaluation import EvalOptions, recipe_options
from viva.recipes.math_efficiency import Config as MathConfig
from viva.recipes.programs import train_recipe
from viva.recipes.strategies import EfficientReward, Task, find_strategies
from viva.selfplay.critique import critique_protocol
from viva.testing import tiny_renderer
from viva.training.data import PromptItem

RENDERER = tiny_renderer()
VIEW = View(agent_id=1, num_agents=3, round_index=1, aliases=(2, 0, 1), persona="the Critic: be exact.")
TEMPLATE = "{question} Give only the final number."
SYSTEM = "You are a calculator."


EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2_critique.yaml"


def test_the_examples_words_are_those_that_votes_by_label_probabilities_leave_to_be_written() -> None:
    config = parse_options(CritiqueConfig, [f"config={EXAMPLE}", 'train_prompts=["a"]'])
    protocol = config.game().protocol
    written = {each.name for round_ in protocol.rounds for each in round_.segments if each.votes_on is None}
    assert config.prompts is not None
    assert set(config.prompts) == {"system", *written}
    for name in written:
        assert request(protocol, name) != request(critique_protocol(3), name)


def request(protocol: Protocol, segment: str) -> str:
    """The last part of a segment's prompt, for `VIEW`."""
    segments = {each.name: each for round_ in protocol.rounds for each in round_.segments}
    return segments[segment].instruction(VIEW)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Think.", "You are the Critic: be exact. Think."),
        ("{persona} You wrote {own}.", "You are the Critic: be exact. You wrote C."),
        ("Rank {letters}.", "You are the Critic: be exact. Rank A, B, C."),
        ("Judge {others} in round {round}.", "You are the Critic: be exact. Judge A, B in round 2."),
        (r"\frac{a}{b} {unknown}", r"You are the Critic: be exact. \frac{a}{b} {unknown}"),
    ],
)
def test_a_segment_asks_in_the_words_that_are_given(text, expected):
    protocol = critique_protocol(3).with_prompts({"ranking": text, "system": SYSTEM})
    assert request(protocol, "ranking") == expected
    assert protocol.system_prompt == SYSTEM
    untouched = critique_protocol(3)
    assert request(protocol, "critique") == request(untouched, "critique")
    assert protocol.streams == untouched.streams
    assert [each.name for each in protocol.rounds] == [each.name for each in untouched.rounds]
    protocol.check()


def test_words_for_no_segment_are_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"no segment 'rankin'; allowed: system, proposal, .*'ranking'\?"):
        CritiqueConfig(prompts={"rankin": "Rank."}).game()


def test_text_of_a_persona_is_not_read_as_a_placeholder():
    view = View(agent_id=0, num_agents=2, round_index=0, aliases=(0, 1), persona="{own}")
    protocol = Protocol(rounds=[Round("a", "Go.")]).with_prompts({"a": "{persona} Go."})
    assert protocol.rounds[0].segments[0].instruction(view) == "{own}. Go."


def test_every_prompt_is_asked_through_the_template(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text('{"query": "What is {x}?", "answer": 3}\n')
    options = DataOptions(
        train_prompts=["2 + 3?"],
        train_prompts_path=str(path),
        test_prompts_path=str(path),
        question_template=TEMPLATE,
    )
    train, test = load_prompts(options)
    asked = "What is {x}? Give only the final number."
    assert [item.question for item in train] == ["2 + 3? Give only the final number.", asked]
    assert test == load_test_prompts(options) == [PromptItem(question=asked, answer="3")]


def test_a_template_without_a_place_for_the_prompt_is_refused():
    with pytest.raises(ValueError, match=r"as \{question\}; got 'Give only the number.'"):
        check_sources(DataOptions(train_prompts=["a"], question_template="Give only the number."))


def test_no_system_message_is_made_of_nothing():
    assert system_messages(None, None) == []
    assert system_messages("a", None, "b") == [{"role": "system", "content": "a\n\nb"}]


@pytest.mark.parametrize("strategy", ["iid", "best_of", "prompt_augmentation", "feedback", "conversation"])
async def test_the_system_message_stands_before_the_question_in_every_training_context(strategy):
    config = MathConfig(
        system_prompt=SYSTEM,
        hint="Mind the carry.",
        conversation="round_robin",
        conversation_reward="verifier",
    )
    item, policy = PromptItem(question="2 + 3?", answer="5"), PolicyRef()
    task = Task(
        item=item,
        seed=0,
        renderer=RENDERER,
        reward=EfficientReward(answer="5", token_budget=10),
        group_size=2,
        policy=policy,
        judge=lambda: PolicySelfComparisonJudge(policy, RENDERER),
        options=config,
    )
    builder = find_strategies([strategy])[strategy](task)
    envs = await builder.make_envs()
    bare = build_prompt(RENDERER, direct_messages(item.question, SYSTEM))
    observation, _ = await envs[0].initial_observation()
    if strategy == "prompt_augmentation":
        hinted = direct_messages(item.question, f"{SYSTEM}\n\nMind the carry.")
        assert observation == build_prompt(RENDERER, hinted)
    if strategy in ("iid", "best_of", "feedback"):
        assert observation == bare
    if strategy in ("prompt_augmentation", "conversation"):
        assert builder.context_transform(observation, 0) == bare


def test_a_run_and_its_evaluation_ask_in_the_words_that_are_given(tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"query": "2 + 3?", "answer": 5}\n{"query": "4 + 3?", "answer": 7}\n')
    options = {
        "model_name": make_model(tmp_path / "model", "qwen3"),
        "lora_rank": 2,
        "learning_rate": 1e-3,
        "train_prompts_path": problems,
        "test_prompts_path": problems,
        "question_template": "{question} In one word.",
        "system_prompt": SYSTEM,
        "prompts": json.dumps({"proposal": "Say something short."}),
        "num_agents": 2,
        "batch_size": 2,
        "max_steps": 1,
        "max_tokens": 4,
        "log_path": tmp_path / "run",
    }
    argv = [f"{name}={value}" for name, value in options.items()]
    assert train_recipe("critique_self_play", argv) == 0
    (conversation,) = load_run(tmp_path / "run").conversations
    prompt = conversation.turns[0].prompt
    assert "> 2 + 3? In one word." in prompt or "> 4 + 3? In one word." in prompt
    assert prompt.endswith("Say something short.")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["system_prompt"] == SYSTEM
    given = recipe_options(MathConfig(system_prompt=SYSTEM), EvalOptions(question_template="Q: {question}"))
    assert (given.system_prompt, given.question_template) == (SYSTEM, "Q: {question}")
