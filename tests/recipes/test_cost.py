"""Counts of `viva cost` are those of what a run samples, scores and trains."""

import asyncio
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chz
import pages
import pytest
import tinker
from pages import printed, script_the_engine
from tinker_cookbook.renderers.base import Message

from viva.cli import main
from viva.conversation.rendering import build_prompt
from viva.judging.comparison import VERDICT_PREFIX
from viva.judging.judge import JudgeOptions, PolicyRef
from viva.judging.rubric import CRITERION_PREFIX
from viva.recipes.conversation_preference_rl import Config as PreferenceConfig
from viva.recipes.cost import recipe_cost
from viva.recipes.critique_self_play import Config as CritiqueConfig
from viva.recipes.judges import judge_of
from viva.recipes.loop import run_recipe
from viva.recipes.math_efficiency import Config as MathConfig
from viva.scaling.counts import Block, Template, tree_cost
from viva.scaling.groups import Lengths, Text
from viva.testing import ScriptedSamplingClient, honest, tiny_renderer, turn_of

RENDERER = tiny_renderer()
QUESTIONS = ("How many is this?", "How many is that?")
LENGTHS = Lengths(
    prompt_tokens=len(QUESTIONS[0]), solution_tokens=30.0, remark_tokens=11.0, ranking_tokens=23.0
)


def template() -> Template:
    """Tokens that the renderer of the tests adds."""

    def length(*roles: str) -> int:
        return build_prompt(RENDERER, [Message(role=role, content="") for role in roles]).length

    (mark,) = RENDERER.tokenizer.encode("Q", add_special_tokens=False)
    marked = build_prompt(RENDERER, [Message(role="user", content="Q")]).to_ints()
    reply = len(marked) - 1 - marked.index(mark)
    user = length("user") - reply
    return Template(
        system=length("system", "user") - user - reply,
        user=user,
        assistant=length("user", "assistant", "user") - 2 * user - reply,
        reply=reply,
    )


EXACT = Text(lengths=LENGTHS, count=len, template=template())
"""The tokenizer of the tests has a token for each character of the prompts."""


class Recorder(pages.Trainer):
    """Keeps what it is given to train."""

    trained: list[tuple[int, ...]]

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        type(self).trained += [tuple(datum.model_input.to_ints()) for datum in data]
        return super().forward_backward(data, loss_fn, loss_fn_config)

    def forward(self, data, loss_fn, loss_fn_config=None):
        return super().forward_backward(data, loss_fn, loss_fn_config)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, float]]:
    """Runs one step with a scripted engine; its metrics, and under ``judge`` and ``trained`` what was counted."""

    def run(
        config: Any,
        script: Callable[[str, int], Any],
        next_token: Any = None,
        scorer: Any = None,
        **more: Any,
    ) -> dict[str, Any]:
        sampler = ScriptedSamplingClient(
            renderer=RENDERER, script=script, next_token=next_token, prompt_logprob=scorer
        )
        Recorder.trained = []
        monkeypatch.setattr(pages, "Trainer", Recorder)
        script_the_engine(monkeypatch, sampler)
        folder = tmp_path / "run"
        path = tmp_path / "prompts.jsonl"
        path.write_text(
            "".join(json.dumps({"query": question, "answer": "1"}) + "\n" for question in QUESTIONS)
        )
        options = {
            "model_name": "some/model",
            "train_prompts_path": str(path),
            "learning_rate": 1e-4,
            "eval_every": 0,
            "max_steps": 1,
            "log_path": str(folder),
        } | more
        assert asyncio.run(run_recipe(chz.replace(config, **options))) is None
        row, *_ = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        judged = [
            prompt
            for prompt in sampler.prompts
            if prompt.endswith((VERDICT_PREFIX, CRITERION_PREFIX))
            or " student" in prompt  # of a judge or a scorer
        ]
        num_replies = len(sampler.prompts) - len(judged)
        return {
            **row,
            "replies": num_replies,
            "judge_prompts": sum(tokens_of(prompt) for prompt in judged),
            "judge_tokens": row.get("judge/prompt_tokens", 0) + row.get("scorer/prompt_tokens", 0),
            "verdicts": len(judged),
            "trained": list(Recorder.trained),
        }

    return run


def tokens_of(prompt: str) -> int:
    """Of a decoded prompt: control tokens are one each."""
    return len(re.sub(r"<\|[a-z_]+\|>", "#", prompt))


