"""A judge behind an endpoint, against a server on this machine that limits, fails, lies and is asked nothing twice."""

import asyncio
import json
import math
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from chat_server import Said, chat_server, completion, in_turn
from hypothesis import given
from hypothesis import strategies as st

from viva.judging.comparison import Outcome, TournamentPattern, judge_messages
from viva.judging.endpoint import (
    ChatEndpoint,
    EndpointError,
    EndpointOptions,
    EndpointStoppedError,
    EndpointUsage,
    TokenChoice,
)
from viva.judging.endpoint_judge import EndpointJudge, label_masses
from viva.judging.judge import JudgeOptions

MESSAGES = judge_messages("q", "one", "other", "judge")
KEY = "sk-very-secret-0123456789"


class Memory:
    """Kept answers in memory."""

    def __init__(self):
        self.kept = {}

    def get(self, key):
        return self.kept.get(key)

    def put(self, key, answer):
        self.kept[key] = json.loads(json.dumps(answer))


class Pauses:
    """Counts the seconds instead of waiting."""

    def __init__(self):
        self.seconds = []

    async def __call__(self, seconds):
        self.seconds.append(seconds)


def endpoint_of(server, kept=None, pause=None, **options):
    settings = EndpointOptions(url=server.url, model="m", **options)
    return ChatEndpoint(settings, kept, pause=pause or Pauses())


def verdict(label):
    return completion(json.dumps({"reasoning": "so it is", "preference": label}))


def judge_of(endpoint, mode="verdict", **options):
    return EndpointJudge(endpoint, JudgeOptions(mode=mode, **options))


async def compare(endpoint, mode="verdict", solutions=None):
    async with endpoint:
        return await judge_of(endpoint, mode).compare("q", solutions or {0: "one", 1: "other"}, 0, 1, seed=0)


VERDICTS = {
    "A": (Outcome.A, -1.0),
    "B": (Outcome.B, 1.0),
    "Tie": (Outcome.TIE, 0.0),
    "C": (Outcome.INVALID, None),
}


@pytest.mark.parametrize("label", list(VERDICTS))
async def test_a_written_verdict_is_read(label):
    with chat_server(in_turn(verdict(label))) as server:
        found = await compare(endpoint_of(server))
    assert (found.outcome, found.score) == VERDICTS[label]
    (request,) = server.requests
    assert (request["path"], request["model"], request["temperature"]) == ("/v1/chat/completions", "m", 0)
    assert [each["role"] for each in request["messages"]] == ["system", "user"]
    assert "> one" in found.prompt
    assert found.prompt == request["messages"][1]["content"]
    assert label in found.text


async def test_the_words_before_the_end_of_thinking_are_no_verdict():
    text = '<think>{"preference": "A"}</think>\n{"preference": "B"}'
    with chat_server(in_turn(completion(text))) as server:
        assert (await compare(endpoint_of(server))).outcome is Outcome.B


@pytest.mark.parametrize("end", ["stop", "length"])
async def test_its_own_answer_is_asked_for_once_and_kept_with_its_end(end):
    said, memory = completion("<think>2 + 2</think>It is 4."), Memory()
    said.body = said.body.replace(b'"stop"', f'"{end}"'.encode())
    question = {"role": "user", "content": "2 + 2?"}
    with chat_server(in_turn(said)) as server:
        for _ in range(2):
            async with endpoint_of(server, memory) as endpoint:
                own = await judge_of(endpoint, max_tokens=7).answer([question], seed=0)
            assert own == {"stop": "It is 4.", "length": ""}[end]
    (request,) = server.requests
    assert (request["messages"], request["max_tokens"]) == ([question], 7)


