"""What was sampled is not sampled again, and what is damaged is."""

import asyncio
import json
import math
from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest
import tinker
from bandit_engine import BanditSampler, Done
from bandit_runs import make_run, metrics_of
from hypothesis import given
from hypothesis import strategies as st

from viva.run.journal import Journal, call_key, decode_answer, encode_answer, make_line, read_line
from viva.sdk import make_response, make_sequence, make_topk
from viva.training.loop import train

OPTIONS = {"eval_every": 0, "save_every": 3, "num_steps": 6}


class Killed(BaseException):
    """Ends a run at once."""


class Watched(BanditSampler):
    """Notes every call by policy, prompt and seed, and ends the run at one of them."""

    def __init__(self, logits, version, calls, strike, together):
        super().__init__(logits)
        self.version, self.calls, self.strike = version, calls, strike
        self.answers_together = together

    def sample(self, prompt, num_samples, sampling_params):
        if len(self.calls) == self.strike:
            raise Killed
        self.calls.append((self.version, *prompt.to_ints(), sampling_params.seed))
        return super().sample(prompt, num_samples, sampling_params)


def watched(folder, *, strike=None, together=False, **options):
    run, calls = make_run(folder, **{**OPTIONS, **options}), []
    client = run.client
    client.save_weights_and_get_sampling_client = lambda: Done(
        Watched(client.logits, client.steps, calls, strike, together)
    )
    return run, calls


def texts(folder):
    return [(folder / name).read_text() for name in ("transcripts.jsonl", "tokens.jsonl")]


async def whole_run(folder, **options):
    run, calls = watched(folder, **options)
    assert await train(run)
    assert not (folder / "journal").exists()
    return Counter(calls)


async def killed_run(folder, strike, **options):
    run, calls = watched(folder, strike=strike, **options)
    with pytest.raises(Killed):
        await train(run)
    return Counter(calls)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("strike", range(1, 72, 7))
async def test_no_turn_is_sampled_twice(tmp_path, strike, staleness):
    options = {"max_staleness": staleness, "eval_every": 2 if staleness == 0 else 0}
    wanted = await whole_run(tmp_path / "whole", **options)
    before = await killed_run(tmp_path / "killed", strike, **options)
    run, calls = watched(tmp_path / "killed", **options)
    assert await train(run)
    assert before + Counter(calls) == wanted
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")
    assert texts(tmp_path / "killed") == texts(tmp_path / "whole")


async def test_an_engine_that_answers_together_is_asked_for_a_broken_step_again(tmp_path):
    wanted = await whole_run(tmp_path / "whole", together=True)
    before = await killed_run(
        tmp_path / "killed", 12 * 4 + 5, together=True
    )  # in the second step after a checkpoint
    assert [path.name for path in (tmp_path / "killed" / "journal").iterdir()] == ["000003.jsonl"]
    run, calls = watched(tmp_path / "killed", together=True)
    assert await train(run)
    again = before + Counter(calls) - wanted
    assert set(again.values()) == {1}
    assert {version for version, *_ in again} == {4}
    assert sum(again.values()) == 5
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")


async def test_other_versions_do_not_take_such_a_step(tmp_path, monkeypatch):
    await killed_run(tmp_path, 20, together=True)
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["000000.jsonl"]
    run, calls = watched(tmp_path, together=True)
    run.folder.journal._environment = lambda: {"torch": "another"}
    assert await train(run)
    assert len(calls) == 72


