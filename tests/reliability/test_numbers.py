"""What is sampled is what is trained, draws follow the exact distribution, and no number that is none is saved."""

import asyncio
import json
import math
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import tinker
import torch
from bandit_engine import BanditTrainer, CountDataset, CountEnv, CountGroup, Done
from random_models import make_model
from tiny_engine import ints, make_config, make_tokenizer, params

from viva.engine import EngineLimits, LocalServiceClient
from viva.recipes.common import exit_code
from viva.recipes.config import parse_options
from viva.recipes.conversation_preference_rl import Config
from viva.recipes.demo import demo_options
from viva.recipes.loop import run_recipe
from viva.run.folder import prepare_run_folder
from viva.training.loop import AllGroupsFailedError, LoopConfig, Training, train
from viva.training.sampling import Sampling
from viva.training.update import EXACT_GAP, SamplerGapError, UpdateConfig

NUM_STEPS = 6


@dataclass
class Fault:
    """What goes wrong in a step, by name, and with which number."""

    kind: str
    step: int
    value: float
    now: int = field(default=-1, init=False)

    def __call__(self, kind):
        return self.kind == kind and self.now == self.step


class FaultyTrainer(BanditTrainer):
    """An engine that gives one wrong number in one step."""

    def __init__(self, state_dir, fault):
        super().__init__(state_dir)
        self.fault = fault

    def save_weights_and_get_sampling_client(self):
        self.fault.now += 1
        sampler = super().save_weights_and_get_sampling_client().value
        if self.fault("sampled") or self.fault("gap"):
            sampler.sample = self._spoiled(sampler.sample)
        return Done(sampler)

    def _spoiled(self, sample):
        def spoiled(*args, **options):
            sequences = sample(*args, **options).value.sequences
            for sequence in sequences:
                logprobs = np.array(sequence.logprobs_np)
                logprobs[-1] = (
                    self.fault.value if self.fault.kind == "sampled" else logprobs[-1] + self.fault.value
                )
                object.__setattr__(sequence, "logprobs_np", logprobs)
            return Done(SimpleNamespace(sequences=sequences))

        return spoiled

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        output = super().forward_backward(data, loss_fn, loss_fn_config).value
        if self.fault("trained"):
            logprobs = output.loss_fn_outputs[-1]["logprobs"].to_numpy().copy()
            logprobs[-1] = self.fault.value
            output.loss_fn_outputs[-1]["logprobs"] = tinker.TensorData.from_numpy(logprobs)
        if self.fault("loss"):
            output.metrics["loss:sum"] = self.fault.value
        return Done(output)

    def optim_step(self, adam_params):
        response = super().optim_step(adam_params).value
        norm = self.fault.value if self.fault("gradient") else 1.0
        return Done(response.model_copy(update={"metrics": {"grad_norm": norm}}))


async def stopped_by(folder, fault, error, match):
    """A run that ought to be stopped by a fault; the step after which its newest checkpoint was saved."""

    class Env(CountEnv):
        async def step(self, action, *, extra=None):
            result = await super().step(action, extra=extra)
            if fault("reward"):
                result.reward = fault.value
            if fault("metric"):
                result.metrics["share"] = fault.value
            return result

    class Group(CountGroup):
        async def make_envs(self):
            return [Env(self.prompt) for _ in range(self.size)]

    run_folder = prepare_run_folder(folder, behavior="raise", config={}).open()
    training = Training(
        config=LoopConfig(
            sampling=Sampling(seed=1, max_tokens=8),
            save_every=1,
            eval_every=0,
            update=UpdateConfig(learning_rate=0.1, max_logprob_gap=EXACT_GAP),
        ),
        client=FaultyTrainer(run_folder.state_dir, fault),
        dataset=CountDataset(NUM_STEPS, group_class=Group),
        folder=run_folder,
        show_steps=False,
    )
    with pytest.raises(error, match=match) if error is not None else nullcontext():
        await train(training)
    newest = run_folder.checkpoints.latest()
    return 0 if newest is None else newest.next_step


FAULTS = [
    *(
        ("sampled", value, FloatingPointError, "nothing could be played")
        for value in (math.nan, math.inf, -math.inf)
    ),
    *(("trained", value, FloatingPointError, "not finite") for value in (math.nan, math.inf, -math.inf)),
    *(("loss", value, FloatingPointError, "loss:sum") for value in (math.nan, math.inf, -math.inf)),
    *(("gradient", value, FloatingPointError, "grad_norm") for value in (math.nan, math.inf)),
    *(
        ("reward", value, AllGroupsFailedError, "rewards must be finite")
        for value in (math.nan, math.inf, -math.inf)
    ),
    *(("metric", value, FloatingPointError, "metrics of step") for value in (math.nan, math.inf)),
    *(("gap", value, SamplerGapError, "sampler and trainer differ") for value in (2e-3, -2e-3, -3.0)),
]