def agrees(found: dict[str, Any], config: Any) -> None:
    counts = recipe_cost(config, EXACT).counts
    assert (found["replies"], found["verdicts"]) == (counts.num_calls, counts.num_judge_calls)
    assert found["rollout/sampled_tokens"] == counts.sampled
    assert found["rollout/prompt_tokens"] == counts.prompts.rows.tokens
    assert found["judge_prompts"] == found["judge_tokens"] == counts.judge_prompts.rows.tokens
    assert found["rollout/total_tokens"] == counts.total


def agrees_on_training(found: dict[str, Any], config: Any, *, groups: int) -> None:
    counts = recipe_cost(config, EXACT).counts
    assert found["optim/tokens"] == counts.trained.rows.tokens
    assert found["optim/datums"] == counts.num_datums
    each = len(found["trained"]) // groups
    shared = sum(
        tree_cost(
            [
                tuple(Block(key=token, tokens=1) for token in tokens)
                for tokens in found["trained"][start : start + each]
            ]
        ).tokens
        for start in range(0, len(found["trained"]), each)
    )
    # words may begin alike, which the count by words does not see
    assert 0.95 * counts.trained.tree.tokens <= shared <= counts.trained.tree.tokens


def larger_wins(prompt: str) -> dict[str, float]:
    first, second = re.findall(r"Solution [AB]:\n> (\d)", prompt)
    return {"A": 0.8, "B": 0.1, "T": 0.1} if first > second else {"A": 0.1, "B": 0.8, "T": 0.1}


def talk(prompt: str, call: int):
    if prompt.endswith((VERDICT_PREFIX, CRITERION_PREFIX)):
        return ""
    return honest(f"{turn_of(prompt)[0]}".ljust(30, "s"), reflection="r" * 11, evaluation="e" * 11)


@pytest.mark.parametrize("greedy", [True, False])
def test_an_evaluation_is_counted_exactly(measured, tmp_path, capsys, greedy) -> None:
    path = tmp_path / "test.jsonl"
    rows = [{"query": question, "answer": 1} for question in QUESTIONS] + [{"query": QUESTIONS[0][::-1]}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = {"test_prompts_path": str(path), "eval_every": 1, "eval_samples": 3, "eval_greedy": greedy}
    config = PreferenceConfig(num_agents=2, max_rounds=2, batch_size=2, num_test_conversations=1)

    def answers(prompt: str, call: int):
        return "s" * 30 if "round" not in prompt and "student" not in prompt else talk(prompt, call)

    found = measured(config, answers, larger_wins, **asked)
    counted = recipe_cost(chz.replace(config, **asked), EXACT).evaluation
    assert counted is not None
    assert (counted.num_answers, counted.num_conversations) == (2 * (3 + greedy), 1)
    conversations = found["test/conversation/rollout/total_tokens"]
    assert found["test/direct_total_tokens"] + conversations == counted.tokens

    command = f"viva cost recipe=conversation_preference_rl test_prompts_path={path} eval_greedy={greedy}"
    line = f"an evaluation, every 5 steps: {2 * (4 + greedy)} answers, 3 conversations"
    assert line in printed(capsys, command)
    assert "an evaluation" not in printed(capsys, f"{command} eval_every=0")
    assert main(shlex.split(command.replace(path.name, "none.jsonl"))[1:]) == 2
    assert "none.jsonl cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("order", "pattern"), [("sequential", "all_pairs_both_ways"), ("simultaneous", "all_pairs_one_way")]
)
def test_conversation_preference_rl_is_counted_exactly(measured, order, pattern) -> None:
    config = PreferenceConfig(
        num_agents=4, max_rounds=3, batch_size=8, order=order, tournament_pattern=pattern
    )
    found = measured(config, talk, larger_wins)
    agrees(found, config)
    agrees_on_training(found, config, groups=2)


@pytest.mark.parametrize(("number", "expected"), [(2, 4), (9, 6)])
def test_pairs_that_the_policy_at_the_start_compares_are_counted_exactly(
    measured, monkeypatch, number, expected
) -> None:
    def as_it_is(plan: Any, opened: Any, text: str | None) -> Any:
        del text  # the scripted engine has no policy at the start
        return judge_of(JudgeOptions(), plan, opened)

    monkeypatch.setattr("viva.recipes.judges.initial_judge", as_it_is)
    config = PreferenceConfig(
        num_agents=3, max_rounds=2, batch_size=6, reward="answers", initial_judge_pairs=number
    )
    found = measured(config, talk, larger_wins)
    agrees(found, config)
    assert found["verdicts"] == 2 * expected


