"""A full step of a conversation: all turns, all judge calls and votes, the update; by one of three engines.

Settings: ``engine`` (``viva``; ``plain``: one reply after another, see `plain`; ``vllm``: rollouts by vLLM, the plain
update), ``system`` (``round_robin`` or ``critique``, whose votes are label probabilities), ``model`` (folder),
``precision``, ``agents``, ``rounds`` of a round robin, ``conversations`` (played together), ``max_tokens`` of a turn,
``verdict`` tokens of a plain judge call, and ``micro_batch`` rows of a plain update. Step 0, which warms up, plays one
conversation. All run the package's own conversation, credit and update; they differ in the client. Nothing ends a turn
before its last token, so that all do the same work. The judge's verdicts are replaced, after they were computed, by
fixed ones that give every agent something to learn from.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from channel import serve
from side_viva import open_client
from work import LEARNING_RATE

from viva.threads import prepare_threads


@dataclass(frozen=True)
class Endless:
    """A sampler that no text stops."""

    sampler: Any

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any, **options: Any) -> Any:
        params = sampling_params.model_copy(update={"stop": []})
        return self.sampler.sample(prompt, num_samples, params, **options)


def make_judge(settings: Mapping[str, Any], policy: Any, renderer: Any) -> Any:
    from viva.judging.comparison import Comparison, Outcome
    from viva.judging.judge import JudgeOptions, PolicySelfComparisonJudge

    class Decided(PolicySelfComparisonJudge):
        async def compare(
            self, question: str, solutions: Any, first: int, second: int, seed: int
        ) -> Comparison:
            await super().compare(question, solutions, first, second, seed)
            score = (2**second - 2**first) / 2 ** settings["agents"]
            outcome = Outcome.B if score > 0 else Outcome.A
            return Comparison(first=first, second=second, outcome=outcome, score=score)

    mode = "verdict" if settings["engine"] == "plain" else "logprob"
    return Decided(policy, renderer, JudgeOptions(mode=mode, max_tokens=settings["verdict"]))


def open_engine(settings: Mapping[str, Any]) -> Any:
    """What samples and trains."""
    if settings["engine"] == "viva":
        return open_client(settings)
    from plain import PlainClient, VllmClient

    kind = {"plain": PlainClient, "vllm": VllmClient}[settings["engine"]]
    return kind(settings["model"], settings["precision"], settings["micro_batch"])


def make(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    from transformers import AutoTokenizer

    from viva.conversation.rendering import load_renderer
    from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
    from viva.rewards import tournament
    from viva.rewards.critique import PeerReview
    from viva.rewards.review import ReviewRules
    from viva.sdk import settled
    from viva.selfplay.critique import critique_protocol
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
    from viva.selfplay.round_robin import round_robin_protocol
    from viva.training.batch import plain_batch
    from viva.training.rollouts import run_groups
    from viva.training.sampling import Sampling, SeatSampler
    from viva.training.update import UpdateConfig, update_policy

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    renderer = load_renderer(tokenizer, model_name=settings["model"])
    reference = PolicyRef()
    judge = make_judge(settings, reference, renderer)
    voter = PolicySelfComparisonJudge(reference, renderer)
    client = open_engine(settings)

    def builder(question: str, number: int, index: int) -> Any:
        common = {"question": question, "num_agents": settings["agents"], "renderer": renderer, "seed": index}
        if settings["system"] == "critique":
            protocol = critique_protocol(
                settings["agents"], on_failure="continue", comparisons=True, ballots="labels"
            )
            # a model that cannot judge votes half for each, which the floor would keep from the update
            reward = PeerReview(rules=ReviewRules(solution_floor=0.0), compared_by=None)
            return MultiAgentConversationEnvGroupBuilder(
                **common, protocol=protocol, reward=reward, voter=voter
            )
        protocol = round_robin_protocol(settings["rounds"] if number else 1)
        return MultiAgentConversationEnvGroupBuilder(
            **common, protocol=protocol, reward=tournament(), judge=judge
        )

    async def play(number: int) -> dict[str, float]:
        rng = random.Random(number)
        builders = [
            builder(" ".join(str(rng.randrange(1000)) for _ in range(16)), number, index)
            for index in range(settings["conversations"] if number else 1)
        ]
        started = time.perf_counter()
        sampler = await settled(client.save_weights_and_get_sampling_client())
        reference.sampling_client = sampler
        sampling = Sampling(seed=number, max_tokens=settings["max_tokens"])
        outcomes = await run_groups(
            builders, SeatSampler(sampler=Endless(sampler), sampling=sampling), max_retries=0
        )
        rolled = time.perf_counter()
        assert all(outcome.group for outcome in outcomes), [outcome.void_reason for outcome in outcomes]
        data = plain_batch(outcomes).data_D
        await update_policy(client, data, UpdateConfig(learning_rate=LEARNING_RATE))
        ended = time.perf_counter()
        return {
            "cost": (ended - started) / len(builders),
            "rollouts": rolled - started,
            "update": ended - rolled,
            "tokens": sum(datum.model_input.length for datum in data) / len(builders),
        }

    return lambda number: asyncio.run(play(number))


if __name__ == "__main__":
    prepare_threads()
    serve(make, ("torch", "transformers", "peft", "tinker"))