async def test_what_is_no_number_stops_the_run_before_it_is_saved(tmp_path, trials, ledger):
    steps = range(0, NUM_STEPS, trials(short=4, full=1))
    for number, (kind, value, error, match) in enumerate(FAULTS):
        for step in steps:
            folder = tmp_path / f"{number}-{step}"
            saved = await stopped_by(folder, Fault(kind, step, value), error, match)
            assert saved == step, f"{kind} {value} in step {step}"
    ledger(
        "5 numbers",
        "NaN or infinity in a logprob, loss, gradient, reward or metric, or a gap between sampler and trainer, stops "
        "the run; the newest checkpoint is that of the step before",
        trials=len(FAULTS) * len(steps),
    )


async def test_a_gap_within_rounding_stops_nothing(tmp_path):
    assert await stopped_by(tmp_path, Fault("gap", 2, 5e-5), None, "") == NUM_STEPS


def tiny_model(folder, family="llama"):
    import transformers

    config = make_config(family)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def test_weights_that_are_no_numbers_are_not_saved(tmp_path):
    service = LocalServiceClient(device="cpu", state_dir=tmp_path / "state")
    client = service.create_lora_training_client(tiny_model(tmp_path / "model"), rank=2, seed=0)
    client.save_state("good").result()
    with torch.no_grad():
        next(iter(client._policy._parameters.values())).view(-1)[0] = math.nan
    for save in (client.save_state, client.save_weights_for_sampler):
        with pytest.raises(FloatingPointError, match="were not saved"):
            save("bad").result()
    assert [path.name for path in (tmp_path / "state").glob("*/*/*")] == ["good"]


def test_sampler_and_trainer_agree_at_every_step(tmp_path, trials, ledger, capsys):
    """The guard is on in the recipe; the gap of every step is under it."""
    num_steps = trials(short=3, full=60)
    options = demo_options("conversation_preference_rl", tmp_path) | {
        "batch_size": "6",
        "max_steps": str(num_steps),
        "eval_every": "0",
    }
    if num_steps == 3:
        options |= {"max_rounds": "1", "num_test_conversations": "0"}
    config = parse_options(Config, [f"{name}={value}" for name, value in options.items()])
    assert asyncio.run(exit_code(run_recipe(config))) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["optim/logprob_gap_max"] for row in rows if row.get("optim/steps")]
    assert len(gaps) >= 0.6 * num_steps  # the others have equal rewards: nothing to train on
    assert max(gaps) < EXACT_GAP
    ledger(
        "5 numbers",
        "sampler and trainer agree to 1e-4 at every step of a run in float32",
        trials=len(gaps),
        seed=0,
        figures=f"largest gap {max(gaps):.1e}",
    )


def test_the_recipe_stops_where_they_do_not(tmp_path, monkeypatch, capsys):
    from viva.engine.decoder import Decoder

    draw = Decoder._draw

    def shifted(self, rows, hidden):
        finite = draw(self, rows, hidden)
        for row in rows:
            row.logprobs[-1] -= 3e-4
        return finite

    monkeypatch.setattr(Decoder, "_draw", shifted)
    options = demo_options("conversation_preference_rl", tmp_path) | {
        "batch_size": "6",
        "max_steps": "2",
        "eval_every": "0",
        "save_every": "1",
    }
    options |= {"model_name": str(make_model(tmp_path / "model", "qwen3")), "max_tokens": "16"}
    options |= {"tournament_pattern": "all_pairs_one_way"}
    config = parse_options(Config, [f"{name}={value}" for name, value in options.items()])
    assert asyncio.run(exit_code(run_recipe(config))) == 1
    assert "error: sampler and trainer differ by 3.0" in capsys.readouterr().err
    trained = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not any(row["optim/steps"] for row in trained)
    assert len(list((tmp_path / "run" / "state").glob("weights/*"))) == len(trained)


RULES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8},
    {"top_p": 0.8},
    {"top_k": 6},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 40},
]


def exact_probabilities(logits, *, temperature=1.0, top_p=1.0, top_k=-1):
    """By the definition, token by token in order of likelihood."""
    chances = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(chances)), key=lambda token: (-chances[token], token))
    order = order[:top_k] if top_k > 0 else order
    total, mass, kept = math.fsum(chances[token] for token in order), 0.0, np.zeros(len(chances))
    for token in order:
        if mass >= top_p:
            break
        kept[token] = chances[token]
        mass += chances[token] / total
    return kept / kept.sum()