async def test_such_an_engine_has_no_journal_while_it_trains_at_the_same_time(tmp_path):
    wanted = await whole_run(tmp_path / "whole", together=True, max_staleness=1)
    await killed_run(tmp_path / "killed", 60, together=True, max_staleness=1)
    run, calls = watched(tmp_path / "killed", together=True, max_staleness=1)
    assert await train(run)
    assert Counter(calls) == Counter({call: 1 for call in wanted if call[0] >= 3})
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("damage", ["torn", "flipped", "gone"])
async def test_a_damaged_journal_costs_calls_and_changes_nothing(tmp_path, together, place, damage):
    await whole_run(tmp_path / "whole", together=together)
    await killed_run(tmp_path / "killed", 20, together=together)
    path = tmp_path / "killed" / "journal" / "000000.jsonl"
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    if damage == "flipped":
        content[at] ^= 1
    path.write_bytes(content[:at] if damage == "torn" else content)
    if damage == "gone":
        path.unlink()
    run, calls = watched(tmp_path / "killed", together=together)
    assert await train(run)
    assert len([call for call in calls if call[0] == 0]) in (
        [12] if together or damage == "gone" else range(1, 12)
    )
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")
    assert texts(tmp_path / "killed") == texts(tmp_path / "whole")


async def test_a_journal_that_cannot_be_written_ends_the_run_and_is_named(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    run, _ = watched(tmp_path)
    monkeypatch.setattr("viva.run.journal.os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*000000\.jsonl"):
        await train(run)


async def test_what_is_answered_together_is_written_together(tmp_path, monkeypatch):
    syncs = []
    monkeypatch.setattr("viva.run.journal.os.fsync", syncs.append)
    journal = Journal(tmp_path, environment=dict)
    sampler = journal.client(BanditSampler(np.zeros(8)), 0)
    params = [tinker.SamplingParams(max_tokens=4, seed=seed) for seed in range(50)]
    async with journal.part("000000", "turns", is_last=True, report=pytest.fail):
        await asyncio.gather(*(ask(sampler, each) for each in params))
    assert len((tmp_path / "000000.jsonl").read_text().splitlines()) == 50
    assert len(syncs) <= 3


async def ask(sampler, params, prompt=(1, 2)):
    return await sampler.sample(tinker.ModelInput.from_ints(list(prompt)), 1, params)


async def test_equal_calls_have_answers_of_their_own(tmp_path):
    class Counting(BanditSampler):
        count = 0

        def sample(self, prompt, num_samples, sampling_params):
            self.count += 1
            sequence = make_sequence(
                stop_reason="stop", sequence_id="", tokens=[self.count], logprobs=[-1.0], topk=None
            )
            return Done(make_response([sequence], {}))

    params, engine, told = tinker.SamplingParams(max_tokens=1), Counting(np.zeros(8)), []
    for _ in range(2):
        journal = Journal(tmp_path, environment=dict)
        sampler = journal.client(engine, 0)
        async with journal.part("000000", "turns", is_last=True, report=told.append):
            tokens = [(await ask(sampler, params)).sequences[0].tokens for _ in range(3)]
        assert tokens == [[1], [2], [3]]
        assert sampler.count == 3
    assert told == ["3 answers are taken from the journal: they were sampled before"]


async def test_an_answer_that_another_thread_waits_for_is_kept_too(tmp_path):
    class Blocking(BanditSampler):
        def sample(self, prompt, num_samples, sampling_params):
            answer = Future()
            answer.set_result(super().sample(prompt, num_samples, sampling_params).value)
            return answer

    params, prompt, told = tinker.SamplingParams(max_tokens=4, seed=1), tinker.ModelInput.from_ints([1]), []
    answers = []
    for _ in range(2):
        journal = Journal(tmp_path, environment=dict)
        sampler = journal.client(Blocking(np.zeros(8)), 0)
        async with journal.part("000000", "turns", is_last=True, report=told.append):
            answers.append(
                await asyncio.to_thread(lambda ask: ask(prompt, 1, params).result(), sampler.sample)
            )
    assert answers[0].sequences[0].tokens == answers[1].sequences[0].tokens
    assert told == ["1 answers are taken from the journal: they were sampled before"]


@pytest.mark.parametrize(("tokens", "logprobs"), [([], []), ([1, 2], [-1.0, math.nan]), ([1], [-math.inf])])
async def test_an_answer_that_nobody_can_use_is_asked_for_again(tmp_path, tokens, logprobs):
    class Broken(BanditSampler):
        def sample(self, prompt, num_samples, sampling_params):
            reply = {"stop_reason": "stop", "sequence_id": "", "topk": None}
            good = make_sequence(tokens=[1], logprobs=[-1.0], **reply)
            return Done(make_response([good, make_sequence(tokens=tokens, logprobs=logprobs, **reply)], {}))

    params, told = tinker.SamplingParams(max_tokens=2, seed=1), []
    for engine in (Broken(np.zeros(8)), BanditSampler(np.zeros(8)), Broken(np.zeros(8))):
        journal = Journal(tmp_path, environment=dict)
        async with journal.part("000000", "turns", is_last=True, report=told.append):
            answer = await ask(journal.client(engine, 0), params)
    assert len(answer.sequences) == 1  # that of the mended engine
    assert told == ["1 answers are taken from the journal: they were sampled before"]


async def test_a_prompts_first_logprob_is_no_number_and_its_answer_is_kept(tmp_path):
    class Scoring(BanditSampler):
        def sample(self, prompt, num_samples, sampling_params):
            answer = super().sample(prompt, num_samples, sampling_params).value
            return Done(make_response(answer.sequences, {"prompt_logprobs_np": np.array([np.nan, -0.5])}))

    params, told = tinker.SamplingParams(max_tokens=2, seed=1), []
    for _ in range(2):
        journal = Journal(tmp_path, environment=dict)
        async with journal.part("000000", "turns", is_last=True, report=told.append):
            await ask(journal.client(Scoring(np.zeros(8)), 0), params)
    assert told == ["1 answers are taken from the journal: they were sampled before"]


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), floats), max_size=8),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
def test_an_answer_comes_back_to_the_bit(pairs, k, has_prompt):
    tokens, logprobs = [token for token, _ in pairs], [logprob for _, logprob in pairs]
    topk = None if k is None else (np.arange(len(pairs) * k).reshape(-1, k), -np.random.rand(len(pairs), k))
    sequence = make_sequence(stop_reason="stop", sequence_id="a", tokens=tokens, logprobs=logprobs, topk=topk)
    prompt = {"prompt_logprobs_np": np.array([np.nan, -0.5], dtype=np.float32)} if has_prompt else {}
    if has_prompt and k is not None:
        prompt["topk_prompt_logprobs_np"] = make_topk(np.zeros((2, k)), np.full((2, k), -np.inf))
    response = make_response([sequence], prompt)
    body = read_line(make_line({"key": "k", "answer": encode_answer(response)}))
    again = decode_answer(body["answer"])
    assert repr(again) == repr(response)
    for name in ("tokens", "logprobs", "topk_logprobs", "stop_reason"):
        assert getattr(again.sequences[0], name, None) == getattr(sequence, name, None)
    assert again.prompt_logprobs == response.prompt_logprobs
    assert again.topk_prompt_logprobs == response.topk_prompt_logprobs


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_no_flipped_bit_goes_unseen(place, bit):
    line = bytearray(make_line({"key": "k", "answer": {"sequences": [], "x": 1.5}}))
    line[place % len(line)] ^= 1 << bit
    assert read_line(bytes(line)) is None


def test_other_calls_have_other_keys():
    prompt, params = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=4, seed=1)
    calls = [
        (0, {"prompt": prompt, "num_samples": 1, "sampling_params": params}),
        (1, {"prompt": prompt, "num_samples": 1, "sampling_params": params}),
        (0, {"prompt": tinker.ModelInput.from_ints([1, 2]), "num_samples": 1, "sampling_params": params}),
        (0, {"prompt": prompt, "num_samples": 2, "sampling_params": params}),
        (
            0,
            {
                "prompt": prompt,
                "num_samples": 1,
                "sampling_params": tinker.SamplingParams(max_tokens=4, seed=2),
            },
        ),
        (0, {"prompt": prompt, "num_samples": 1, "sampling_params": params, "include_prompt_logprobs": True}),
        ("initial", {"prompt": prompt, "num_samples": 1, "sampling_params": params}),
    ]
    assert len({call_key(*call) for call in calls}) == len(calls)
    assert call_key(0, {"prompt": prompt, "targets": np.zeros(3)}) is None
    assert json.loads(make_line({"a": 1}))["line"] == {"a": 1}
