"""Every probe catches the engine that is broken where it looks, and only what is broken is called so."""

import broken_engines as broken
import pytest
from broken_engines import UNHEARD, bench, with_sampler

from viva.doctor.bench import Finding
from viva.doctor.examination import FEATURES, PROBES, barred, check_engine, examine, put
from viva.engine import LocalServiceClient


@pytest.fixture
def service(tmp_path):
    return LocalServiceClient(device="cpu", state_dir=tmp_path)


BROKEN = [
    (broken.IgnoresTheLoss, "value of ppo", "computes something else"),
    (broken.IgnoresTheLoss, "value of cispo", "computes something else"),
    (broken.IgnoresTheLoss, "value of dro", "computes something else"),
    (broken.IgnoresTheLoss, "direction of ppo", "must fall"),
    (broken.IgnoresTheLoss, "direction of cispo", "must fall"),
    (broken.IgnoresTheLoss, "direction of dro", "must fall"),
    (broken.IgnoresTheConfig, "value of ppo", "with {'clip_low"),
    (broken.IgnoresTheConfig, "value of cispo", "with {'clip_low"),
    (broken.IgnoresTheConfig, "value of dro", "with {'beta"),
    (broken.IgnoresTheWeights, "value of cross_entropy", "computes something else"),
    (broken.IgnoresTheWeights, "direction of cross_entropy", "must fall"),
    (broken.KeepsItsValue, "value of importance_sampling", "does not tell its value"),
    (broken.NeverLearns, "optimiser step", "more probable"),
    (broken.LearnsBackwards, "direction of importance_sampling", "less probable"),
    (broken.Shuffles, "mixed batches", "logprobs came for"),
    (broken.LeaksBetweenRows, "mixed batches", "beside sequences of other lengths"),
    (broken.KeepsTheLastGradient, "gradients add up", "must rise"),
    (broken.KeepsTheFirstGradient, "gradients add up", "must fall"),
    (broken.ForwardLeavesGradients, "gradients add up", "must"),
    (broken.OwnLossesUpsideDown, "losses of one's own", "must rise"),
    (with_sampler(broken.SilentSampler), "samples", "without logprobs"),
    (with_sampler(broken.OneSample), "samples", "asked for 4 samples, got 1"),
    (with_sampler(broken.LongSamples), "samples", "max_tokens=6"),
    (with_sampler(broken.OffLogprobs), "sampler and trainer agree", "differ from the trainer's by 0.2"),
    (broken.StaleSamplers, "new samplers follow", "do not follow"),
    (broken.LiveSamplers, "old samplers stay", "for a sampler made before them by"),
    (with_sampler(broken.ShiftedPrompts), "prompt logprobs", "differ from the trainer's"),
    (with_sampler(broken.NoFirstPlace), "prompt logprobs", "has 8 logprobs"),
    (with_sampler(broken.ShiftedPrompts), "last logprob of prompts", "differs from the trainer's by"),
    (with_sampler(broken.FewAlternatives), "top-k of samples", "asked for 5 different tokens"),
    (with_sampler(broken.FewAlternatives), "top-k of prompts", "asked for 5 different tokens"),
    (with_sampler(broken.AlternativesOfAnother), "top-k of samples", "for the trainer"),
    (with_sampler(broken.AlternativesOfAnother), "top-k of prompts", "for the trainer"),
    (with_sampler(broken.NoSeeds), "seeds", "the same seed gives other samples"),
    (with_sampler(broken.OneSeed), "seeds", "another seed gives the same"),
    (with_sampler(broken.NeverGreedy), "greedy samples", "temperature 0 gives"),
    (with_sampler(broken.IgnoresTemperature), "temperature in logprobs", "not those of the distribution"),
    (with_sampler(broken.Untempered), "temperature in logprobs", "from those at temperature 1 by"),
    (with_sampler(broken.NeverStops), "stop tokens", "with stop="),
    (with_sampler(broken.SwallowsTheStop), "stop tokens", "with stop="),
    (with_sampler(broken.NeverStops), "stop strings", "with stop="),
    (with_sampler(broken.SwallowsTheStop), "stop strings", "with stop="),
]


