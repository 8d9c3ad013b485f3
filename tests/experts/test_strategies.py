"""Every strategy: what its policy sees, what is trained of it and behind which context."""

import pytest
from strategy_making import (
    HINT,
    QUESTION,
    RENDERER,
    Sum,
    hinted,
    play,
    problems,
    text_of,
    trained_text,
)
from tinker_cookbook.rl import data_processing as cookbook
from tinker_cookbook.rl.types import EnvGroupBuilder

from viva.conversation.rendering import build_prompt, direct_messages
from viva.experts.assisted import (
    RIGHT_FEEDBACK,
    WRONG_FEEDBACK,
    FeedbackGroupBuilder,
    GeneratedFeedback,
    PromptAugmentedGroupBuilder,
    leak,
)
from viva.experts.strategy import (
    BestOfGroupBuilder,
    Completion,
    ExpertGroupBuilder,
    completions_of,
    iid,
    is_strategy,
    strategy_of,
)
from viva.judging.judge import PolicyRef
from viva.testing import ScriptedPolicy, ScriptedReply, ScriptedSamplingClient, tiny_renderer
from viva.training.rollouts import run_group

BARE = text_of(build_prompt(RENDERER, direct_messages(QUESTION)).to_ints())


def answers(*texts):
    """Replies by call, in turns."""
    return lambda prompt, call: texts[call % len(texts)]


async def test_iid_datums_are_the_cookbooks():
    outcome, samples, prompts = await play(iid(problems()), answers("3", "4"))
    assert prompts == [BARE, BARE]
    theirs = cookbook.assemble_training_data([outcome.group], cookbook.compute_advantages([outcome.group]))[0]
    for sample, datum in zip(samples, theirs, strict=True):
        (own,) = sample.data_D
        assert own.model_input == datum.model_input
        for name in ("target_tokens", "logprobs", "mask"):
            assert own.loss_fn_inputs[name].tolist() == datum.loss_fn_inputs[name].tolist()
        assert (sample.strategy, sample.is_swapped, sample.advantages_T) == ("iid", False, None)


async def test_prompt_augmentation_samples_with_the_hint_and_trains_without_it():
    builder = PromptAugmentedGroupBuilder(
        env_thunk=lambda: hinted(leak_phrases=("well",)), num_envs=2, weight=0.5
    )
    outcome, samples, prompts = await play(builder, answers("Well, 4", "4"))
    assert all("Work slowly" in prompt for prompt in prompts)
    assert [trained_text(sample) for sample in samples] == [
        [(BARE, "Well, 4<|im_end|>")],
        [(BARE, "4<|im_end|>")],
    ]
    assert all(sample.is_swapped for sample in samples)
    leaks = [trajectory.transitions[0].metrics["leak"] for trajectory in outcome.group.trajectories_G]
    assert leaks == [1.0, 0.0]
    assert strategy_of(builder).weight == 0.5
    assert builder.logging_tags() == ["prompt_augmentation"]


async def test_the_seeds_environment_says_both_observations():
    env = hinted()
    sampled, stop = await env.initial_observation()
    assert stop == RENDERER.get_stop_sequences()
    assert sampled == build_prompt(RENDERER, [*HINT, {"role": "user", "content": QUESTION}])
    assert text_of(env.get_training_observation().to_ints()) == BARE


async def test_a_group_asks_one_question():
    names = iter("ab")

    class Named(Sum):
        def __init__(self):
            super().__init__()
            self.name = next(names)

        def get_question(self):
            return self.name

    builder = PromptAugmentedGroupBuilder(env_thunk=Named, num_envs=2)
    with pytest.raises(RuntimeError, match="known once make_envs was called"):
        builder.context_transform(None, 0)
    outcome = await run_group(builder, ScriptedPolicy(renderer=RENDERER, script=answers("4")), max_retries=0)
    assert "must ask the same question" in outcome.void_reason


def test_leaks_are_found_whatever_the_case():
    assert leak("Work SLOWLY now", ["slowly"]) == {"leak": 1.0}
    assert leak("quick", ["slowly"]) == {"leak": 0.0}
    assert leak("slowly", []) == {}


