import asyncio
import json
from types import SimpleNamespace

import pytest
import tinker
from bandit_engine import BanditSampler, Done
from tinker_cookbook import hyperparam_utils

from viva.training.data import derive_seed
from viva.training.sampling import PromptTooLongError, Sampling, SeatSampler, SeededCompleter
from viva.training.service import NARROW_RATE, EngineConfig, context_window, default_learning_rate

PROMPT = tinker.ModelInput.from_ints([1, 2, 3])


class Recorder(BanditSampler):
    def __init__(self):
        super().__init__(__import__("numpy").zeros(8))
        self.params = []

    def sample(self, prompt, num_samples, sampling_params):
        self.params.append(sampling_params)
        return super().sample(prompt, num_samples, sampling_params)


async def test_every_call_draws_with_its_own_seed_and_the_same_ones_again():
    first, second = Recorder(), Recorder()
    for sampler in (first, second):
        completer = SeededCompleter(sampler=sampler, sampling=Sampling(seed=7, max_tokens=9))
        for _ in range(3):
            await completer(PROMPT, [0])
    assert [params.seed for params in first.params] == [derive_seed(7, call) for call in range(3)]
    assert first.params == second.params


def test_seats_groups_and_attempts_have_streams_of_their_own():
    policy = SeatSampler(sampler=Recorder(), sampling=Sampling(seed=3, max_tokens=9, temperature=0.5))
    places = [(group, attempt, seat) for group in range(3) for attempt in range(2) for seat in range(3)]
    completers = [policy.seat(group=group, attempt=attempt, seat=seat) for group, attempt, seat in places]
    assert len({completer.sampling.seed for completer in completers}) == len(places)
    assert {completer.sampling.temperature for completer in completers} == {0.5}


@pytest.mark.parametrize(
    ("window", "given", "expected"), [(None, None, 9), (10, None, 7), (100, 4, 4), (100, 50, 9)]
)
async def test_a_reply_is_no_longer_than_any_limit(window, given, expected):
    sampler = Recorder()
    completer = SeededCompleter(
        sampler=sampler, sampling=Sampling(seed=0, max_tokens=9, context_window=window)
    )
    await completer(PROMPT, [0], max_tokens=given)
    assert sampler.params[0].max_tokens == expected


async def test_a_prompt_that_fills_the_window_is_an_error_that_says_what_to_do():
    completer = SeededCompleter(sampler=Recorder(), sampling=Sampling(seed=0, max_tokens=9, context_window=3))
    with pytest.raises(PromptTooLongError, match=r"3 tokens leaves no room .* holds 3\. Use fewer rounds"):
        await completer(PROMPT, [0])


async def test_a_call_that_takes_too_long_times_out():
    class Slow(Recorder):
        def sample(self, prompt, num_samples, sampling_params):
            return asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        await SeededCompleter(sampler=Slow(), sampling=Sampling(seed=0, max_tokens=9, timeout_s=0.01))(
            PROMPT, [0]
        )


async def test_a_sampler_without_logprobs_is_refused():
    class Silent(Recorder):
        def sample(self, prompt, num_samples, sampling_params):
            sequence = SimpleNamespace(stop_reason="stop", tokens=[1], logprobs=None)
            return Done(type("Response", (), {"sequences": [sequence]}))

    with pytest.raises(ValueError, match="returned no logprobs"):
        await SeededCompleter(sampler=Silent(), sampling=Sampling(seed=0, max_tokens=9))(PROMPT, [0])


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"])
def test_known_models_get_the_cookbooks_rate(model):
    assert default_learning_rate(model) == hyperparam_utils.get_lr(model)
    assert default_learning_rate(model, is_lora=False) == hyperparam_utils.get_lr(model, is_lora=False)


def test_a_local_model_gets_the_same_rule_on_its_width(tmp_path):
    def rate(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return default_learning_rate(str(tmp_path))

    assert rate(model_type="llama", hidden_size=4096) == pytest.approx(
        hyperparam_utils.get_lr("meta-llama/Llama-3.1-8B")
    )
    assert rate(model_type="qwen3", hidden_size=4096) == pytest.approx(
        hyperparam_utils.get_lr("Qwen/Qwen3-8B")
    )
    assert rate(text_config={"hidden_size": 2000}) == 5e-4
    assert rate(model_type="llama", hidden_size=1999) == rate(hidden_size=32) == NARROW_RATE
    assert default_learning_rate(str(tmp_path), is_lora=False) == NARROW_RATE / 10
    with pytest.raises(ValueError, match="has no hidden_size"):
        rate(model_type="x")


def test_an_unknown_model_without_a_rate_is_an_error_and_asks_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for model in ("someone/Qwen-unknown", "openai/gpt-oss-20b", "not a name"):
        with pytest.raises(ValueError, match=f"no learning rate is known for {model}; pass learning_rate"):
            default_learning_rate(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "cloud"}, "engine must be local or remote; got 'cloud'"),
        ({"base_url": "http://x"}, "needs engine=remote"),
        ({"precision": "float16"}, "precision must be float32, fast or bfloat16; got 'float16'"),
    ],
)
def test_engine_choices_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of the hub, and a function that puts a model's configuration into it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    def load(name, **config):
        folder = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
        (folder / "snapshots" / ("0" * 40) / "config.json").write_text(json.dumps(config))

    return load


def test_what_was_loaded_from_the_hub_tells_its_context_window_and_rate(hub_cache):
    assert context_window("someone/model") is None
    hub_cache("someone/model", max_position_embeddings=2048, hidden_size=2000)
    assert context_window("someone/model") == 2048
    assert default_learning_rate("someone/model") == 5e-4


@pytest.mark.usefixtures("hub_cache")
def test_the_hub_is_asked_for_the_configuration_only_where_that_is_allowed(tmp_path, monkeypatch):
    asked = []

    def download(name, file, *, revision):
        assert revision is None
        asked.append((name, file))
        if name == "someone/missing":
            raise FileNotFoundError("no such model")
        (tmp_path / "config.json").write_text('{"hidden_size": 2000}')
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ValueError, match="no learning rate is known"):
        default_learning_rate("someone/model")
    assert asked == []
    assert default_learning_rate("someone/model", may_fetch=True) == 5e-4
    with pytest.raises(ValueError, match="no learning rate is known for someone/missing"):
        default_learning_rate("someone/missing", may_fetch=True)
    assert asked == [("someone/model", "config.json"), ("someone/missing", "config.json")]


@pytest.mark.usefixtures("hub_cache")
def test_the_context_window_is_read_from_a_local_model(tmp_path):
    assert context_window("Qwen/Qwen3-8B") is None
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 640}')
    assert context_window(str(tmp_path)) == 640
    (tmp_path / "config.json").write_text("{}")
    assert context_window(str(tmp_path)) is None