async def test_an_endpoint_that_answers_first_compares_behind_its_answer():
    with chat_server(
        in_turn(completion("<think>2 + 2</think>It is 4."), verdict("A"), verdict("B"))
    ) as server:
        async with endpoint_of(server) as endpoint:
            judge = judge_of(endpoint, answers_first=True)
            both = await judge.tournament(
                "2 + 2?", {0: "4", 1: "5"}, TournamentPattern.ALL_PAIRS_BOTH_WAYS, seed=0
            )
    asked, *compared = server.requests
    # both comparisons are in flight together, and either may arrive first
    assert sorted(each["messages"][-1]["content"] for each in compared) == sorted(
        each.prompt for each in both
    )
    assert all("Your own answer:\n> It is 4.\nEnd of your own answer.\n" in each.prompt for each in both)
    assert asked["messages"] == [{"role": "user", "content": "2 + 2?"}]


async def test_the_same_words_tie_and_nothing_is_asked():
    with chat_server(in_turn(verdict("A"))) as server:
        found = await compare(endpoint_of(server), solutions={0: "one two", 1: "one\ntwo"})
    assert (found.outcome, found.was_asked, server.requests) == (Outcome.TIE, False, [])


# busy and failing servers


async def test_a_busy_server_is_asked_again_after_the_pause_it_names():
    busy = Said(status=429, body=b'{"error": {"message": "slow down"}}', headers={"Retry_After": "7"})
    pauses = Pauses()
    with chat_server(in_turn(busy, Said(status=503), Said(status=500), verdict("B"))) as server:
        endpoint = endpoint_of(server, pause=pauses)
        assert (await compare(endpoint)).outcome is Outcome.B
    assert pauses.seconds == [7, 2, 4]  # then twice as long each time
    assert (len(server.requests), endpoint.usage.requests, endpoint.usage.failed) == (4, 4, 0)


async def test_a_retry_after_that_is_a_date_is_honoured():
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    pauses = Pauses()
    with chat_server(in_turn(Said(status=429, headers={"Retry_After": later}), verdict("B"))) as server:
        await compare(endpoint_of(server, pause=pauses))
    assert 20 < pauses.seconds[0] <= 30


@pytest.mark.parametrize(
    ("said", "reason", "num_requests"),
    [
        (Said(status=503, body=b"out of order"), "status 503: out of order; given up after 3 attempts", 3),
        (Said(status=429, headers={"Retry_After": "3600"}), "asks to wait 3600 s, which is too long", 1),
        (Said(status=400, body=b'{"error": {"message": "no such field"}}'), "status 400: no such field", 1),
        (Said(status=302, headers={"Location": "http://127.0.0.1:1/"}), "status 302", 1),
        (Said(body=b"<html>hello</html>"), "<html>hello</html>: no chat completion", 1),
        (Said(body=b"[1]"), "no chat completion", 1),
        (Said(body=b"[" * 100000), "no chat completion", 1),
        (Said(body=b"{}"), "no chat completion: {}", 1),
        (Said(body=b'{"choices": []}'), "no chat completion", 1),
        (Said(body=b'{"choices": [{"message": {"content": [1]}}]}'), "no chat completion", 1),
        (Said(body=b'{"choices": [{"message": "x"}]}'), "no chat completion", 1),
        (Said(body=b"x" * (9 * 2**20)), "more than 8388608 bytes", 1),
    ],
)
async def test_a_judge_that_fails_raises_its_reason_and_no_score_is_made_up(said, reason, num_requests):
    kept = Memory()
    with chat_server(in_turn(said)) as server:
        endpoint = endpoint_of(server, kept, retries=2)
        with pytest.raises(EndpointError) as error:
            await compare(endpoint)
    assert reason in str(error.value)
    assert len(server.requests) == num_requests
    assert (endpoint.usage.failed, kept.kept) == (1, {})


async def test_a_server_that_is_not_there_and_one_that_never_answers():
    endpoint = ChatEndpoint(
        EndpointOptions(url="http://127.0.0.1:9/v1", model="m", retries=1), pause=Pauses()
    )
    with pytest.raises(EndpointError, match="given up after 2 attempts"):
        await compare(endpoint)
    gate = threading.Barrier(2, timeout=5)
    with chat_server(in_turn(verdict("A")), gate=gate) as server:
        with pytest.raises(EndpointError, match=r"no answer within 0\.05 s"):
            await compare(endpoint_of(server, retries=0, timeout_s=0.05))
        gate.abort()