def chi_square_p(counts, chances):
    """Chance of a worse fit; rare tokens are counted together. Wilson and Hilferty's approximation."""
    num = counts.sum()
    common = chances * num >= 10
    observed = np.append(counts[common], counts[~common].sum()).astype(float)
    expected = np.append(chances[common], chances[~common].sum()) * num
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, degrees = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    spread = 2 / (9 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


def draws(tmp_path, num_samples, spoil=None):
    """Counts and exact probabilities of the next token under every rule, through the sampling client."""
    folder = tiny_model(tmp_path / "model")
    service = LocalServiceClient(device="cpu", seed=3)
    sampler = service.create_sampling_client(base_model=folder)
    prompt = [5, 80, 17, 200, 33]
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].numpy()
    for number, rule in enumerate(RULES):
        counts = np.zeros(len(logits), dtype=np.int64)
        left = num_samples // len(RULES)
        while left:
            share = min(left, 20_000)
            settings = params(max_tokens=1, seed=1000 * number + left, **(rule | (spoil or {})))
            response = sampler.sample(ints(prompt), share, settings).result()
            np.add.at(counts, [sequence.tokens[0] for sequence in response.sequences], 1)
            left -= share
        yield counts, exact_probabilities(logits, **rule)


def test_tokens_are_drawn_from_the_exact_distribution(tmp_path, trials, ledger):
    num_samples = trials(short=20_000, full=1_000_000)
    chances = []
    for counts, exact in draws(tmp_path, num_samples):
        assert not counts[exact == 0].any(), "a token that was cut off was drawn"
        chances.append(chi_square_p(counts, exact))
    assert min(chances) > 1e-3
    ledger(
        "5 numbers",
        "draws follow the exact softmax: plain, tempered, top-p, top-k, all at once",
        trials=num_samples // len(RULES) * len(RULES),
        seed=3,
        figures="chi-square p " + ", ".join(f"{chance:.2f}" for chance in chances),
    )


def test_a_distribution_that_is_a_little_off_would_be_seen(tmp_path):
    found = [chi_square_p(counts, exact) for counts, exact in draws(tmp_path, 24_000, {"temperature": 0.9})]
    assert min(found) < 1e-6


def requests_of(rng, count):
    """Prompts that share beginnings, with settings of all kinds."""
    stems = [[rng.randrange(256) for _ in range(rng.choice([3, 20, 40, 70]))] for _ in range(4)]
    found = []
    for number in range(count):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(256) for _ in range(rng.randint(0, 12))]
        rule = rng.choice([*RULES, {"temperature": 0.0}])
        found.append((prompt, rng.randint(1, 3), {"max_tokens": rng.randint(1, 10), "seed": number, **rule}))
    return found


def sampled(service, folder, requests, rng=None):
    """Tokens of requests, all submitted before the first is waited for; with ``rng``, some while others run."""
    sampler = service.create_sampling_client(base_model=folder)
    futures = []
    for prompt, num_samples, settings in requests:
        futures.append(sampler.sample(ints(prompt), num_samples, params(**settings)))
        for _ in range(rng.choice([0, 0, 1, 4]) if rng is not None else 0):
            service._core.pump.run_unit()
    return [[list(sequence.tokens) for sequence in future.result().sequences] for future in futures]


def test_a_sample_is_the_same_alone_and_in_any_batch(tmp_path, trials, ledger):
    count = trials(short=5, full=500)
    rng = random.Random(11)
    folder = tiny_model(tmp_path / "model")
    requests = requests_of(rng, trials(short=16, full=60))
    alone = [sampled(LocalServiceClient(device="cpu"), folder, [request])[0] for request in requests]
    for _ in range(count):
        rows = rng.choice([1, 2, 5, 16, 256])
        limits = EngineLimits(decode_rows=rows, prefill_tokens=rng.choice([1, 64, 4096]))
        chosen = rng.sample(range(len(requests)), rng.randint(2, 16))
        found = sampled(
            LocalServiceClient(device="cpu", limits=limits),
            folder,
            [requests[place] for place in chosen],
            rng,
        )
        assert found == [alone[place] for place in chosen]
    ledger(
        "5 numbers",
        "the same seed gives the same tokens alone and in any batch, with other limits, amid others' decoding",
        trials=count,
        seed=11,
    )