@pytest.mark.parametrize("recipe", ["conversation", "critique", "samples"])
def test_a_kl_penalty_is_counted_exactly(measured, monkeypatch, tmp_path, recipe) -> None:
    class Reference:
        async def compute_logprobs(self, prompt: tinker.ModelInput) -> list[float]:
            return [-1.0] * prompt.length

    async def at_the_start(*_: object) -> tuple[PolicyRef, list[object]]:
        return PolicyRef(sampling_client=Reference()), []  # the scripted engine has no policy at the start

    monkeypatch.setattr("viva.recipes.loop.policy_of", at_the_start)
    config = PreferenceConfig(num_agents=4, max_rounds=3, batch_size=8, kl_penalty_coef=0.1)
    if recipe == "critique":
        config = CritiqueConfig(num_agents=3, batch_size=6, kl_penalty_coef=0.1)
        measured(config, review, lambda prompt: {"A": 0.2, "B": 0.7, "T": 0.1}, max_steps=2)
    elif recipe == "samples":
        config = plain_samples(4, kl_penalty_coef=0.1)
        measured(config, lambda prompt, call: "s" * 30, max_steps=2, max_training_datapoints=16)
    else:
        measured(config, talk, larger_wins, max_steps=2)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)  # in the first step the policy is its reference
    counts = recipe_cost(config, EXACT).counts
    assert "optim/reference_tokens" not in first
    assert (second["optim/tokens"], second["optim/datums"]) == (counts.trained.rows.tokens, counts.num_datums)
    scored = second["optim/reference_tokens"] + second.get("experts/scored_tokens", 0)
    assert scored == counts.scored.rows.tokens
    assert counts.total == recipe_cost(chz.replace(config, kl_penalty_coef=0.0), EXACT).counts.total


def test_a_reward_without_a_judge_costs_no_comparisons(measured) -> None:
    config = PreferenceConfig(num_agents=3, max_rounds=2, batch_size=6, reward="answers")
    found = measured(config, talk)
    agrees(found, config)
    assert found["verdicts"] == 0


def plain_samples(group_size: int, **options: Any) -> MathConfig:
    """Two problems a step, asked so often."""
    return MathConfig(
        strategies=["iid"],
        group_size=group_size,
        batch_size=2 * group_size,
        max_training_datapoints=2 * group_size,
        hf_answer_column=None,
        max_tokens=64,
        estimator="importance_sampling",
        **options,
    )


def listening(before: str, token: str) -> float:
    """A scorer that reads the first student's digit."""
    first = before.rpartition("first student's answer:\n> ")[2][:1]
    return -1.0 if token == first else -2.0


def test_the_passes_of_a_scorer_are_counted_exactly(measured) -> None:
    config = PreferenceConfig(
        num_agents=3, max_rounds=2, batch_size=6, reward="peer_prediction", scorer_policy="current"
    )
    found = measured(config, talk, scorer=listening)
    agrees(found, config)
    assert found["verdicts"] == 2 * (3 + 6)


def test_the_passes_of_a_scorer_over_plain_samples_are_counted_exactly(measured) -> None:
    config = plain_samples(4, reward="peer_prediction", scorer_policy="current")
    found = measured(config, solve, scorer=listening)
    counts = recipe_cost(config, EXACT).counts
    assert (found["replies"], found["verdicts"]) == (counts.num_calls, counts.num_judge_calls)
    assert found["verdicts"] == found["scorer/sampled_tokens"] == 2 * (4 + 12)
    assert found["judge_prompts"] == found["scorer/prompt_tokens"] == counts.judge_prompts.rows.tokens
    assert found["rollout/total_tokens"] == counts.total


def test_the_comparisons_of_plain_samples_are_counted_exactly(measured) -> None:
    config = plain_samples(3, reward="serl")
    found = measured(config, solve, lambda prompt: {"A": 0.6, "B": 0.3, "T": 0.1})
    counts = recipe_cost(config, EXACT).counts
    assert (found["replies"], found["verdicts"]) == (counts.num_calls, counts.num_judge_calls)
    assert found["verdicts"] == 2 * 3 * 2


def test_the_judges_own_answers_are_counted_exactly(measured) -> None:
    config = plain_samples(4, reward="judge_answer")
    found = measured(config, solve)
    counts = recipe_cost(config, EXACT).counts
    assert found["replies"] == counts.num_calls + counts.num_judge_calls == 2 * (4 + 1)
    assert found["judge/sampled_tokens"] == counts.judged
    assert found["judge_tokens"] == counts.judge_prompts.rows.tokens
    assert found["rollout/total_tokens"] == counts.total


