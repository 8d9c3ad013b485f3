"""Several policies at one update: each is trained on its own tokens, as if it were alone with them."""

import asyncio

import numpy as np
import pytest
import tinker
import torch
from random_models import make_model
from tiny_engine import weights

from viva.conversation.protocol import Protocol, Round, Segment
from viva.conversation.rendering import load_renderer
from viva.conversation.roles import assign
from viva.engine import LocalServiceClient
from viva.rewards import find_reward
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.training.batch import plain_batch
from viva.training.members import Members, member_metrics, update_members
from viva.training.rollouts import run_groups
from viva.training.sampling import Sampling, SeatSampler, Team
from viva.training.update import UpdateConfig, update_policy


def said(text):
    return lambda view: f"{text} {view.persona}"


PROTOCOL = Protocol(
    rounds=[
        Round("ask", [Segment(name="question", instruction=said("Ask."), role="red")]),
        Round("tell", [Segment(name="answer", instruction=said("Tell."), role="blue")], ["question"]),
        Round("close", [Segment(name="closing", instruction=said("Close."), role="red")], ["answer"]),
    ]
)
CONFIG = UpdateConfig(learning_rate=0.02)
NAMES = ("red", "blue")


def pay(conversation):
    said = {turn.agent_id: float(sum(turn.text.encode()) % 7) for turn in conversation.turns}
    return {agent: value + 10 * agent for agent, value in said.items()}  # never equal


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3"))


def make_clients(model):
    """Two members that differ: each was trained on a text of its own, not so long that it is sure of anything."""
    service = LocalServiceClient(device="cpu")
    clients = {name: service.create_lora_training_client(model, rank=4, seed=0) for name in NAMES}
    for number, client in enumerate(clients.values()):
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([70 + number] * 9),
            loss_fn_inputs={"target_tokens": [90 + number] * 9},
        )
        for _ in range(3):
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=0.005)).result()
    return clients


async def play(clients, policies, temperature=1.0):
    roles = assign(policies, PROTOCOL, 2)
    renderer = load_renderer(clients["red"].get_tokenizer(), model_name="tiny")
    samplers = {
        name: [await client.save_weights_and_get_sampling_client()] for name, client in clients.items()
    }
    builders = [
        MultiAgentConversationEnvGroupBuilder(
            question=f"{number} + 1?",
            renderer=renderer,
            protocol=PROTOCOL,
            reward=find_reward(pay),
            roles=roles,
            num_agents=2,
        )
        for number in range(3)
    ]
    policy = SeatSampler(
        sampler=Team("red", samplers), sampling=Sampling(seed=5, max_tokens=6, temperature=temperature)
    )
    return await run_groups(builders, policy)


BOTH = {"red": "trained", "blue": "trained"}


async def logprob_gap(client, data_D):
    output = await client.forward(data_D, "importance_sampling")
    gaps = [
        np.abs(record["logprobs"].to_numpy() - datum.loss_fn_inputs["logprobs"].to_numpy())[
            datum.loss_fn_inputs["mask"].to_numpy() > 0
        ]
        for datum, record in zip(data_D, output.loss_fn_outputs, strict=True)
    ]
    return float(np.concatenate(gaps).max())


async def test_every_turn_is_spoken_by_its_member_and_trained_into_it_alone(model):
    clients = make_clients(model)
    outcomes = await play(clients, BOTH)
    batch = plain_batch(outcomes)
    own = {
        name: [
            datum for datum, speaker in zip(batch.data_D, batch.speakers_D(), strict=True) if speaker == name
        ]
        for name in NAMES
    }
    assert len(own["red"]) == 2 * len(own["blue"]) > 0
    for name, other in (NAMES, NAMES[::-1]):
        assert await logprob_gap(clients[name], own[name]) < 1e-4
        assert await logprob_gap(clients[other], own[name]) > 1e-2, (
            "the members are too alike to tell them apart"
        )
    told = member_metrics(outcomes)
    turns = [
        len(transition.ac.tokens)
        for outcome in outcomes
        for trajectory in outcome.group.trajectories_G
        for transition in trajectory.transitions
    ]
    assert told == {
        "red/sampled_tokens": sum(turns) - sum(turns[1::3]),
        "blue/sampled_tokens": sum(turns[1::3]),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_updates_of_two_members_equal_those_of_two_runs_with_the_same_data(model, temperature):
    clients, alone = make_clients(model), make_clients(model)
    batch = plain_batch(await play(clients, BOTH, temperature))
    before = {name: weights(client) for name, client in clients.items()}
    members = Members(trained=clients)
    result = await update_members(members, batch, CONFIG, temperature=temperature)
    speakers = batch.speakers_D()
    places = [place for name in NAMES for place, speaker in enumerate(speakers) if speaker == name]
    expected = []
    for name in NAMES:
        data_D = [datum for datum, speaker in zip(batch.data_D, speakers, strict=True) if speaker == name]
        own = await update_policy(alone[name], data_D, CONFIG, foreign_D=[temperature != 1] * len(data_D))
        expected += own.logprobs_D
        assert result.metrics[f"{name}/optim/grad_norm"] == own.metrics["optim/grad_norm"] > 0
        for key, tensor in weights(alone[name]).items():
            assert torch.equal(weights(clients[name])[key], tensor)
        assert any(not torch.equal(before[name][key], tensor) for key, tensor in weights(alone[name]).items())
    for place, logprobs in zip(places, expected, strict=True):
        assert np.array_equal(result.logprobs_D[place].data, logprobs.data, equal_nan=True)
    assert result.metrics["optim/datums"] == len(batch.data_D)
    assert result.metrics["optim/logprob_gap_max"] < 1e-4


def content(datum):
    inputs = {name: tensor.to_numpy().tolist() for name, tensor in datum.loss_fn_inputs.items()}
    return datum.model_input.to_ints(), inputs


@pytest.mark.parametrize("keeps_silent", [False, True])
async def test_tokens_of_a_frozen_member_are_in_no_datum(model, keeps_silent):
    clients = make_clients(model)
    outcomes = await play(clients, {"red": "initial", "blue": "trained"})
    both = await play(clients, BOTH)
    batch, whole = (plain_batch(each, keeps_silent=keeps_silent) for each in (outcomes, both))
    assert set(batch.speakers_D()) == {"blue"}
    blue = [datum for datum, name in zip(whole.data_D, whole.speakers_D(), strict=True) if name == "blue"]
    assert list(map(content, batch.data_D)) == list(map(content, blue)) != []
    for sample in batch.samples_N:
        trained = [any(turn.weights) for turn in sample.turns_K]
        assert trained == [False, True, False]


async def test_a_team_draws_from_a_league_by_the_group_and_stands_for_its_main_member(model):
    clients = make_clients(model)
    samplers = [await client.save_weights_and_get_sampling_client() for client in clients.values()]
    team = Team("red", {"red": [samplers[0]], "blue": [samplers[1], samplers[0]]})
    assert team.answers_together
    assert [team.member("blue", draw) for draw in (0, 1, 2)] == [samplers[1], samplers[0], samplers[1]]
    assert team.member("blue") is samplers[0]
    prompt, params = (
        tinker.ModelInput.from_ints([70] * 9),
        tinker.SamplingParams(max_tokens=5, seed=1, stop=[]),
    )
    ours, main = await asyncio.gather(team.sample(prompt, 1, params), samplers[0].sample(prompt, 1, params))
    assert list(ours.sequences[0].tokens) == list(main.sequences[0].tokens)