async def test_after_a_refusal_nobody_is_asked_any_more():
    with chat_server(in_turn(Said(status=401, body=b'{"error": "bad key"}'))) as server:
        endpoint = endpoint_of(server, concurrency=1)
        async with endpoint:
            judge = judge_of(endpoint)
            for solutions in ({0: "a", 1: "b"}, {0: "c", 1: "d"}):
                with pytest.raises(EndpointStoppedError, match="status 401: bad key"):
                    await judge.compare("q", solutions, 0, 1, seed=0)
    assert len(server.requests) == 1


# bounds


async def test_no_more_requests_at_once_than_allowed():
    with chat_server(in_turn(verdict("A"))) as server:
        endpoint = endpoint_of(server, concurrency=2)
        async with endpoint:
            solutions = {place: str(place) for place in range(5)}
            found = await judge_of(endpoint).tournament(
                "q", solutions, TournamentPattern.ALL_PAIRS_BOTH_WAYS, seed=0
            )
    assert len(found) == len(server.requests) == 20
    assert server.most_at_once <= 2


async def test_allowed_requests_do_run_at_once():
    gate = threading.Barrier(3, timeout=20)
    with chat_server(in_turn(verdict("A")), gate=gate) as server:
        endpoint = endpoint_of(server, concurrency=3)
        async with endpoint:
            judge = judge_of(endpoint)
            await asyncio.gather(*(judge.compare("q", {0: "a", 1: str(i)}, 0, 1, 0) for i in range(3)))
    assert server.most_at_once == 3


@pytest.mark.parametrize(
    ("budget", "noun"),
    [
        ({"max_requests": 3}, "3 requests"),
        ({"max_total_tokens": 330}, "330 tokens"),
        ({"max_price": 0.0006, "prices": (1.0, 10.0)}, "0.0006"),
    ],
)
async def test_a_budget_ends_the_asking_and_more_of_it_goes_on_where_it_ended(budget, noun):
    kept = Memory()

    async def ask(**options):
        endpoint = endpoint_of(server, kept, concurrency=1, **options)
        solutions = [{0: "a", 1: str(number)} for number in range(5)]
        async with endpoint:
            asked = (judge_of(endpoint).compare("q", each, 0, 1, 0) for each in solutions)
            found = await asyncio.gather(*asked, return_exceptions=True)
        failures = [str(each) for each in found if isinstance(each, EndpointStoppedError)]
        return failures, endpoint.usage

    with chat_server(in_turn(verdict("A"))) as server:
        failures, usage = await ask(**budget)
        assert all(f"budget of {noun} is spent" in reason for reason in failures)
        assert (len(failures), usage.requests, usage.total_tokens) == (2, 3, 330)
        failures, usage = await ask()
        assert (failures, usage.requests, usage.kept) == ([], 2, 3)
    assert len(server.requests) == 5
    assert usage.price((1.0, 10.0)) == pytest.approx((2 * 100 * 1.0 + 2 * 10 * 10.0) / 1e6)


async def test_what_was_used_before_counts_towards_the_budget():
    with chat_server(in_turn(verdict("A"))) as server:
        endpoint = ChatEndpoint(
            EndpointOptions(url=server.url, model="m", max_requests=4), usage=EndpointUsage(requests=3)
        )
        await compare(endpoint)
        with pytest.raises(EndpointStoppedError, match="budget of 4 requests is spent"):
            await compare(endpoint)
    assert len(server.requests) == 1


async def test_what_was_answered_is_not_asked_again_even_at_the_same_time():
    kept = Memory()
    with chat_server(in_turn(verdict("B"))) as server:
        for _ in range(2):
            endpoint = endpoint_of(server, kept)
            async with endpoint:
                judge = judge_of(endpoint)
                asked = (judge.compare("q", {0: "a", 1: "b"}, 0, 1, seed) for seed in range(4))
                found = await asyncio.gather(*asked)
            assert {each.outcome for each in found} == {Outcome.B}
    assert len(server.requests) == 1
    assert (endpoint.usage.requests, endpoint.usage.kept) == (0, 4)