@pytest.mark.parametrize(
    ("trainer_class", "name", "complaint"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
async def test_a_probe_catches_its_broken_engine(service, model, trainer_class, name, complaint):
    if name in UNHEARD:
        pytest.skip("this SDK has no place for them")
    finding = await put(name, PROBES[name], bench(service, model, trainer_class))
    assert finding.answer == "wrong"
    assert complaint in finding.detail


BROKEN_SERVICES = [
    (broken.ForgetsTheOptimiser, "checkpoints", "optimiser's state is not restored"),
    (broken.ForgetsTheWeights, "checkpoints", "restored weights differ"),
    (broken.OneSetOfWeights, "two training clients", "a step of the first of two clients"),
    (broken.OneFrozenCopy, "two training clients", "a step behind the first client's"),
]


@pytest.mark.parametrize(("service_class", "name", "complaint"), BROKEN_SERVICES)
async def test_a_probe_catches_its_broken_service(service, model, service_class, name, complaint):
    unsound = service_class(service)
    unsound.model = model
    finding = await put(name, PROBES[name], bench(unsound, model))
    assert finding.answer == "wrong"
    assert complaint in finding.detail


def test_every_probe_has_a_broken_engine():
    assert {name for _, name, _ in [*BROKEN, *BROKEN_SERVICES]} == set(PROBES)


async def test_samples_that_are_all_the_same_are_caught(service, model):
    finding = await put("seeds", PROBES["seeds"], bench(service, model, with_sampler(broken.Parrot)))
    assert finding.answer == "wrong"


async def test_what_an_engine_refuses_or_never_answers_is_a_no(service, model):
    refused = await put("value of ppo", PROBES["value of ppo"], bench(service, model, broken.Refuses))
    assert (refused.answer, refused.detail) == ("no", "ValueError: unknown loss ppo")
    silent = await put(
        "value of ppo", PROBES["value of ppo"], bench(service, model, broken.Hangs), timeout_s=0.05
    )
    assert (silent.answer, silent.detail) == ("no", "no answer within 0.05 s")


async def test_a_loss_of_ones_own_that_fails_bars_no_other_question(service, model):
    findings = [finding async for finding in examine(bench(service, model, broken.OwnLossesPoison))]
    answers = {finding.name: finding.answer for finding in findings}
    barred_ones = [name for name, answer in answers.items() if answer != "yes"]
    assert barred_ones == [*UNHEARD, "losses of one's own"]


async def test_an_error_of_an_engine_is_told_without_the_key(service, model, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-abcdefgh")

    async def ask(bench):
        raise ConnectionError("http://me:hunter22@s does not know tml-abcdefgh")

    finding = await put("odd", ask, bench(service, model))
    assert finding.detail == "ConnectionError: http://***@s does not know ***"


async def test_a_judge_that_asks_once_per_label_needs_only_the_end_of_a_prompt(service, model):
    engine = bench(service, model, with_sampler(broken.NoFirstPlace))
    found = [await put(name, PROBES[name], engine) for name in ("prompt logprobs", "last logprob of prompts")]
    assert [finding.answer for finding in found] == ["wrong", "yes"]
    judge = FEATURES["judge_mode=logprob, reward=rubric"]
    assert barred(judge, found) == []


async def test_snapshots_are_recognised_where_the_prompts_first_place_is_missing(service, model):
    finding = await put(
        "old samplers stay",
        PROBES["old samplers stay"],
        bench(service, model, with_sampler(broken.NoFirstPlace)),
    )
    assert finding.answer == "yes"


async def test_losses_told_for_every_token_are_as_good_as_their_sum(service, model):
    finding = await put(
        "value of dro", PROBES["value of dro"], bench(service, model, broken.TellsLossesOfTokens)
    )
    assert finding.answer == "yes"


async def test_a_bug_of_the_probe_itself_is_not_blamed_on_the_engine(service, model):
    async def ask(bench):
        raise AssertionError("mine")

    with pytest.raises(AssertionError, match="mine"):
        await put("odd", ask, bench(service, model))


async def test_a_run_is_refused_with_every_reason(service, model):
    client = broken.IgnoresTheLoss(service.create_lora_training_client(model, rank=4, seed=0))
    client.sampler_class = broken.SilentSampler
    with pytest.raises(ValueError, match=r"(?s)value of ppo: wrong: .*samples: wrong: samples come without"):
        await check_engine(service, client, loss_fn="ppo")
    with pytest.raises(ValueError, match=r"loss_fn must be one of cross_entropy.*got 'gspo'"):
        await check_engine(service, client, loss_fn="gspo")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_temperature_is_asked_about_where_it_matters(service, model, temperature):
    client = with_sampler(broken.Untempered)(service.create_lora_training_client(model, rank=4, seed=0))
    # differences of a random model's logprobs are large, so that the tolerance for bfloat16 suffices
    asked = check_engine(service, client, loss_fn="importance_sampling", temperature=temperature)
    if temperature == 1.0:
        await asked
    else:
        with pytest.raises(ValueError, match="temperature in logprobs: wrong"):
            await asked


@pytest.mark.parametrize("scores_prompts", [False, True])
async def test_prompts_are_asked_about_where_a_reference_scores_them(service, model, scores_prompts):
    client = with_sampler(broken.ShiftedPrompts)(service.create_lora_training_client(model, rank=4, seed=0))
    asked = check_engine(service, client, loss_fn="importance_sampling", scores_prompts=scores_prompts)
    if scores_prompts:
        with pytest.raises(ValueError, match="last logprob of prompts: wrong"):
            await asked
    else:
        await asked


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
async def test_a_trainer_that_divides_its_logits_is_sound_and_one_that_only_should_is_refused(
    service, model, loss_fn
):
    client = service.create_lora_training_client(model, rank=4, seed=0)
    asked = {"loss_fn": loss_fn, "loss_fn_config": {"temperature": 0.7}, "temperature": 0.7}
    await check_engine(service, client, **asked)
    with pytest.raises(
        ValueError, match=r"does as if loss_fn_config had no temperature: .* at temperature 0.7: off"
    ):
        await check_engine(service, broken.IgnoresTheConfig(client), **asked)


async def test_the_check_of_a_run_changes_nothing(service, model):
    client = service.create_lora_training_client(model, rank=4, seed=0)
    sound = bench(service, model)
    sound.client = client
    before = await sound.score(sound.tokens)
    await check_engine(
        service, client, loss_fn="ppo", loss_fn_config={"clip_high_threshold": 1.5}, temperature=0.7
    )
    assert [values.tolist() for values in await sound.score(sound.tokens)] == [before[0].tolist()]
    with pytest.raises(RuntimeError, match="gradient"):
        await sound.optim_step()


def test_features_need_probes_that_exist_and_one_of_each_choice():
    needed = {name for needs in FEATURES.values() for names in needs for name in names}
    assert needed <= set(PROBES)
    judge = FEATURES["judge_mode=logprob, reward=rubric"]
    found = [
        Finding(name="top-k of samples", answer="no", detail=""),
        Finding(name="top-k of prompts", answer="yes", detail=""),
    ]
    assert barred(judge, found) == []
    assert barred(judge, found[:1]) == [
        "top-k of samples: no or top-k of prompts: not asked or last logprob of prompts: not asked"
    ]


async def test_every_probe_is_put_once_and_in_order(service, model):
    first = dict(list(PROBES.items())[:3])
    findings = [finding async for finding in examine(bench(service, model), first)]
    assert [finding.name for finding in findings] == list(first)
