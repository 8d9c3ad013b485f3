"""viva estimate: what every estimator makes of the samples a run has kept."""

import json
import re

import numpy as np
import pytest

import viva.cli
from viva.experts.estimation import estimate
from viva.experts.estimators import ESTIMATORS, make_estimator
from viva.experts.samples import Sample, sample_record
from viva.view.estimates import EstimateOptions, estimate_run, estimation_text

NUM_TOKENS = 5


def sample(rng, strategy, *, prompt, gap, is_scored=True):
    """A completion that the policy finds less likely than the sampler by `gap` nats per token."""
    sampling_T = rng.uniform(-2, -1, NUM_TOKENS)
    is_swapped = strategy == "hint"
    old_T = sampling_T - gap * rng.uniform(0.5, 1.5, NUM_TOKENS)
    other = {} if is_swapped or not is_scored else {"hint": sampling_T - 0.1}
    return Sample(
        strategy=strategy,
        prompt=prompt,
        reward=float(rng.integers(0, 2)),
        sampling_logprobs_T=sampling_T,
        old_logprobs_T=old_T if is_swapped and is_scored else None,
        on_policy=not is_swapped,
        context_logprobs=other,
    )


def write_run(folder, *, gap=0.1, steps=(0, 10), is_scored=True, strategies=("iid", "hint"), **config):
    rng = np.random.default_rng(0)
    batches = {
        step: [
            sample(rng, strategy, prompt=prompt, gap=gap, is_scored=is_scored)
            for prompt in range(3)
            for strategy in strategies
            for _ in range(4)
        ]
        for step in steps
    }
    rows = [
        {"step": step, "group": 0, "seat": 0, **sample_record(each, prompt=each.prompt)}
        for step, batch in batches.items()
        for each in batch
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"estimator": "shaped", **config}))
    return batches


def test_every_estimator_is_computed_where_all_contexts_were_scored(tmp_path):
    write_run(tmp_path)
    result = estimate_run(tmp_path, EstimateOptions())
    assert [each.name for each in result.estimators] == list(ESTIMATORS)
    assert (result.steps, result.num_samples, result.refused, result.used) == ((0, 10), 48, {}, "shaped")
    assert result.recommendation.estimator == "balance"
    assert not any(each.remarks for each in result.estimators if each.name == "balance")


def test_the_figures_are_those_of_the_batches_by_the_runs_own_settings(tmp_path):
    batches = write_run(tmp_path, weights={"iid": 1.0, "hint": 3.0}, estimator_options={"gamma": 0.5})
    (figures,) = estimate_run(tmp_path, EstimateOptions(estimators=["shaped"])).estimators
    weights = [
        each.weights_T
        for batch in batches.values()
        for one, each in zip(
            batch,
            estimate(batch, make_estimator("shaped", gamma=0.5), mixture={"iid": 1.0, "hint": 3.0}),
            strict=True,
        )
        if one.strategy == "hint"
    ]
    assert figures.diagnostics["hint"].weight_mean == pytest.approx(np.concatenate(weights).mean())


def test_the_last_batches_can_be_looked_at_alone(tmp_path):
    write_run(tmp_path, steps=(0, 10, 20))
    assert estimate_run(tmp_path, EstimateOptions(last=2)).steps == (10, 20)


def test_a_large_gap_is_told_and_the_default_recommended(tmp_path):
    write_run(tmp_path, gap=4.0)
    result = estimate_run(tmp_path, EstimateOptions())
    by_name = {each.name: each for each in result.estimators}
    assert any("effective sample size" in remark for remark in by_name["seq_is"].remarks)
    assert result.recommendation.estimator == "shaped"
    text = estimation_text(result)
    assert "recommended: estimator=shaped" in text
    assert re.search(r"^iid +24 +0\.\d{3} ± 0\.\d{3} ", text, re.M)
    assert "note: strategy 'hint'" in text


def test_what_was_not_scored_is_not_made_up(tmp_path):
    write_run(tmp_path, is_scored=False)
    result = estimate_run(tmp_path, EstimateOptions())
    assert [each.name for each in result.estimators] == ["importance_sampling"]
    assert "needs old_logprobs_T" in result.refused["shaped"]
    assert "distill cannot be computed: distill needs on-policy samples" in estimation_text(result)


def test_where_nothing_was_swapped_plain_importance_sampling_is_recommended(tmp_path):
    write_run(tmp_path, strategies=("iid",))
    assert estimate_run(tmp_path, EstimateOptions()).recommendation.estimator == "importance_sampling"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimators": ["shape"]}, "there is no estimator 'shape'; choose from"),
        ({"last": 0}, "last must be 1 or more"),
        ({"minimum": 2.0}, "minimum must be a share"),
    ],
)
def test_a_wrong_option_is_named(tmp_path, options, message):
    write_run(tmp_path)
    with pytest.raises(ValueError, match=message):
        estimate_run(tmp_path, EstimateOptions(**options))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no stored samples"),
        ('{"strategy": "iid"}\n', r"samples.jsonl:1: a stored sample needs its step; got None"),
        ('{"step": 0, "strategy": "iid"}\n', r"samples.jsonl:1: a stored sample has a damaged 'reward'"),
    ],
)
def test_damaged_samples_are_named_with_their_line(tmp_path, line, message):
    (tmp_path / "samples.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        estimate_run(tmp_path, EstimateOptions())


def test_the_command_prints_tables_and_a_recommendation(tmp_path, capsys):
    write_run(tmp_path)
    assert viva.cli.main(["estimate", str(tmp_path), "last=1"]) == 0
    out = capsys.readouterr().out
    assert "24 samples of 1 batches (steps 10); the run used shaped" in out
    assert "balance (unbiased)" in out
    assert out.splitlines()[-1].startswith("recommended: estimator=")


def test_the_command_refuses_a_folder_without_samples(tmp_path, capsys):
    assert viva.cli.main(["estimate", str(tmp_path)]) == 2
    assert "no stored samples" in capsys.readouterr().err