def of_solutions(prompt: str) -> dict[str, float]:
    return {"y": 0.6, "n": 0.4} if prompt.endswith(CRITERION_PREFIX) else {}


@pytest.mark.parametrize("answers_first", [False, True])
def test_the_scores_of_a_rubric_are_counted_exactly(measured, answers_first) -> None:
    def said(prompt: str, call: int) -> str:
        return talk(prompt, call) if "<|im_start|>system" in prompt else "7".ljust(30, "s")

    criteria = {"It is right.": 2.0, "It is brief and polite.": 1.0}
    config = PreferenceConfig(
        num_agents=3, batch_size=6, reward="rubric", criteria=criteria, judge_answers_first=answers_first
    )
    found = measured(config, said, of_solutions)
    counts = recipe_cost(config, EXACT).counts
    assert found["verdicts"] == 2 * 3 * 2
    assert found["replies"] + found["verdicts"] == counts.num_calls + counts.num_judge_calls
    assert found["judge/sampled_tokens"] == counts.judged
    assert found["judge_tokens"] == counts.judge_prompts.rows.tokens
    assert found["rollout/total_tokens"] == counts.total


def test_the_scores_of_plain_samples_are_counted_exactly(measured) -> None:
    config = plain_samples(4, reward="rubric")
    found = measured(config, solve, of_solutions)
    counts = recipe_cost(config, EXACT).counts
    assert (found["replies"], found["verdicts"]) == (counts.num_calls, counts.num_judge_calls) == (8, 8)
    assert found["rollout/total_tokens"] == counts.total


def review(prompt: str, call: int) -> str:
    if prompt.endswith(VERDICT_PREFIX):
        return ""
    asked = prompt[prompt.rfind("You are ") :]
    if "Criticise" in asked:
        letters = sorted(
            set(re.findall(r"^Solution ([A-Z]):$", prompt, re.M))
            - set(re.findall("Solution (.) is yours", asked))
        )
        return "\n".join(f"Critique of {letter}: {'c' * 11}" for letter in letters)
    if "Revise or defend" in asked:
        return f"Revise: {'v' * 30}"
    if "Write your full solution" in asked:
        return "p" * 30
    return "r" * 23


@pytest.mark.parametrize("votes", ["judge", "agents"])
def test_critique_self_play_is_counted_exactly(measured, votes) -> None:
    config = CritiqueConfig(num_agents=3, batch_size=6, revision_votes=votes)
    found = measured(config, review, lambda prompt: {"A": 0.2, "B": 0.7, "T": 0.1})
    agrees(found, config)
    # rankings that cannot be read earn nothing, and nothing of them is trained
    assert found.get("optim/tokens", 0) <= recipe_cost(config, EXACT).counts.trained.rows.tokens


@pytest.mark.parametrize(("config_class", "script"), [(PreferenceConfig, talk), (CritiqueConfig, review)])
def test_a_judge_that_answers_first_answers_once_a_conversation_and_is_counted_exactly(
    measured, config_class, script
) -> None:
    def said(prompt: str, call: int) -> str:
        return script(prompt, call) if "<|im_start|>system" in prompt else "7".ljust(30, "s")

    config = config_class(num_agents=3, batch_size=6, judge_answers_first=True)
    found = measured(config, said, lambda prompt: {"A": 0.2, "B": 0.7, "T": 0.1})
    counts = recipe_cost(config, EXACT).counts
    assert found["replies"] + found["verdicts"] == counts.num_calls + counts.num_judge_calls
    assert found["replies"] == counts.num_calls + 2
    assert found["judge/sampled_tokens"] == counts.judged
    assert found["judge_tokens"] == counts.judge_prompts.rows.tokens
    assert found["rollout/sampled_tokens"] == counts.sampled


def review_differently(prompt: str, call: int) -> str:
    """As `review`, but no two solutions have the same words, so that every pair is asked about."""
    text = review(prompt, call)
    return re.sub(r"([pv])\1{29}", lambda found: f"{call:05d}".ljust(30, found[1]), text)


