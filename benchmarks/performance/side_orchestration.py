"""Orchestration alone: conversations held together by a policy that answers at once.

Settings: ``model`` (folder, for its tokenizer), ``conversations``, ``agents``, ``rounds``. Prompts are built and
encoded, replies decoded and parsed, verdicts asked for and read, rewards computed. Nothing is sampled by a model.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tinker
from channel import serve

from viva.sdk import make_response, make_sequence

REPLY = (
    '{"reflection": "baba dado gigi hoho", "evaluation": "kike lolu mama nono", '
    '"solution": "popo riri susa tete vivo wawa"}'
)
VERDICT = '{"preference": "B"}'
VERDICT_TOKENS = 32


class Scripted:
    """Answers every turn with one reply and every judge call with one verdict."""

    def __init__(self, tokenizer: Any, stop: int) -> None:
        self._turn, self._verdict = (
            make_response(
                [
                    make_sequence(
                        stop_reason="stop",
                        sequence_id="0",
                        tokens=tokens,
                        logprobs=[-1.0] * len(tokens),
                        topk=None,
                    )
                ],
                {},
            )
            for tokens in ([*tokenizer.encode(text), stop] for text in (REPLY, VERDICT))
        )

    def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> asyncio.Future[tinker.SampleResponse]:
        is_verdict = sampling_params.max_tokens == VERDICT_TOKENS
        future = asyncio.get_running_loop().create_future()
        future.set_result(self._verdict if is_verdict else self._turn)
        return future


def memory_mb(name: str) -> float:
    """What this process holds (``VmRSS``), or has held at most since the last `forget_peak` (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def make(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    from transformers import AutoTokenizer

    from viva.conversation.rendering import load_renderer
    from viva.judging.judge import JudgeOptions, PolicyRef, PolicySelfComparisonJudge
    from viva.rewards import tournament
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
    from viva.selfplay.round_robin import round_robin_protocol
    from viva.threads import frozen_gc
    from viva.training.rollouts import run_groups
    from viva.training.sampling import Sampling, SeatSampler

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    renderer = load_renderer(tokenizer, model_name=settings["model"])
    (stop,) = renderer.get_stop_sequences()
    sampler = Scripted(tokenizer, stop)
    judge = PolicySelfComparisonJudge(
        PolicyRef(sampling_client=sampler), renderer, JudgeOptions(mode="verdict", max_tokens=VERDICT_TOKENS)
    )
    agents, rounds = settings["agents"], settings["rounds"]

    async def play(number: int, count: int) -> float:
        """Processor seconds of a number of conversations."""
        builders = [
            MultiAgentConversationEnvGroupBuilder(
                question=f"How many pens are in box {index}?",
                num_agents=agents,
                renderer=renderer,
                protocol=round_robin_protocol(rounds),
                reward=tournament(),
                judge=judge,
                seed=index,
            )
            for index in range(count)
        ]
        started = time.process_time()
        outcomes = await run_groups(
            builders, SeatSampler(sampler=sampler, sampling=Sampling(seed=number, max_tokens=512))
        )
        seconds = time.process_time() - started
        assert all(outcome.group for outcome in outcomes), outcomes[0].void_reason
        return seconds

    def step(number: int) -> dict[str, float]:
        # the first one warms up; after it the most memory held is that of the conversations in flight
        count = settings["conversations"] if number else 20
        forget_peak()
        before = memory_mb("VmRSS")
        with frozen_gc():  # as a run does
            seconds = asyncio.run(play(number, count))
        kb = 1024 * (memory_mb("VmHWM") - before) / count
        turns = count * agents * rounds
        return {"cost": 1000 * seconds / turns, "kb": kb}

    return step


if __name__ == "__main__":
    serve(make, ("tinker", "tinker-cookbook", "transformers"))
