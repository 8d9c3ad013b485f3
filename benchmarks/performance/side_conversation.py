"""A full step of conversation preference RL: conversations, all judge calls, update; by the engine or plainly.

Settings: ``plain``, ``model`` (folder), ``precision``, ``agents``, ``rounds``, ``conversations`` (played together),
``max_tokens`` of a turn and ``verdict`` tokens of a plain judge call. Both ways run the package's own conversation,
credit and update; they differ in the client. A random model says nothing that can be read, so the verdicts are
replaced, after they were computed, by fixed ones that give every agent something to learn from.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from channel import serve
from side_viva import open_client
from work import LEARNING_RATE

from viva.threads import prepare_threads


def make_judge(settings: Mapping[str, Any], policy: Any, renderer: Any) -> Any:
    from viva.judging.comparison import Comparison, Outcome
    from viva.judging.judge import PolicySelfComparisonJudge

    class Decided(PolicySelfComparisonJudge):
        async def compare(
            self, question: str, solutions: Any, first: int, second: int, seed: int
        ) -> Comparison:
            await super().compare(question, solutions, first, second, seed)
            score = (2**second - 2**first) / 2 ** settings["agents"]
            outcome = Outcome.B if score > 0 else Outcome.A
            return Comparison(first=first, second=second, outcome=outcome, score=score)

    mode = "verdict" if settings["plain"] else "logprob"
    return Decided(policy, renderer, mode=mode, max_tokens=settings["verdict"])


def make(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    from transformers import AutoTokenizer

    from viva.conversation.rendering import load_renderer
    from viva.judging.judge import PolicyRef
    from viva.sdk import settled
    from viva.selfplay.round_robin import round_robin_group
    from viva.training.batch import plain_batch
    from viva.training.rollouts import run_groups
    from viva.training.sampling import Policy, Sampling
    from viva.training.update import UpdateConfig, update_policy

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    renderer = load_renderer(tokenizer, model_name=settings["model"])
    reference = PolicyRef()
    judge = make_judge(settings, reference, renderer)
    if settings["plain"]:
        from plain import PlainClient

        client = PlainClient(settings["model"], settings["precision"])
    else:
        client = open_client(settings)

    async def play(number: int) -> dict[str, float]:
        rng = random.Random(number)
        builders = [
            round_robin_group(
                question=" ".join(str(rng.randrange(1000)) for _ in range(16)),
                num_agents=settings["agents"],
                max_rounds=settings["rounds"] if number else 1,  # the latter to warm up
                renderer=renderer,
                judge=judge,
                seed=index,
            )
            for index in range(settings["conversations"])
        ]
        started = time.perf_counter()
        sampler = (
            client if settings["plain"] else await settled(client.save_weights_and_get_sampling_client())
        )
        reference.sampling_client = sampler
        policy = Policy(sampler=sampler, sampling=Sampling(seed=number, max_tokens=settings["max_tokens"]))
        outcomes = await run_groups(builders, policy, max_retries=0)
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