# feedback


def two_tries(prompt, call):
    """The first attempts are 3 and 14, seat by seat; the second ones are right."""
    if "assistant\n" not in prompt.removesuffix("<|im_start|>assistant\n"):
        return "3" if call == 0 else "14"
    return "24" if WRONG_FEEDBACK in prompt else "34"


@pytest.mark.parametrize("train_behind", ["attempt", "problem"])
async def test_feedback_is_seen_by_the_sampler_and_dropped_in_training(train_behind):
    builder = FeedbackGroupBuilder(env_thunk=Sum, num_envs=2, train_behind=train_behind)
    outcome, samples, prompts = await play(builder, two_tries)
    assert [RIGHT_FEEDBACK in prompt for prompt in prompts if prompt != BARE] == [False, True]
    assert [WRONG_FEEDBACK in prompt for prompt in prompts if prompt != BARE] == [True, False]
    for sample, first, second in zip(samples, ("3", "14"), ("24", "34"), strict=True):
        kept = f"{BARE}{first}<|im_end|>\n<|im_start|>assistant\n"
        behind = kept if train_behind == "attempt" else BARE
        assert trained_text(sample) == [(behind, f"{second}<|im_end|>")]
        assert len(sample.data_D) == 1
    assert samples[0].prompt == samples[1].prompt
    assert outcome.group.get_total_rewards() == [1.0, 1.0]
    rows = [trajectory.transitions[0].metrics for trajectory in outcome.group.trajectories_G]
    assert [row["first_correct"] for row in rows] == [0.0, 1.0]


async def test_a_first_attempt_with_a_weight_shares_the_datum_of_the_second_where_it_can():
    builder = FeedbackGroupBuilder(env_thunk=Sum, num_envs=1, transition_weights=(0.25, 1.0))
    _, (sample,), _ = await play(builder, two_tries)
    (datum,) = sample.data_D
    weights = [value for value in datum.loss_fn_inputs["advantages"].tolist() if value]
    assert weights == [0.25] * len("3<") + [1.0] * len("24<")  # each with its stop token


async def test_a_format_that_rewrites_earlier_replies_only_splits_the_datum():
    """qwen3 drops the thinking of earlier replies, so the second context does not extend the first turn."""
    renderer = tiny_renderer("qwen3_instruct")

    def thinking(prompt, call):
        reply = two_tries(prompt, call)
        return f"<think>hm</think>{reply}" if call == 0 else reply

    builder = FeedbackGroupBuilder(env_thunk=lambda: Sum(renderer), num_envs=1, transition_weights=(1.0, 1.0))
    outcome, (sample,), _ = await play(builder, thinking, renderer)
    assert "<think>" not in text_of(outcome.group.trajectories_G[0].transitions[1].ob.to_ints())
    assert len(sample.data_D) == 2
    assert [text for _, text in trained_text(sample)] == ["<think>hm</think>3<|im_end|>", "24<|im_end|>"]


async def test_a_truncated_first_attempt_counts_as_wrong():
    def cut(prompt, call):
        return ScriptedReply(text="4", ended=False) if call == 0 else "4"

    builder = FeedbackGroupBuilder(env_thunk=Sum, num_envs=1)
    _, _, prompts = await play(builder, cut)
    assert WRONG_FEEDBACK in prompts[1]


async def test_the_policy_can_give_the_feedback_itself():
    client = ScriptedSamplingClient(
        renderer=RENDERER, script=lambda prompt, call: "Critique of A: 2 + 2 is more than that."
    )
    feedback = GeneratedFeedback(policy=PolicyRef(sampling_client=client), renderer=RENDERER, seed=7)
    builder = FeedbackGroupBuilder(env_thunk=Sum, num_envs=2, feedback=feedback, leak_phrases=("more than",))
    outcome, samples, prompts = await play(
        builder, lambda prompt, call: "3" if call < 2 else "4, more than 3"
    )
    assert all("> 3" in prompt and "> 2 + 2?" in prompt for prompt in client.prompts)
    assert len(set(client.seeds)) == 2
    assert all("2 + 2 is more than that." in prompt and "Critique of" not in prompt for prompt in prompts[2:])
    assert [sample.finished for sample in samples] == [True, True]
    assert outcome.group.trajectories_G[0].transitions[1].metrics["leak"] == 1.0


