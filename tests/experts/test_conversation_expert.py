"""A conversation as a search strategy: final solutions, token for token, as answers to the bare question."""

import json

import pytest
from conversation_groups import critique_group, round_robin_group
from strategy_making import QUESTION, play, text_of, trained_text

from viva.conversation.rendering import build_prompt, direct_messages
from viva.experts.conversation_expert import ConversationExpertGroupBuilder, ends_behind, solution_tokens
from viva.experts.strategy import iid
from viva.judging.comparison import VERDICT_PREFIX
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.judging.records import ConversationRecord
from viva.testing import ScriptedReply, ScriptedSamplingClient, crashing, honest, tiny_renderer, turn_of
from viva.training.metrics import rollout_metrics
from viva.training.signs import signs

RENDERER = tiny_renderer(added=(" The", '."}', "Hi The"))
BARE = text_of(build_prompt(RENDERER, direct_messages(QUESTION)).to_ints(), RENDERER)


def larger_wins(prompt):
    if not prompt.endswith(VERDICT_PREFIX):
        return {}
    first, second = (prompt.split(f"Solution {letter}:\n> ", 1)[1].split("\n", 1)[0] for letter in "AB")
    return {"T": 1.0} if first == second else {"A": 1.0} if first > second else {"B": 1.0}


def judge():
    client = ScriptedSamplingClient(renderer=RENDERER, next_token=larger_wins)
    return PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER)


def round_robin(**options):
    inner = round_robin_group(question=QUESTION, renderer=RENDERER, judge=judge(), max_rounds=2, **options)
    return inner


def critique(**options):
    return critique_group(question=QUESTION, renderer=RENDERER, judge=judge(), num_agents=2, **options)


def expert(inner, **options):
    return ConversationExpertGroupBuilder(inner=inner, question=QUESTION, renderer=RENDERER, **options)


def talk(prompt, call):
    agent_id, round_index = turn_of(prompt)
    return honest(f"The sum is {agent_id + 10 * round_index}.")


async def test_only_the_final_solutions_of_a_round_robin_are_trained_behind_the_bare_question():
    outcome, samples, _ = await play(expert(round_robin()), talk, RENDERER)
    assert [trained_text(sample, RENDERER) for sample in samples] == [
        [(BARE, f"The sum is 1{agent_id}.<|im_end|>")] for agent_id in range(3)
    ]
    for sample, trajectory in zip(samples, outcome.group.trajectories_G, strict=True):
        action = trajectory.transitions[1].ac
        start, stop = len(action.tokens) - len('The sum is 10."}<'), len(action.tokens) - len('"}<')
        found = sample.data_D[0].loss_fn_inputs
        assert list(sample.turns_K[0].tokens) == [*action.tokens[start:stop], action.tokens[-1]]
        trained = [
            value
            for value, mask in zip(found["logprobs"].tolist(), found["mask"].tolist(), strict=True)
            if mask
        ]
        assert trained == [*action.logprobs[start:stop], action.logprobs[-1]]
        sampled_in = text_of(sample.turns_K[0].sampled_in, RENDERER)
        assert sampled_in.endswith('"solution": "')
    assert [sample.reward for sample in samples] == [-1.0, 0.0, 1.0]
    assert all(sample.is_swapped and sample.finished for sample in samples)


async def test_a_verifier_pays_instead_if_there_is_one():
    builder = expert(round_robin(), verify=lambda solution: float("10" in solution))
    _, samples, _ = await play(builder, talk, RENDERER)
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.0]


async def test_a_solution_that_json_had_to_escape_is_counted_and_not_trained():
    def quoting(prompt, call):
        agent_id, _ = turn_of(prompt)
        return honest('He said "4".' if agent_id == 0 else f"{agent_id}.")

    outcome, samples, _ = await play(expert(round_robin(), leak_phrases=("SAID",)), quoting, RENDERER)
    assert [sample.seat for sample in samples] == [1, 2]
    assert [row["unlocated"] for row in outcome.group.metrics_G] == [1.0, 0.0, 0.0]
    assert [row["leak"] for row in outcome.group.metrics_G] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("reply", "trained"),
    [
        ('{"solution": "4"}', "4<|im_end|>"),
        ('```json\n{"solution": "4" }\n```', "4<|im_end|>"),
        ('{"solution": "4", "evaluation": "good"}', "4"),  # it went on
        ('{"solution": "4"} so', "4"),
        ("It is 4", "It is 4<|im_end|>"),
    ],
)
async def test_the_end_is_trained_where_nothing_but_the_closing_stood_before_it(reply, trained):
    _, samples, _ = await play(expert(round_robin()), lambda prompt, call: reply, RENDERER)
    assert [trained_text(sample, RENDERER) for sample in samples] == [[(BARE, trained)]] * 3
    assert all(sample.turns_K[0].has_gap == (trained == "4<|im_end|>") for sample in samples)


async def test_a_reply_that_was_cut_has_no_end_to_train():
    def cut(prompt, call):
        return ScriptedReply(text='{"solution": "4"}', ended=False)

    _, samples, _ = await play(expert(round_robin()), cut, RENDERER)
    assert {trained_text(sample, RENDERER)[0][1] for sample in samples} == {"4"}


async def test_a_failed_agent_has_no_sample():
    def failing(prompt, call):
        return crashing() if turn_of(prompt) == (2, 1) else talk(prompt, call)

    _, samples, _ = await play(expert(round_robin(on_failure="continue")), failing, RENDERER)
    assert [sample.seat for sample in samples] == [0, 1]


