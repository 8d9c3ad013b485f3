"""With a slow line, a step takes as long as its longest chain of requests, however many there are beside it.

Time is that of `jumping_clock`: the figures are those of an engine that answers every request after `LATENCY_S`, exact
and without waiting.
"""

import asyncio
from types import SimpleNamespace

import jumping_clock
import numpy as np
import pytest
import tinker
from conversation_groups import round_robin_group
from tinker_cookbook.rl.types import RLDataset

from viva.judging.comparison import VERDICT_PREFIX, TournamentPattern
from viva.judging.judge import JudgeOptions, PolicyRef, PolicySelfComparisonJudge
from viva.run.folder import prepare_run_folder
from viva.testing import ScriptedSamplingClient, honest, tiny_renderer, turn_of
from viva.training.followers import Current
from viva.training.loop import LoopConfig, Training, train
from viva.training.sampling import Sampling
from viva.training.update import UpdateConfig

LATENCY_S = 0.05
NUM_GROUPS, NUM_AGENTS, NUM_ROUNDS = 8, 3, 2
NUM_TURNS = NUM_AGENTS * NUM_ROUNDS
NUM_JUDGED = NUM_AGENTS * (NUM_AGENTS - 1)
RENDERER = tiny_renderer()


class Line:
    """Counts requests and answers each after a while."""

    def __init__(self):
        self.num_requests = 0

    def carry(self, answer):
        self.num_requests += 1

        async def later():
            await asyncio.sleep(LATENCY_S)
            return await answer if asyncio.iscoroutine(answer) or asyncio.isfuture(answer) else answer

        return asyncio.ensure_future(later())


class Sampler(ScriptedSamplingClient):
    def sample(self, *args, **options):
        return LINE.carry(super().sample(*args, **options))


LINE = Line()


def prefers_later(prompt):
    """The judge likes the solution of the later agent better."""
    if not prompt.endswith(VERDICT_PREFIX):
        return {}
    first, second = (prompt.split(f"Solution {label}:\n> ", 1)[1].split("\n", 1)[0] for label in "AB")
    return {"A": 0.2, "B": 0.7} if first < second else {"A": 0.7, "B": 0.2}


class Trainer:
    """Takes requests as the SDK does: they are on their way when they are made, and are worked on in order."""

    def save_weights_and_get_sampling_client(self):
        def script(prompt, _):
            return honest(str(turn_of(prompt)[0])) if "You are agent" in prompt else "A"

        return LINE.carry(Sampler(renderer=RENDERER, script=script, next_token=prefers_later))

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        outputs = [
            {"logprobs": tinker.TensorData.from_numpy(np.full(datum.model_input.length, -1.0, np.float32))}
            for datum in data
        ]
        return LINE.carry(SimpleNamespace(loss_fn_output_type="", loss_fn_outputs=outputs, metrics={}))

    def optim_step(self, params):
        return LINE.carry(tinker.OptimStepResponse(metrics={}))

    def save_state(self, name):
        return LINE.carry(SimpleNamespace(path=f"tinker://run/weights/{name}"))


class Conversations(RLDataset):
    def __init__(self, judge, order):
        self.judge, self.order = judge, order

    def get_batch(self, index):
        return [
            round_robin_group(
                question=f"What is {place} + 1?",
                answer=None,
                num_agents=NUM_AGENTS,
                max_rounds=NUM_ROUNDS,
                renderer=RENDERER,
                judge=self.judge,
                tournament_pattern=TournamentPattern.ALL_PAIRS_BOTH_WAYS,
                order=self.order,
                seed=place,
            )
            for place in range(NUM_GROUPS)
        ]

    def __len__(self):
        return 1


async def one_step(folder, order):
    policy = PolicyRef()
    judge = PolicySelfComparisonJudge(policy, RENDERER, JudgeOptions(max_off_set_mass=1.0))
    run = Training(
        config=LoopConfig(
            sampling=Sampling(max_tokens=256),
            eval_every=0,
            save_every=0,
            update=UpdateConfig(learning_rate=1e-3),
        ),
        client=Trainer(),
        dataset=Conversations(judge, order),
        folder=prepare_run_folder(folder, behavior="raise", config={}).open(),
        followers=[Current(policy)],
        show_steps=False,
    )
    assert await train(run)
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("order", "chain"),
    [("sequential", NUM_TURNS), ("simultaneous", NUM_ROUNDS)],
    ids=["in turn", "together"],
)
def test_a_step_takes_as_long_as_its_longest_chain(tmp_path, monkeypatch, order, chain):
    line = Line()
    monkeypatch.setitem(globals(), "LINE", line)
    elapsed_s = jumping_clock.run(one_step(tmp_path / "run", order))
    snapshot, judged, update, saved = 1, 1, 1, 1
    assert line.num_requests == 1 + NUM_GROUPS * (NUM_TURNS + NUM_JUDGED) + 2 + 1
    assert elapsed_s == pytest.approx(LATENCY_S * (snapshot + chain + judged + update + saved), rel=1e-6)