async def test_another_model_prompt_or_address_is_another_question():
    kept = Memory()
    with chat_server(in_turn(verdict("B"))) as one, chat_server(in_turn(verdict("A"))) as other:
        for server, model, question in ((one, "m", "q"), (one, "n", "q"), (one, "m", "r"), (other, "m", "q")):
            endpoint = ChatEndpoint(EndpointOptions(url=server.url, model=model), kept)
            async with endpoint:
                await judge_of(endpoint).compare(question, {0: "a", 1: "b"}, 0, 1, 0)
    assert (len(one.requests), len(other.requests), len(kept.kept)) == (3, 1, 4)


async def test_tokens_that_are_not_told_are_counted_by_length():
    said = Said(body=json.dumps({"choices": [{"message": {"content": "x" * 40}}]}).encode())
    with chat_server(in_turn(said)) as server:
        endpoint = endpoint_of(server)
        await compare(endpoint)
    assert (endpoint.usage.unmetered, endpoint.usage.sampled_tokens) == (1, 10)
    assert endpoint.usage.prompt_tokens > 20


async def test_fields_laid_over_the_request():
    with chat_server(in_turn(verdict("A"))) as server:
        await compare(
            endpoint_of(server, body={"max_tokens": None, "max_completion_tokens": 7, "temperature": 1})
        )
    (request,) = server.requests
    assert "max_tokens" not in request
    assert (request["max_completion_tokens"], request["temperature"]) == (7, 1)


async def test_half_a_surrogate_pair_in_a_solution_is_sent_as_text():
    with chat_server(in_turn(verdict("A"))) as server:
        await compare(endpoint_of(server), solutions={0: "a\ud83d", 1: "b"})
    assert "> a\ufffd" in server.requests[0]["messages"][1]["content"]


# the key


