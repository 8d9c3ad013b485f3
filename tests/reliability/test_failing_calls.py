"""Conversations whose calls fail in nine ways: complete, repeated whole, or dropped with a reason; nothing in between.

The agents and the judge are scripted; protocols, rollouts, judging, credit and data processing are the package's own.
"""

import asyncio
import dataclasses
import gc
import hashlib
import json
import math
import re
import threading
from collections import Counter

import jumping_clock
import pytest
import review_agents
from conversation_groups import round_robin_group
from failing_calls import WAYS, FailingSampler
from random_models import make_model

from viva.conversation.rendering import load_renderer
from viva.engine import LocalServiceClient
from viva.judging.comparison import VERDICT_PREFIX
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.testing import ScriptedSamplingClient, honest, tiny_renderer, turn_of
from viva.training import rollouts
from viva.training.batch import plain_batch
from viva.training.metrics import rollout_metrics
from viva.training.rollouts import run_groups
from viva.training.sampling import Sampling, SeatSampler

RENDERER = tiny_renderer()
TIMEOUT_S = 60.0
MAX_RETRIES = 2
SHARE = 0.05
NUM_ROUNDS = 2
REVIEWS = review_agents.honest({0: 1, 1: 3, 2: 2}, gain=10)


def said(prompt, call):
    """What an agent replies; it depends on the prompt alone, and names the agent."""
    if "\nYou are number " in prompt:
        return REVIEWS(review_agents.place_of(prompt, []))
    agent_id, round_index = turn_of(prompt)
    return honest(str((17, 91, 54)[agent_id] + round_index), reflection=f"I am {agent_id}.")


def preferred(prompt):
    """The judge's next token: the larger number wins."""
    if not prompt.endswith(VERDICT_PREFIX):
        return {}
    first, second = (
        int((re.search(r"\d+", text) or ["0"])[0])
        for text in re.findall(r"^Solution [AB]:\n>(.*)$", prompt, re.M)[-2:]
    )
    return {"T": 0.9} if first == second else {"A": 0.8, "B": 0.1} if first > second else {"B": 0.8, "A": 0.1}


class World:
    """Agents and a judge on samplers that fail, shared by all conversations as in a run."""

    def __init__(self, seed, *, share=SHARE, max_latency=0, latency_seed=0):
        agents = ScriptedSamplingClient(renderer=RENDERER, script=said, next_token=preferred)
        judges = ScriptedSamplingClient(renderer=RENDERER, next_token=preferred)
        self.scripted = (agents, judges)
        self.agents = FailingSampler(agents, share=share, seed=seed, max_latency=max_latency)
        self.judges = FailingSampler(judges, share=share, seed=seed + 1, max_latency=max_latency)
        self.agents.latency_seed = self.judges.latency_seed = latency_seed
        policy = PolicyRef(sampling_client=self.judges, timeout_s=TIMEOUT_S)
        self.judge = PolicySelfComparisonJudge(policy, RENDERER)

    def policy(self, seed):
        return SeatSampler(
            sampler=self.agents, sampling=Sampling(seed=seed, max_tokens=400, timeout_s=TIMEOUT_S)
        )

    def builders(self, number, first):
        """Conversations of both kinds in turn."""
        return [
            self._conversation(place) if place % 2 == 0 else self._review(place)
            for place in range(first, first + number)
        ]

    def _conversation(self, seed):
        return round_robin_group(
            question="Which number?",
            renderer=RENDERER,
            judge=self.judge,
            num_agents=3,
            max_rounds=NUM_ROUNDS,
            order="sequential" if seed % 4 else "simultaneous",
            seed=seed,
        )

    def _review(self, seed):
        return review_agents.builder_of(3, judge=self.judge, seed=seed, answer=None)

    def forget(self):
        for client in self.scripted:
            client.prompts.clear()
            client.seeds.clear()
        self.agents.forget()
        self.judges.forget()


async def played(world, number, seed, first=0):
    """A batch, and what is left running after it."""
    builders_P = world.builders(number, first)
    outcomes_P = await run_groups(builders_P, world.policy(seed), max_retries=MAX_RETRIES)
    assert [outcome.builder for outcome in outcomes_P] == builders_P
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left
    return outcomes_P


def training_data(outcomes_P):
    return plain_batch(outcomes_P).data_D


def digest_of(data_D):
    digest = hashlib.sha256()
    for datum in data_D:
        digest.update(repr(datum.model_input.to_ints()).encode())
        for name in sorted(datum.loss_fn_inputs):
            digest.update(name.encode() + datum.loss_fn_inputs[name].to_numpy().tobytes())
    return digest.hexdigest()


