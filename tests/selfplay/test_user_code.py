"""Objects of a user's own process by name: one name for what was declared in the same words, never two under one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

import viva
from viva import Protocol, Round
from viva.selfplay.user_code import GraderError, find_check, load_target, remember, source_digest


def debate(text: str, reward: Any = "tournament") -> Protocol:
    return Protocol(rounds=[Round("argue", text)], reward=reward)


def paying(amount: float) -> Callable[[viva.Conversation], dict[int, float]]:
    def pay(conversation: viva.Conversation) -> dict[int, float]:
        return dict.fromkeys(conversation.final_solutions, amount)

    return pay


def counting(seen: list[str]) -> Callable[[viva.Conversation], dict[int, float]]:
    def pay(conversation: viva.Conversation) -> dict[int, float]:
        seen.append(conversation.question)
        return {}

    return pay


def length(conversation: viva.Conversation) -> dict[int, float]:
    return {agent: float(len(text)) for agent, text in conversation.final_solutions.items()}


def typed() -> Any:
    """A function without source, as of an interpreter."""
    names: dict[str, Any] = {}
    exec("def pay(conversation): return {}", names)
    return names["pay"]


class Scaled:
    """A reward with a scale of its own."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def pay(self, conversation: viva.Conversation) -> dict[int, float]:
        return dict.fromkeys(conversation.final_solutions, self.scale)


@dataclass(frozen=True)
class Fixed:
    """Another class of this name may have other code."""

    name: str = "fixed"

    def __call__(self, conversation: viva.Conversation) -> dict[int, float]:
        return dict.fromkeys(conversation.final_solutions, 1.0)


def doubled(function: Any) -> Any:
    @wraps(function)
    def call(conversation: viva.Conversation) -> Any:
        return {agent: 2 * paid for agent, paid in function(conversation).items()}

    return call


def halved(function: Any) -> Any:
    @wraps(function)
    def call(conversation: viva.Conversation) -> Any:
        return {agent: paid / 2 for agent, paid in function(conversation).items()}

    return call


SCALED = Scaled(1.0)
LISTS: tuple[list[str], list[str]] = ([], [])
PAIRS = {
    "lambdas of one line": (lambda one: 1, lambda one: 2),
    "functions with other values from outside": (paying(1.0), paying(2.0)),
    "functions with lists from outside, which may change": (counting(LISTS[0]), counting(LISTS[1])),
    "functions without source": (typed(), typed()),
    "methods of two objects": (Scaled(1.0).pay, Scaled(2.0).pay),
    "functions behind other wrappers": (doubled(length), halved(length)),
    "objects of a class of one's own": (Fixed(), Fixed()),
    "partial functions": (partial(paying, 1.0), partial(paying, 2.0)),
    "partial functions of others": (partial(paying), partial(debate)),
    "protocols": (debate("Speak."), debate("Speak up.")),
    "protocols with other rewards": (debate("Speak.", paying(1.0)), debate("Speak.", paying(2.0))),
    "rewards": (viva.rewards.majority(), viva.rewards.majority(voters="first")),
}


@pytest.mark.parametrize(("first", "second"), PAIRS.values(), ids=list(PAIRS))
def test_two_objects_never_share_a_name(first: Any, second: Any) -> None:
    names = [remember(each) for each in (first, second, first)]
    assert names[0] == names[2] != names[1]
    assert load_target(names[0]) is first
    assert load_target(names[1]) is second


@pytest.mark.parametrize(
    "make",
    [partial(debate, "Speak."), partial(paying, 1.0), partial(debate, "Speak.", viva.rewards.majority())],
)
def test_what_is_declared_again_in_the_same_words_has_its_name(make: Callable[[], Any]) -> None:
    name = remember(make())
    assert remember(make()) == name
    assert source_digest(name) is not None
    assert name.endswith(f"-{source_digest(name)[:8]}")


def test_a_method_has_one_name_each_time_it_is_asked_for() -> None:
    assert remember(SCALED.pay) == remember(SCALED.pay)


def test_a_reward_and_a_grader_may_both_be_lambdas(tmp_path: Any) -> None:
    run = viva.train(
        debate("Give an answer."),
        reward=lambda talk: {agent: float(agent) for agent in talk.final_solutions},
        grader=lambda reply, answer: answer in reply,
        prompts=[{"query": "1 + 1?", "answer": 2}],
        num_agents=2,
        batch_size=2,
        steps=1,
        max_tokens=8,
        lora_rank=4,
        eval_every=0,
        trackers=[],
        log_path=tmp_path / "run",
    )
    assert run.conversations[-1].rewards == {0: 0.0, 1: 1.0}


def missing_file(reply: str, answer: str) -> bool:
    return bool(Path("/nowhere/at all").read_text())


@pytest.mark.parametrize(
    ("grader", "told"),
    [
        (
            missing_file,
            r"FileNotFoundError: .*, in the grader '.*missing_file', test_user_code.py line \d+",
        ),
        (lambda reply, answer: 1, "must return True or False; got 1"),
    ],
)
def test_a_grader_that_fails_is_told_by_name_and_place(grader: Any, told: str) -> None:
    with pytest.raises(GraderError, match=told):
        find_check(remember(grader)).is_right("7", "7")


def test_a_grader_that_does_not_take_reply_and_answer_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"must take a reply and the known answer: too many positional"):
        find_check(remember(lambda reply: True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"judge": lambda a, b: a},
            r"judge takes texts and numbers, no code; got <function .*reward, .*grader",
        ),
        ({"max_tokens": debate("Speak.")}, "max_tokens takes texts and numbers, no code; got Protocol"),
    ],
)
def test_code_for_an_option_that_takes_none_is_refused_with_those_that_do(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        viva.train("conversation_preference_rl", prompts=["1 + 1?"], **options)


def sums(renderer: Any, batch_size: int, group_size: int, n_batches: int) -> Any:
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDataset

    return ArithmeticDataset(
        batch_size=batch_size, renderer=renderer, group_size=group_size, n_batches=n_batches
    )


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("environment", {"environment": sums}),
        (
            "math_efficiency",
            {
                "prompts": [{"query": "1 + 1?", "answer": 2}],
                "strategies": ["iid", "conversation"],
                "conversation": "round_robin",
                "conversation_reward": paying(3.0),
                "num_agents": 2,
            },
        ),
    ],
)
def test_environments_and_rewards_of_conversations_are_objects_too(
    recipe: str, options: dict[str, Any], tmp_path: Any
) -> None:
    quick: dict[str, Any] = {"max_tokens": 8, "lora_rank": 4, "trackers": [], "group_size": 2, "steps": 1}
    run = viva.train(recipe, **options, **quick, batch_size=4, log_path=tmp_path / "run")
    name = "environment" if recipe == "environment" else "conversation_reward"
    assert load_target(run.config[name]) is options[name]
    assert len(run.metrics) == 1