async def test_the_key_stands_in_the_header_only(monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", KEY)
    kept = Memory()
    refused = Said(status=403, body=json.dumps({"error": {"message": f"bad key {KEY}"}}).encode())
    with chat_server(in_turn(verdict("A"), refused)) as server:
        endpoint = endpoint_of(server, kept, key_variable="MY_JUDGE_KEY")
        async with endpoint:
            await judge_of(endpoint).compare("q", {0: "a", 1: "b"}, 0, 1, 0)
            with pytest.raises(EndpointError) as error:
                await judge_of(endpoint).compare("q", {0: "c", 1: "d"}, 0, 1, 0)
    assert server.keys == [f"Bearer {KEY}"] * 2
    for text in (
        str(error.value),
        repr(endpoint.options),
        json.dumps(kept.kept),
        json.dumps(server.requests),
    ):
        assert KEY not in text


async def test_the_usual_key_is_not_sent_in_the_clear(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert EndpointOptions(url="https://host/v1", model="m").key() == KEY
    with chat_server(in_turn(verdict("A"))) as server:
        await compare(endpoint_of(server))
    assert server.keys == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "host/v1"}, "must be like https://host/v1"),
        ({"url": "ftp://host/v1"}, "must be like https://host/v1"),
        ({"url": "http://host:99999/v1"}, "must be like https://host/v1"),
        ({"url": "http://host/v1?key=x"}, "must be like https://host/v1"),
        ({"url": "http://me:pass@host/v1"}, "must not hold a user name or key"),
        ({"model": " "}, "needs the model's name"),
        ({"concurrency": 0}, "a concurrency of 1 or more"),
        ({"timeout_s": 0}, "a positive time-out"),
        ({"max_requests": 0}, "budget of requests must be 1 or more"),
        ({"prices": (1.0, -1.0)}, "prices must be two"),
        ({"prices": (1.0, math.nan)}, "prices must be two"),
        ({"max_price": -1.0, "prices": (1.0, 1.0)}, "budget of money must be above 0"),
        ({"max_price": 1.0}, "needs prices to count with"),
        ({"max_price": 1.0, "prices": (0.0, 0.0)}, "needs prices to count with"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(options, message):
    with pytest.raises(ValueError, match=message):
        EndpointOptions(**({"url": "http://127.0.0.1:1/v1", "model": "m"} | options))


@pytest.mark.parametrize(
    ("options", "name"),
    [({"url": "https://host/v1"}, "OPENAI_API_KEY"), ({"key_variable": "NO_KEY"}, "NO_KEY")],
)
def test_a_key_that_is_missing_is_told_where_it_is_needed(monkeypatch, options, name):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    endpoint = EndpointOptions(**({"url": "http://127.0.0.1:1/v1", "model": "m"} | options))
    with pytest.raises(ValueError, match=f"{name} is not set"):
        endpoint.key()


# probabilities


QUOTED = {' "A': -0.3, ' "B': -1.5, "A": -5.0}
LABELS = [
    ('{"', {}),
    ("preference", {}),
    ('":', {}),
    (' "', {}),
    ("B", {"B": math.log(0.6), "A": math.log(0.2), "T": math.log(0.1), "x": math.log(0.1)}),
    ('"}', {}),
]


async def test_the_labels_probabilities_are_read_where_the_verdict_stands():
    with chat_server(in_turn(completion('{"preference": "B"}', LABELS))) as server:
        found = await compare(endpoint_of(server), "logprob")
    assert found.outcome is Outcome.B
    assert found.probabilities == pytest.approx((0.2 / 0.9, 0.6 / 0.9, 0.1 / 0.9))
    assert found.score == pytest.approx(0.4 / 0.9)
    assert found.off_set_mass == pytest.approx(0.1)
    (request,) = server.requests
    assert (request["logprobs"], request["top_logprobs"]) == (True, 20)
    assert request["messages"][1]["content"] == found.prompt


async def test_kept_probabilities_are_read_as_they_were():
    kept = Memory()
    with chat_server(in_turn(completion('{"preference": "B"}', LABELS))) as server:
        first, second = [await compare(endpoint_of(server, kept), "logprob") for _ in range(2)]
    assert first == second
    assert first.probabilities == second.probabilities
    assert len(server.requests) == 1


async def test_without_log_probabilities_the_mode_is_refused_with_the_remedy():
    with (
        chat_server(in_turn(verdict("B"))) as server,
        pytest.raises(EndpointError, match="use judge_mode=verdict"),
    ):
        await compare(endpoint_of(server), "logprob")


@pytest.mark.parametrize(
    ("tokens", "masses"),
    [
        ([("A", {"A": -0.1, " A": -3.0, "b": -4.0})], (math.exp(-0.1) + math.exp(-3), math.exp(-4), 0.0)),
        ([('"preference": "', {}), ("Tie", {"Tie": -0.2, "B": -2.0})], (0.0, math.exp(-2), math.exp(-0.2))),
        (
            [('{"preference":', {}), (' "A', {' "A': -0.3, ' "B': -1.5, "A": -5.0})],
            (math.exp(-0.3), math.exp(-1.5), 0.0),
        ),
        ([('{"preference":', {})], (0.0, 0.0, 0.0)),
        ([("Answer", {"A": -1.0, "Answer": -0.5})], (math.exp(-1), 0.0, 0.0)),
        ([], (0.0, 0.0, 0.0)),
        ([("A", {"A": math.nan})], (0.0, 0.0, 0.0)),
    ],
)
def test_tokens_that_begin_a_label(tokens, masses):
    choices = [TokenChoice(text=text, alternatives=tuple(each.items())) for text, each in tokens]
    assert label_masses(choices) == pytest.approx(masses)


CHOICES = st.tuples(st.text(max_size=4), st.dictionaries(st.text(max_size=4), st.floats(max_value=0.0)))


@given(tokens=st.lists(CHOICES, max_size=6))
def test_no_tokens_break_the_reading(tokens):
    choices = [TokenChoice(text=text, alternatives=tuple(each.items())) for text, each in tokens]
    assert all(mass >= 0 for mass in label_masses(choices))