@pytest.mark.parametrize("votes", ["judge", "agents"])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_votes_by_label_probabilities_are_counted_exactly(measured, number, votes) -> None:
    config = CritiqueConfig(num_agents=number, batch_size=2 * number, revision_votes=votes, ballots="labels")
    found = measured(config, review_differently, lambda prompt: {"A": 0.2, "B": 0.7, "T": 0.1})
    agrees(found, config)
    voted = 2 if number == 2 else (number - 1) * (number - 2)
    compared = 4 if number == 2 else 2 * (number - 1)
    across = 2 if votes == "judge" else compared * (compared - 1)
    assert found["verdicts"] == 2 * number * (2 * voted + across)


def test_critiques_that_no_weight_pays_are_not_counted_as_trained(measured) -> None:
    def higher_call_wins(prompt: str) -> dict[str, float]:
        first, second = re.findall(r"^> (\d{5})", prompt, re.M)[-2:]
        return {"A": 0.1, "B": 0.8, "T": 0.1} if first < second else {"A": 0.8, "B": 0.1, "T": 0.1}

    config = CritiqueConfig(num_agents=3, batch_size=6, ballots="labels")
    found = measured(config, review_differently, higher_call_wins)
    agrees_on_training(found, config, groups=2)
    assert found["optim/datums"] == 2 * 3 * 2


def test_replies_are_cut_at_the_longest() -> None:
    config = CritiqueConfig(num_agents=3, batch_size=6)
    uncut = recipe_cost(config, EXACT).counts
    assert recipe_cost(chz.replace(config, max_tokens=100), EXACT).counts == uncut
    cut = recipe_cost(chz.replace(config, max_tokens=10), EXACT).counts
    assert cut.sampled == 10 * cut.num_calls
    assert cut.prompts.rows.tokens < uncut.prompts.rows.tokens


@pytest.mark.parametrize(
    ("reward", "per_agent"),
    [("r_sol", 2), ("shuffled_r_sol", 2), ("majority", 0), ("comas", 2)],
)
def test_every_reward_of_a_review_is_counted_exactly(measured, reward, per_agent) -> None:
    config = CritiqueConfig(num_agents=3, batch_size=6, reward=reward)
    found = measured(config, review, lambda prompt: {"A": 0.2, "B": 0.7, "T": 0.1})
    agrees(found, config)
    assert found["verdicts"] == 6 * per_agent


def solve(prompt: str, call: int) -> str:
    """Every reply is another one, and every second one right."""
    if prompt.endswith(CRITERION_PREFIX):
        return ""
    number = f"{call:03d}"[::-1]  # so that they differ from the first letters on
    return f"{number}: ".ljust(14, "s") + f"the answer is {call % 2}."


@pytest.mark.parametrize(
    ("estimator", "more"), [("importance_sampling", ["feedback"]), ("shaped", ["feedback"]), ("balance", [])]
)
def test_math_efficiency_is_counted_exactly(measured, estimator, more) -> None:
    config = MathConfig(
        strategies=["iid", "prompt_augmentation", *more],
        group_size=4,
        batch_size=2 * 4 * (2 + len(more)),
        max_training_datapoints=24,
        estimator=estimator,
        hf_answer_column=None,
        max_tokens=64,
    )
    found = measured(config, solve)
    counts = recipe_cost(config, EXACT).counts
    assert (found["replies"], found["rollout/sampled_tokens"]) == (counts.num_calls, counts.sampled)
    assert found["experts/scored_tokens"] == counts.scored.rows.tokens
    if not more:  # what is said about a first attempt depends on it
        assert found["rollout/prompt_tokens"] == counts.prompts.rows.tokens
        assert found["rollout/total_tokens"] == counts.total
    if estimator == "importance_sampling":
        agrees_on_training(found, config, groups=2)


def test_the_policys_own_feedback_is_counted_exactly(measured) -> None:
    config = MathConfig(
        strategies=["iid", "feedback"],
        feedback="generated",
        group_size=4,
        batch_size=16,
        max_training_datapoints=16,
        hf_answer_column=None,
        max_tokens=64,
    )

    def script(prompt: str, call: int) -> str:
        critic = "Criticise other solutions" in prompt
        return f"{call:03d}"[::-1].ljust(11, "c") if critic else solve(prompt, call)

    found = measured(config, script)
    counts = recipe_cost(config, EXACT).counts
    assert (found["replies"], found["rollout/sampled_tokens"]) == (counts.num_calls, counts.sampled)
    assert found["rollout/prompt_tokens"] == counts.prompts.rows.tokens
    assert found["rollout/total_tokens"] == counts.total


# closed forms