def review(prompt, call):
    """Both agents propose a number; after the critique they raise it."""
    closing = prompt[prompt.rindex("\nYou are ") :]
    if "Ranking" in closing:
        return "Ranking: A > B"
    if "Criticise" in closing:
        return "Critique of A: more.\nCritique of B: more."
    if "Revise" in closing:
        return "Revise: 40" if "number 1" in closing else "Revise: The sum is 30."
    return "1"


PERSONAS = {0: "number 0.", 1: "number 1."}


@pytest.mark.parametrize("named", [lambda builder: builder, iid], ids=["bare", "named"])
async def test_revisions_are_trained_from_the_marker_to_the_stop_token_and_paid_by_their_own_stream(named):
    inner = critique(personas=PERSONAS)
    outcome, samples, _ = await play(named(expert(inner)), review, RENDERER)
    assert outcome.void_reason is None
    assert [trained_text(sample, RENDERER) for sample in samples] == [
        [(BARE, "The sum is 30.<|im_end|>")],
        [(BARE, "40<|im_end|>")],
    ]
    streams = inner.record()["streams"]
    assert any(streams[agent]["r_sol"] for agent in "01")
    assert [sample.reward for sample in samples] == [streams[agent]["r_sol"] for agent in "01"]
    assert [sample.seat for sample in samples] == [0, 2]  # the critics' lanes give no solution
    paid = [sample.reward for sample in samples]
    metrics = rollout_metrics([outcome])
    assert metrics["reward/mean"] == pytest.approx(sum(paid) / 2)
    assert (metrics["reward/min"], metrics["reward/max"]) == (min(paid), max(paid))
    assert outcome.paid_rewards() == [paid[0], None, paid[1], None]
    told = signs([ConversationRecord.model_validate(inner.record())])
    assert told.items() <= metrics.items()
    assert "sign/against_majority" in told


async def test_a_defence_without_a_solution_is_not_trained():
    def defend(prompt, call):
        reply = review(prompt, call)
        return "Defend:" if reply == "Revise: 40" else reply

    outcome, samples, _ = await play(expert(critique(personas=PERSONAS), verify=len), defend, RENDERER)
    assert [sample.seat for sample in samples] == [0]
    assert [row["unlocated"] for row in outcome.group.metrics_G if "unlocated" in row] == [0.0, 1.0]


async def test_what_to_train_is_unknown_before_the_rewards():
    builder = expert(round_robin())
    outcome, _, _ = await play(builder, talk, RENDERER)
    assert builder.record()["protocol"] == "round_robin"
    await builder.make_envs()
    with pytest.raises(RuntimeError, match="known once its rewards were computed"):
        builder.completions(outcome.group)
    assert builder.record() is None
    assert builder.logging_tags() == ["conversation", "round_robin"]


def encode(*pieces):
    """Ids of pieces, an added token for each that is one."""
    added = RENDERER.tokenizer.get_added_vocab()
    return [
        token
        for piece in pieces
        for token in (
            [added[piece]] if piece in added else RENDERER.tokenizer.encode(piece, add_special_tokens=False)
        )
    ]


@pytest.mark.parametrize(
    ("pieces", "solution", "found"),
    [
        (["Revise:", " The", " sum"], "The sum", " The sum"),  # the space is part of the first token
        (["Revise: ", "4 it is"], "4 it is", "4 it is"),
        (['{"solution": "', "is 4", '."}'], "is 4.", "is 4"),  # the last token also closes the object
        (["Revise: ", "Hi The", " end"], "The end", None),  # the first token began before
        (['{"solution": "a\\nb"}'], "a\nb", None),
        (["4"], "", None),
    ],
)
def test_solutions_are_found_on_the_sampled_ids(pieces, solution, found):
    tokens = encode(*pieces)
    text = "".join(pieces)
    span = solution_tokens(RENDERER, tokens, text, solution)
    assert (None if span is None else text_of(tokens[slice(*span)], RENDERER)) == found


def test_a_solution_that_lost_its_last_word_to_the_closing_token_has_no_end():
    (stop,) = RENDERER.get_stop_sequences()
    text = '{"solution": "is 4."}'
    for pieces, ends in [(["is 4.", '"}'], True), (["is 4", '."}'], False)]:
        tokens = [*encode('{"solution": "', *pieces), stop]
        span = solution_tokens(RENDERER, tokens, text, "is 4.")
        assert ends_behind(RENDERER, tokens, text, "is 4.", span) == ends


def test_the_solution_of_a_reply_that_quotes_it_before_is_the_last_one():
    text = json.dumps({"evaluation": "not 14", "solution": "14"})
    tokens = encode(text)
    start, stop = solution_tokens(RENDERER, tokens, text, "14")
    assert text_of(tokens[:start], RENDERER).endswith('"solution": "')
    assert text_of(tokens[stop:], RENDERER) == '"}'


def test_both_contexts_are_about_one_question_in_one_format():
    with pytest.raises(ValueError, match="not about 'other'"):
        ConversationExpertGroupBuilder(inner=round_robin(), question="other", renderer=RENDERER)
    with pytest.raises(ValueError, match="in other tokens than the one given"):
        ConversationExpertGroupBuilder(
            inner=round_robin(), question=QUESTION, renderer=tiny_renderer("llama3")
        )
    ConversationExpertGroupBuilder(inner=round_robin(), question=QUESTION, renderer=tiny_renderer())
