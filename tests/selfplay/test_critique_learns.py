"""Critique self-play trains a toy policy, segment by segment, on the real protocol in the real loop.

The policy writes fixed texts with a few choices in them, each from a row of logits of its segment:

    proposal   quality {0-3}
    ranking    {h|r} and a ranking, honest or reversed
    critique   of every other: {u|v}, useful or vague
    revision   {0-3} makes quality {that and 2 for every useful critique}
    verdict    {h|r} and a ranking
"""

import random
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import tinker
from bandit_engine import Done
from review_agents import PAPER, RENDERER, ROBUST, builder_of, others_of, place_of, quality, ranking_of
from tinker_cookbook.rl.types import RLDataset

from viva.rewards.credit import GroupCredit
from viva.rewards.review import STREAMS, ReviewRules
from viva.run.folder import prepare_run_folder
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.training.loop import LoopConfig, Training, train
from viva.training.sampling import Sampling
from viva.training.update import UpdateConfig

CHOICES = {"proposal": "0123", "ranking": "hr", "critique": "uv", "revision": "0123", "verdict": "hr"}
SLOTS = {"proposal": r"(?<=quality )\d", "critique": r"(?<=: )[uv]", "revision": r"(?<=Revise: )\d"}
ASSISTANT = "<|im_start|>assistant\n"


def asked(prompt):
    return place_of(prompt, ["revision"] if "makes quality" in prompt else [])


def written(prompt, choose):
    """The reply to a prompt, with choices made by ``choose(segment)``."""
    place = asked(prompt)
    choice = choose(place.segment)
    if place.segment == "proposal":
        return f"quality {choice}"
    if place.segment == "critique":
        marks = [choice, *(choose("critique") for _ in place.others[1:])]
        return "\n".join(
            f"Critique of {letter}: {mark}" for letter, mark in zip(place.others, marks, strict=True)
        )
    if place.segment == "revision":
        return f"Revise: {choice} makes quality {int(choice) + 2 * place.critiques.count('u')}"
    sign = 1 if choice == "h" else -1
    ranking = ranking_of(others_of(place), key=lambda text: sign * quality(text))
    return f"{choice}\n{ranking}"


def choices_in(segment, reply):
    """Place and index of every choice that a reply was made of; places are also those of its tokens."""
    found = re.finditer(SLOTS.get(segment, r"^[hr]"), reply)
    return [(match.start(), CHOICES[segment].index(match[0])) for match in found]


class Toy:
    """Sampler and trainer at once: a table of logits, plain gradient descent."""

    def __init__(self):
        self.logits = {segment: np.zeros(len(choices)) for segment, choices in CHOICES.items()}
        self.logits["ranking"][0] = self.logits["verdict"][0] = (
            1.0  # mostly honest: else there is no truth to find
        )
        self.gradient = {}

    def chances(self, segment):
        weights = np.exp(self.logits[segment])
        return weights / weights.sum()

    def save_weights_and_get_sampling_client(self):
        return Done(self)  # between snapshots nothing changes

    def sample(self, prompt, num_samples, sampling_params):
        assert num_samples == 1
        rng = np.random.Generator(np.random.Philox(sampling_params.seed))
        text = RENDERER.tokenizer.decode(prompt.to_ints())
        reply = written(text, lambda segment: rng.choice(list(CHOICES[segment]), p=self.chances(segment)))
        segment = asked(text).segment
        tokens = [*RENDERER.tokenizer.encode(reply), *RENDERER.get_stop_sequences()]
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        for place, choice in choices_in(segment, reply):
            logprobs[place] = np.log(self.chances(segment)[choice])
        sequence = tinker.SampledSequence(
            stop_reason="stop",
            sequence_id="0",
            tokens_np=np.array(tokens, dtype=np.int32),
            logprobs_np=logprobs,
        )
        return Done(SimpleNamespace(sequences=[sequence]))

    def forward_backward(self, data, loss_fn, loss_fn_config):
        self.gradient = {segment: np.zeros_like(row) for segment, row in self.logits.items()}
        outputs = []
        for datum in data:
            inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
            tokens = [*datum.model_input.to_ints(), inputs["target_tokens"][-1]]
            prompt, reply = RENDERER.tokenizer.decode(tokens).rsplit(ASSISTANT, 1)
            segment = asked(prompt).segment
            start = (
                len(tokens) - len(RENDERER.tokenizer.encode(reply)) - 1
            )  # the target of token t is at t - 1
            new = np.zeros(len(tokens) - 1, dtype=np.float32)
            for place, choice in choices_in(segment, reply):
                new[start + place] = np.log(self.chances(segment)[choice])
                assert new[start + place] == pytest.approx(inputs["logprobs"][start + place], abs=1e-5)
                ascent = np.eye(len(self.logits[segment]))[choice] - self.chances(segment)
                self.gradient[segment] -= inputs["advantages"][start + place] * ascent
            outputs.append({"logprobs": tinker.TensorData.from_numpy(new)})
        return Done(tinker.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=outputs, metrics={}))

    def optim_step(self, params):
        for segment, row in self.gradient.items():
            self.logits[segment] = self.logits[segment] - params.learning_rate * row
        return Done(tinker.OptimStepResponse(metrics={}))

    def save_state(self, name):
        return Done(SimpleNamespace(path=f"tinker://run/weights/{name}"))