def check_complete(outcome):
    """All seats, in order, with all their turns, each by the agent whose seat it is; every number a number."""
    group = outcome.group
    assert not outcome.failed_seats
    record = outcome.builder.record()
    turns = [(turn["round_index"], turn["agent_id"], turn["lane"]) for turn in record["turns"]]
    assert len(set(turns)) == len(turns)
    assert not record["failures"]
    assert all(math.isfinite(reward) for reward in group.get_total_rewards())
    conversation = outcome.builder.protocol.name == "round_robin"
    seats = [(agent, lane) for agent in range(3) for lane in range(1 if conversation else 2)]
    assert len(group.trajectories_G) == len(seats)
    for (agent, lane), trajectory in zip(seats, group.trajectories_G, strict=True):
        own = [turn for turn in record["turns"] if (turn["agent_id"], turn["lane"]) == (agent, lane)]
        assert [turn["round_index"] for turn in own] == sorted(turn["round_index"] for turn in own)
        assert len(own) == len(trajectory.transitions)
        assert trajectory.transitions[-1].episode_done
        for turn, transition in zip(own, trajectory.transitions, strict=True):
            reply = RENDERER.tokenizer.decode(transition.ac.tokens).removesuffix("<|im_end|>")
            assert turn["text"].startswith(reply.strip()[:40])
            assert len(transition.ac.tokens) == len(transition.ac.maybe_logprobs) > 0
            assert all(math.isfinite(logprob) for logprob in transition.ac.maybe_logprobs)
    expected = {(round_index, agent, 0) for agent in range(3) for round_index in range(NUM_ROUNDS)}
    assert set(turns) == expected if conversation else len(turns) == 15


def check_batch(world, outcomes_P, num_asked_before):
    """What every conversation came to; counts that add up."""
    complete = [outcome for outcome in outcomes_P if outcome.group is not None]
    dropped = [outcome for outcome in outcomes_P if outcome.group is None]
    for outcome in complete:
        check_complete(outcome)
    for outcome in dropped:
        assert outcome.void_reason
        assert outcome.retries == MAX_RETRIES
    for outcome in outcomes_P:
        lost_attempts = outcome.retries + (outcome.group is None)
        assert {failure.attempt for failure in outcome.failures} == set(range(lost_attempts))
        json.dumps([dataclasses.asdict(failure) for failure in outcome.failures])
    metrics = rollout_metrics(outcomes_P)
    failures = [failure for outcome in outcomes_P for failure in outcome.failures]
    errors = {name: value for name, value in metrics.items() if name.startswith("rollout/errors/")}
    assert sum(errors.values()) == len(failures)
    assert metrics["rollout/groups"] == len(complete) + len(dropped) == len(outcomes_P)
    assert metrics["rollout/void"] == len(dropped)
    assert metrics["rollout/retries"] == sum(outcome.retries for outcome in outcomes_P)
    assert all(math.isfinite(value) for value in metrics.values())
    asked = sum((Counter(outcome.asked) for outcome in outcomes_P), Counter())
    assert asked.total() == world.agents.num_calls - num_asked_before
    lost = Counter(failure.place for failure in failures if failure.seat is not None)
    for agent in range(3):
        of_agent = sum(count for place, count in asked.items() if place[0] == agent)
        lost_by = sum(count for place, count in lost.items() if place[0] == agent)
        assert metrics[f"rollout/drop_rate/agent_{agent}"] == lost_by / of_agent
    return len(complete), len(dropped), lost, asked


def test_every_conversation_is_complete_repeated_or_dropped(trials, ledger):
    total = trials(short=200, full=10_000)
    size = 100
    world = World(seed=5)
    threads = threading.active_count()

    async def all_batches():
        counts, lost, asked, repeated = Counter(), Counter(), Counter(), 0
        for first in range(0, total, size):
            before = world.agents.num_calls
            outcomes_P = await played(world, size, seed=first, first=first)
            complete, dropped, lost_now, asked_now = check_batch(world, outcomes_P, before)
            counts += Counter(complete=complete, dropped=dropped)
            lost, asked = lost + lost_now, asked + asked_now
            repeated += sum(outcome.retries > 0 and outcome.group is not None for outcome in outcomes_P)
            world.forget()
        return counts, lost, asked, repeated

    counts, lost, asked, repeated = jumping_clock.run(all_batches())
    failed = world.agents.failed + world.judges.failed
    calls = world.agents.num_calls + world.judges.num_calls
    assert counts["complete"] + counts["dropped"] == total
    assert set(failed) == set(WAYS)
    assert failed.total() / calls == pytest.approx(SHARE, rel=0.15)
    assert threading.active_count() == threads
    shares = {
        name: [
            sum(lost[place] for place in asked if place[axis] == key)
            / sum(asked[place] for place in asked if place[axis] == key)
            for key in sorted({place[axis] for place in asked})
        ]
        for axis, name in enumerate(("agent", "round"))
    }
    ledger(
        "3 failing calls",
        "every conversation is complete, repeated whole or dropped with its reason; seats in order, counts exact",
        trials=total,
        seed=5,
        figures=f"{calls} calls, {failed.total()} failed in 9 ways; {repeated} conversations complete after a "
        f"repetition, {counts['dropped']} dropped; drop rate by agent "
        f"{', '.join(f'{share:.2%}' for share in shares['agent'])}, by round "
        f"{', '.join(f'{share:.2%}' for share in shares['round'])}",
    )