def test_feedback_has_no_context_for_what_it_did_not_show():
    builder = FeedbackGroupBuilder(env_thunk=Sum, num_envs=1)
    with pytest.raises(ValueError, match="turn 0 was not sampled in an observation of this group"):
        builder.context_transform(build_prompt(RENDERER, direct_messages("?")), 0)
    with pytest.raises(ValueError, match="train_behind must be"):
        FeedbackGroupBuilder(env_thunk=Sum, num_envs=1, train_behind="feedback")


# best of k


@pytest.mark.parametrize(("keep", "kept"), [("best", [0, 1, 0, 0]), ("all", [0, 1, 1, 0])])
async def test_best_of_k_imitates_finished_successes_only(keep, kept):
    replies = ["3", "4", "14", ScriptedReply(text="4", ended=False)]
    builder = BestOfGroupBuilder(inner=problems(4), keep=keep)
    _, samples, _ = await play(builder, answers(*replies))
    assert [sample.advantages_T.tolist()[0] for sample in samples] == kept
    assert [trained_text(sample)[0][0] for sample in samples] == [BARE] * 4
    assert strategy_of(builder).strategy_id == "best_of"


async def test_best_of_k_never_takes_the_place_holder_of_a_seat_without_a_reward():
    class PartlyPaid(ExpertGroupBuilder):
        def unpaid_seats(self):
            return frozenset({0})

    inner = PartlyPaid(inner=problems(2), strategy_id="partly")
    outcome, samples, _ = await play(BestOfGroupBuilder(inner=inner, threshold=-1.0), answers("3", "3"))
    assert outcome.paid_rewards() == [None, 0.0]
    assert [sample.advantages_T.any() for sample in samples if sample.seat == 1] == [True]


async def test_best_of_k_of_another_strategy_keeps_its_context():
    inner = PromptAugmentedGroupBuilder(env_thunk=hinted, num_envs=2)
    _, samples, prompts = await play(BestOfGroupBuilder(inner=inner), answers("3", "4"))
    assert "Work slowly" in prompts[0]
    assert [trained_text(sample)[0][0] for sample in samples] == [BARE, BARE]
    assert [sample.advantages_T.any() for sample in samples] == [False, True]


def test_best_of_k_refuses_an_unknown_rule():
    with pytest.raises(ValueError, match="keep must be 'best' or 'all'"):
        BestOfGroupBuilder(inner=problems(), keep="worst")


# the contract


async def test_any_builder_can_be_a_strategy_with_a_few_attributes():
    def bare(observation, turn_index):
        return build_prompt(RENDERER, direct_messages(QUESTION))

    builder = ExpertGroupBuilder(inner=problems(), strategy_id="mine", context_transform=bare, weight=2.0)
    assert is_strategy(builder)
    assert not is_strategy(problems())
    assert strategy_of(problems()).strategy_id == "iid"
    _, samples, _ = await play(builder, answers("4"))
    assert [sample.strategy for sample in samples] == ["mine"] * 2
    assert builder.logging_tags() == ["mine", "problems"]
    assert builder.record() is None
    assert builder.credit() is None


async def test_mistakes_of_a_strategy_are_named():
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Completion(transition=0, start=2, stop=1)
    with pytest.raises(ValueError, match="weight of a completion"):
        Completion(transition=0, weight=-1.0)
    with pytest.raises(ValueError, match="advantage must be a finite number"):
        Completion(transition=0, advantage=float("nan"))
    with pytest.raises(ValueError, match="without slashes; got 'a/b'"):
        strategy_of(ExpertGroupBuilder(inner=problems(), strategy_id="a/b"))

    class Few(EnvGroupBuilder):
        def completions(self, group):
            return []

        async def make_envs(self):
            raise NotImplementedError

    outcome, _, _ = await play(problems(), answers("4"))
    with pytest.raises(ValueError, match="one entry per seat; got 0 for 2"):
        completions_of(Few(), outcome.group)