class Shuffled(MultiAgentConversationEnvGroupBuilder):
    """Deals the rewards of every stream and round out at random."""

    def credit(self):
        given = super().credit()
        rng, spans = random.Random(self.seed), []
        for stream in given.streams().values():
            rewards = [span.reward for span in stream]
            rng.shuffle(rewards)
            spans += [replace(span, reward=reward) for span, reward in zip(stream, rewards, strict=True)]
        return GroupCredit(spans=tuple(spans), weights=given.weights)


ALL_STREAMS = replace(ROBUST, weights=STREAMS)


@dataclass
class Conversations(RLDataset):
    num_steps: int = 30
    is_shuffled: bool = False
    rules: ReviewRules = ALL_STREAMS

    def get_batch(self, index):
        builders = [builder_of(seed=10 * index + place, answer=None, rules=self.rules) for place in range(3)]
        if self.is_shuffled:
            for builder in builders:
                builder.__class__ = Shuffled
        return builders

    def __len__(self):
        return self.num_steps


async def trained(folder, **options):
    toy = Toy()
    run = Training(
        config=LoopConfig(
            sampling=Sampling(seed=1, max_tokens=120),
            save_every=0,
            eval_every=0,
            update=UpdateConfig(learning_rate=0.06),
        ),
        client=toy,
        dataset=Conversations(**options),
        folder=prepare_run_folder(folder, behavior="raise", config={}).open(),
    )
    assert await train(run)
    return toy


def learned(toy):
    """What each segment's policy is worth: mean quality, or the chance of an honest or useful choice."""
    worth = {segment: toy.chances(segment)[0] for segment in ("ranking", "critique", "verdict")}
    return worth | {segment: toy.chances(segment) @ np.arange(4) for segment in ("proposal", "revision")}


async def test_every_segment_learns_from_its_own_stream_and_the_blind_ranking_never(tmp_path):
    before, toy = learned(Toy()), await trained(tmp_path)
    after = learned(toy)
    assert toy.logits["ranking"].tolist() == [1.0, 0.0]  # masked: not one step, however small
    for segment, least in {"proposal": 0.2, "revision": 0.2, "critique": 0.3, "verdict": 0.1}.items():
        assert after[segment] > before[segment] + least


async def test_shuffled_rewards_teach_no_segment_anything(tmp_path):
    before, toy = learned(Toy()), await trained(tmp_path, is_shuffled=True)
    after = learned(toy)
    assert toy.logits["ranking"].tolist() == [1.0, 0.0]
    for segment, most in {"proposal": 0.1, "revision": 0.1, "critique": 0.1, "verdict": 0.1}.items():
        assert after[segment] < before[segment] + most


async def test_with_four_agents_the_papers_r_meta_trains_the_verdict(tmp_path):
    # two vote on each pair; where they disagree, there is no majority, and the pair counts for neither of them
    only = {"r_sol": 0.0, "r_meta": 1.0, "r_diag": 0.0}
    toy = await trained(tmp_path, num_steps=3, rules=replace(PAPER, weights=only))
    moved = {name for name, row in toy.logits.items() if row.tolist() != Toy().logits[name].tolist()}
    assert moved == {"verdict"}


@pytest.mark.parametrize(
    ("stream", "segments"),
    [("r_sol", {"proposal", "revision"}), ("r_diag", {"critique"}), ("r_meta", {"verdict"})],
)
async def test_a_stream_moves_no_segment_but_its_own(stream, segments, tmp_path):
    weights = {name: float(name == stream) for name in ("r_sol", "r_meta", "r_diag")}
    toy = await trained(tmp_path, num_steps=2, rules=replace(ROBUST, weights=weights))
    assert {
        name for name, row in toy.logits.items() if row.tolist() != Toy().logits[name].tolist()
    } == segments