def test_the_training_batch_does_not_depend_on_who_answers_first(trials, ledger):
    number = trials(short=4, full=100)

    def batch(latency_seed):
        world = World(seed=23, max_latency=40, latency_seed=latency_seed)
        outcomes_P = jumping_clock.run(played(world, number, seed=1))
        order = [prompt[-80:] for prompt in world.scripted[0].prompts]
        return digest_of(training_data(outcomes_P)), [outcome.retries for outcome in outcomes_P], order

    found = [batch(latency_seed) for latency_seed in range(20)]
    digests = {digest for digest, _, _ in found}
    assert len(digests) == 1
    assert all(retries == found[0][1] for _, retries, _ in found)
    assert any(found[0][1])
    assert len({str(order) for _, _, order in found}) > 10
    ledger(
        "3 failing calls",
        "the training batch has one hash under 20 shuffles of latencies",
        trials=20 * number,
        seed=23,
    )


def test_without_faults_nothing_is_lost():
    world = World(seed=1, share=0.0)
    outcomes_P = jumping_clock.run(played(world, 8, seed=1))
    assert check_batch(world, outcomes_P, 0)[:3] == (8, 0, Counter())
    assert all(outcome.retries == 0 for outcome in outcomes_P)
    assert training_data(outcomes_P)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_failing_is_survived_and_told(way, monkeypatch):
    world = World(seed=3, share=0.1)
    for sampler in (world.agents, world.judges):
        whether = sampler._way
        monkeypatch.setattr(sampler, "_way", lambda call, whether=whether: whether(call) and way)
    outcomes_P = jumping_clock.run(played(world, 10, seed=2))
    check_batch(world, outcomes_P, 0)
    assert (world.agents.failed + world.judges.failed)[way]
    told = {failure.error_type for outcome in outcomes_P for failure in outcome.failures}
    expected = {
        "timeout": "TimeoutError",
        "hang": "TimeoutError",
        "429": "RateLimitError",
        "500": "InternalServerError",
        "409": "ConflictError",
        "malformed": "UnusableReplyError",
        "empty": "UnusableReplyError",
        "nan_logprob": "FloatingPointError",
        "cancelled": "CancelledError",
    }[way]
    assert expected in told


def test_a_reply_that_is_not_checked_would_be_seen(monkeypatch):
    monkeypatch.setattr(rollouts, "_check_reply", lambda reply: None)
    world = World(seed=5)
    outcomes_P = jumping_clock.run(played(world, 24, seed=0))
    with pytest.raises((AssertionError, FloatingPointError, ValueError)):
        check_batch(world, outcomes_P, 0)


def test_without_a_time_limit_a_call_that_hangs_would_be_seen():
    world = World(seed=5)
    world.judge.policy.timeout_s = None
    with pytest.raises(RuntimeError, match="everybody waits"):
        jumping_clock.run(played(world, 24, seed=0))


# the local engine


def nodes_of(decoder):
    """The nodes of a snapshot's tree of beginnings, after checking that its accounts are right."""
    cache = decoder._running._stored
    nodes = list(cache._nodes.values())
    children = Counter(id(node.parent) for node in nodes if node.parent is not None)
    assert all(node.num_children == children[id(node)] for node in nodes)
    assert all(node.parent is None or id(node.parent) in cache._nodes for node in nodes)
    assert cache.num_bytes == sum(node.num_bytes for node in nodes)
    assert {id(node) for node in cache._by_digest.values()} <= {id(node) for node in nodes}
    return nodes


async def test_calls_that_are_given_up_leave_nothing_in_the_engine(tmp_path, trials, ledger):
    number, size = trials(short=2, full=200), trials(short=2, full=10)
    service = LocalServiceClient(device="cpu")
    inner = service.create_sampling_client(base_model=str(make_model(tmp_path, "qwen3")))
    renderer = load_renderer(inner.get_tokenizer(), model_name=str(tmp_path))
    sampler = FailingSampler(inner, share=0.15, seed=7, hang_share=0.02)
    sampler.abandons = True
    judge = PolicySelfComparisonJudge(PolicyRef(sampling_client=sampler, timeout_s=20), renderer)
    decoder = inner._source.result().decoder
    given_up = 0
    for first in range(0, number, size):
        builders_P = [
            round_robin_group(
                question=f"Number {place}?",
                renderer=renderer,
                judge=judge,
                num_agents=3,
                max_rounds=2,
                seed=place,
            )
            for place in range(first, first + size)
        ]
        policy = SeatSampler(sampler=sampler, sampling=Sampling(seed=first, max_tokens=12, timeout_s=20))
        outcomes_P = await run_groups(builders_P, policy, max_retries=2)
        assert all(outcome.group is not None or outcome.void_reason for outcome in outcomes_P)
        while service._core.pump.run_unit():  # what was given up ends in the engine's own time
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not decoder.has_work()
        assert (decoder._running.sequences, list(decoder._pending)) == ([], [])
        nodes_of(decoder)
        given_up = sampler.failed.total()
    service._core._forget_prefixes()
    assert not nodes_of(decoder)
    del outcomes_P, builders_P
    gc.collect()
    assert given_up
    ledger(
        "3 failing calls",
        "calls given up half-way leave no row, task or cache node in the local engine",
        trials=number,
        seed=7,
        figures=f"{given_up} of {sampler.num_calls} calls failed",
    )
