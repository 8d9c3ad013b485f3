"""Evaluators: fixed questions, fixed seeds, fixed denominator."""

import asyncio
import math
from types import SimpleNamespace

import pytest
from tinker_cookbook.rl.types import EnvGroupBuilder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from viva.conversation.rendering import build_prompt, direct_messages, load_renderer
from viva.eval.conversations import ConversationEvaluator
from viva.eval.direct import DirectEvaluator, DirectSampler
from viva.eval.judged import WinRateEvaluator
from viva.judging.comparison import Comparison, Judge, Outcome
from viva.judging.judge import PolicyRef
from viva.sdk import make_sequence
from viva.training.data import PromptItem
from viva.training.sampling import Sampling

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def renderer():
    letters = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95}
    inner = Tokenizer(models.WordLevel(letters, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(CONTROL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", unk_token="?")
    return load_renderer(tokenizer, model_name="local")


class Sampler:
    """Answers a prompt by a function of its text; `cut` ends without a stop."""

    def __init__(self, tokenizer, answer, cut=False):
        self.tokenizer, self.answer, self.cut, self.seeds = tokenizer, answer, cut, []

    async def sample(self, prompt, num_samples, sampling_params):
        self.seeds.append(sampling_params.seed)
        text = self.answer(self.tokenizer.decode(prompt.to_ints()))
        tokens = [self.tokenizer.convert_tokens_to_ids(letter) for letter in text]
        reason = "length" if self.cut else "stop"
        if not self.cut:
            tokens.append(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        sequence = make_sequence(
            stop_reason=reason, sequence_id="0", tokens=tokens, logprobs=[-0.1] * len(tokens), topk=None
        )
        return SimpleNamespace(sequences=[sequence])


def evaluator(renderer, **options):
    items = [PromptItem(question=f"What is {n} and 1?", answer=str(n + 1)) for n in range(4)]
    items = options.pop("items", items)
    asked = {name: options.pop(name) for name in ("asks_greedy", "num_samples") if name in options}
    sampling = Sampling(seed=3, max_tokens=20, **options)
    direct = DirectSampler(renderer=renderer, sampling=sampling)
    return DirectEvaluator(items=items, direct=direct, **asked)


async def test_accuracy_counts_right_answers_over_all_questions(renderer):
    sampler = Sampler(renderer.tokenizer, lambda text: "It is 1." if "0 and" in text else "It is 9.")
    metrics = await evaluator(renderer)(sampler, 0)
    assert metrics["test/direct_accuracy"] == 0.25
    assert metrics["test/direct_accuracy_stderr"] == pytest.approx(math.sqrt(0.25 * 0.75 / 4))
    assert (metrics["test/direct_questions"], metrics["test/direct_finish_rate"]) == (4, 1.0)


async def test_a_reply_that_is_cut_off_is_wrong(renderer):
    sampler = Sampler(renderer.tokenizer, lambda text: "It is 1, 2, 3 or 4", cut=True)
    metrics = await evaluator(renderer)(sampler, 0)
    assert (metrics["test/direct_accuracy"], metrics["test/direct_finish_rate"]) == (0.0, 0.0)


class Flaky(Sampler):
    """Fails the first calls of every question."""

    def __init__(self, tokenizer, failures, error=ConnectionError):
        super().__init__(tokenizer, lambda text: "It is 1.")
        self.error = error
        self.left = dict.fromkeys(range(4), failures)

    async def sample(self, prompt, num_samples, sampling_params):
        number = int(self.tokenizer.decode(prompt.to_ints()).split("What is ")[1][0])
        if self.left[number]:
            self.left[number] -= 1
            raise self.error("the server is gone")
        return await super().sample(prompt, num_samples, sampling_params)


@pytest.mark.parametrize("error", [ConnectionError, TimeoutError, asyncio.CancelledError])
async def test_a_question_whose_call_fails_is_asked_again_as_often_as_a_conversation(renderer, error):
    metrics = await evaluator(renderer, max_retries=2)(Flaky(renderer.tokenizer, 2, error), 0)
    assert (metrics["test/direct_accuracy"], metrics["test/direct_questions"]) == (0.25, 4)
    with pytest.raises(OSError, match="the server is gone"):
        await evaluator(renderer, max_retries=1)(Flaky(renderer.tokenizer, 2, error), 0)


async def test_an_evaluation_that_is_interrupted_asks_nothing_again(renderer):
    class Silent(Sampler):
        asked = 0

        async def sample(self, prompt, num_samples, sampling_params):
            Silent.asked += 1
            await asyncio.Event().wait()

    silent = Silent(renderer.tokenizer, lambda text: "")
    running = asyncio.create_task(evaluator(renderer, max_retries=3)(silent, 0))
    while Silent.asked < 4:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert Silent.asked == 4


class Warm(Sampler):
    """At temperature 0 it names the answer of every question and is cut at one; else it answers by the seed."""

    async def sample(self, prompt, num_samples, sampling_params):
        if sampling_params.temperature == 0:
            self.cut = "0 and" in self.tokenizer.decode(prompt.to_ints())
            self.answer = lambda text: f"It is {text.split('What is ')[1][0]} + 1 = 1, 2, 3 or 4"
        else:
            self.cut, seed = False, sampling_params.seed
            self.answer = lambda text: f"It is {seed % 3}."
        return await super().sample(prompt, num_samples, sampling_params)


async def test_temperature_0_and_1_strict_and_lenient_stand_side_by_side(renderer):
    found = await evaluator(renderer, asks_greedy=True, num_samples=4)(Warm(renderer.tokenizer, None), 0)
    # "4" comes last: the answer to one of four questions, and to none that is cut; all answers are named
    assert (found["test/direct_accuracy_greedy"], found["test/direct_accuracy_greedy_lenient"]) == (0.25, 1.0)
    assert found["test/direct_avg@4_lenient"] >= found["test/direct_avg@4"]
    assert {"test/direct_maj@2", "test/direct_maj@4", "test/direct_pass@4"} <= set(found)
    assert found["test/direct_avg@4"] <= found["test/direct_pass@4"]


async def test_what_is_asked_besides_leaves_the_accuracy_as_it_is(renderer):
    alone = Warm(renderer.tokenizer, None)
    before = await evaluator(renderer)(alone, 0)
    both = Warm(renderer.tokenizer, None)
    after = await evaluator(renderer, asks_greedy=True)(both, 0)
    assert both.seeds[: len(alone.seeds)] == alone.seeds
    assert {name: value for name, value in after.items() if name in before and "tokens" not in name} == {
        name: value for name, value in before.items() if "tokens" not in name
    }
    assert after["test/direct_reply_tokens"] == before["test/direct_reply_tokens"]
    assert not any("greedy" in name for name in before)


async def test_an_evaluation_at_temperature_0_asks_once(renderer):
    sampler = Warm(renderer.tokenizer, None)
    found = await evaluator(renderer, asks_greedy=True, num_samples=4, temperature=0.0)(sampler, 0)
    assert len(sampler.seeds) == 4
    assert found["test/direct_accuracy_greedy"] == found["test/direct_accuracy"] == 0.25


async def test_an_evaluation_tells_the_tokens_that_it_read_and_sampled(renderer):
    sampler = Sampler(renderer.tokenizer, lambda text: "It is 1.")
    found = await evaluator(renderer, asks_greedy=True)(sampler, 0)
    prompts = [build_prompt(renderer, direct_messages(f"What is {n} and 1?", None)).length for n in range(4)]
    assert found["test/direct_sampled_tokens"] == 2 * 4 * len("It is 1.#")
    assert found["test/direct_total_tokens"] == found["test/direct_sampled_tokens"] + 2 * sum(prompts)


async def test_a_question_that_does_not_fit_is_wrong_and_counts(renderer):
    items = [PromptItem(question="x" * 200, answer="1"), PromptItem(question="What is it?", answer="1")]
    sampler = Sampler(renderer.tokenizer, lambda text: "1")
    metrics = await evaluator(renderer, items=items, context_window=100)(sampler, 0)
    assert metrics["test/direct_accuracy"] == 0.5


async def test_every_question_keeps_its_seed_from_step_to_step(renderer):
    sampler = Sampler(renderer.tokenizer, lambda text: "1")
    await evaluator(renderer)(sampler, 0)
    await evaluator(renderer)(sampler, 7)
    assert sampler.seeds[:4] == sampler.seeds[4:]
    assert len(set(sampler.seeds)) == 4


async def test_questions_without_answers_cannot_be_graded(renderer):
    with pytest.raises(ValueError, match="got 1, 1 without answer"):
        evaluator(renderer, items=[PromptItem(question="x")])
    with pytest.raises(ValueError, match="got 0, 0 without answer"):
        evaluator(renderer, items=[])


@pytest.mark.parametrize("max_retries", [0, 3])
async def test_test_conversations_are_played_again_as_often_as_said(max_retries):
    class Broken(EnvGroupBuilder):
        made = 0

        async def make_envs(self):
            Broken.made += 1
            raise OSError("no container")

        async def compute_group_rewards(self, trajectory_group, env_group):
            return []

    evaluate = ConversationEvaluator(
        make_builders=lambda: [Broken()], sampling=Sampling(seed=0, max_tokens=4, max_retries=max_retries)
    )
    metrics = await evaluate(None, 0)
    assert (Broken.made, metrics["test/conversation/rollout/void"]) == (max_retries + 1, 1)


async def test_conversation_metrics_get_their_prefix():
    metrics = await ConversationEvaluator(make_builders=lambda: [], sampling=Sampling(seed=0, max_tokens=4))(
        None, 0
    )
    assert metrics["test/conversation/rollout/groups"] == 0


class PrefersShorter(Judge):
    """Prefers the answer with fewer characters, wherever it is shown; keeps what it was asked."""

    def __init__(self):
        self.asked = []

    async def compare(self, prompt, solutions, first, second, seed):
        if solutions[first] == solutions[second]:
            return Comparison(first=first, second=second, outcome=Outcome.TIE, score=0.0, was_asked=False)
        self.asked.append(prompt)
        is_first = len(solutions[first]) < len(solutions[second])
        outcome = Outcome.A if is_first else Outcome.B
        return Comparison(first=first, second=second, outcome=outcome, score=-1.0 if is_first else 1.0)

    def described(self):
        return {}


async def test_answers_are_judged_against_those_before_training(renderer):
    long = Sampler(renderer.tokenizer, lambda _: "long answer")
    # shorter than before for two of the four questions
    later = Sampler(
        renderer.tokenizer, lambda asked: "short" if "2 and" in asked or "3 and" in asked else "longer answer"
    )
    judge = PrefersShorter()
    evaluate = WinRateEvaluator(
        items=[PromptItem(question=f"What is {n} and 1?", answer=None) for n in range(4)],
        direct=DirectSampler(renderer=renderer, sampling=Sampling(seed=3, max_tokens=20)),
        start=PolicyRef(sampling_client=long),
        judge=judge,
    )
    before = await evaluate(long, 0)
    assert (before["test/judged/win_rate"], before["test/judged/identical_rate"], judge.asked) == (
        0.5,
        1.0,
        [],
    )
    asked_before = len(long.seeds)
    after = await evaluate(later, 5)
    assert len(long.seeds) == asked_before, "answers before training are sampled once"
    assert later.seeds == long.seeds[:4], "both policies answer with the same seeds"
    assert after["test/judged/win_rate"] == 0.5
    assert len(judge.asked) == 8
    assert after["test/judged/longer_rate"] == after["test/judged/flip_rate"] == 0.0
    assert after["test/judged/win_rate_stderr"] == pytest.approx(0.25, abs=0.02)  # of four, two of them 1
    assert after["test/judged/total_tokens"] > after["test/judged/sampled_tokens"] > 0


async def test_a_policy_that_wins_all_has_a_win_rate_of_1(renderer):
    evaluate = WinRateEvaluator(
        items=[PromptItem(question=f"What is {n} and 1?", answer=str(n + 1)) for n in range(4)],
        direct=DirectSampler(renderer=renderer, sampling=Sampling(seed=3, max_tokens=20)),
        start=PolicyRef(sampling_client=Sampler(renderer.tokenizer, lambda _: "no number")),
        judge=PrefersShorter(),
    )
    metrics = await evaluate(
        Sampler(renderer.tokenizer, lambda asked: str(int(asked.split("What is ")[1][0]) + 1)), 3
    )
    assert (metrics["test/judged/win_rate"], metrics["test/judged/accuracy"]) == (1.0, 1.0)
    assert "test/judged/win_rate/length_controlled" not in metrics, "all answers are shorter, none is longer"
