"""An engine with the clients' interface and a context-free policy of eight logits: the loop's tests in milliseconds.

Also the token-counting game it is trained on: the reward is the share of token 3 in the reply.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tinker
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, StepResult

from viva.sdk import make_sequence

VOCABULARY = 8
STOP = 0
GOOD = 3


class Done:
    """An awaitable that is done."""

    def __init__(self, value):
        self.value = value

    def __await__(self):
        yield from ()
        return self.value


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class BanditSampler:
    def __init__(self, logits):
        self.logprobs = log_softmax(logits)

    def sample(self, prompt, num_samples, sampling_params):
        del prompt
        rng = np.random.Generator(np.random.Philox(sampling_params.seed))
        sequences = []
        for index in range(num_samples):
            tokens, reason = [], "length"
            for _ in range(sampling_params.max_tokens):
                tokens.append(int(rng.choice(VOCABULARY, p=np.exp(self.logprobs))))
                if tokens[-1] == STOP:
                    reason = "stop"
                    break
            sequences.append(
                make_sequence(
                    stop_reason=reason,
                    sequence_id=str(index),
                    tokens=tokens,
                    logprobs=self.logprobs[tokens].tolist(),
                    topk=None,
                )
            )
        return Done(SimpleNamespace(sequences=sequences))

    def compute_logprobs(self, prompt):
        return Done([None, *self.logprobs[np.array(prompt.to_ints()[1:]) % VOCABULARY].tolist()])


class BanditTrainer:
    def __init__(self, state_dir: Path, state: dict | None = None):
        self.state_dir = state_dir
        state = state or {"logits": [0.0] * VOCABULARY, "moments": [[0.0] * VOCABULARY] * 2, "steps": 0}
        self.logits = np.array(state["logits"])
        self.moments = np.array(state["moments"])
        self.steps = state["steps"]
        self.gradient = np.zeros(VOCABULARY)

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        assert (loss_fn, loss_fn_config) == ("importance_sampling", None)
        logprobs = log_softmax(self.logits)
        outputs = []
        for datum in data:
            inputs = datum.loss_fn_inputs
            assert set(inputs) == {"target_tokens", "logprobs", "advantages"}
            targets = inputs["target_tokens"].to_numpy()
            new = logprobs[targets % VOCABULARY]
            weights = np.exp(new - inputs["logprobs"].to_numpy()) * inputs["advantages"].to_numpy()
            for target, weight in zip(targets, weights, strict=True):
                self.gradient -= weight * (np.eye(VOCABULARY)[target % VOCABULARY] - np.exp(logprobs))
            outputs.append({"logprobs": tinker.TensorData.from_numpy(new.astype(np.float32))})
        return Done(
            tinker.ForwardBackwardOutput(
                loss_fn_output_type="", loss_fn_outputs=outputs, metrics={"loss:sum": 0.0}
            )
        )

    def forward(self, data, loss_fn, loss_fn_config=None):
        before = self.gradient.copy()
        done = self.forward_backward(data, loss_fn, loss_fn_config)
        self.gradient = before
        return done

    def optim_step(self, params):
        self.steps += 1
        self.moments[0] = params.beta1 * self.moments[0] + (1 - params.beta1) * self.gradient
        self.moments[1] = params.beta2 * self.moments[1] + (1 - params.beta2) * self.gradient**2
        mean = self.moments[0] / (1 - params.beta1**self.steps)
        scale = np.sqrt(self.moments[1] / (1 - params.beta2**self.steps)) + params.eps
        self.logits = self.logits - params.learning_rate * mean / scale
        self.gradient = np.zeros(VOCABULARY)
        return Done(tinker.OptimStepResponse(metrics={}))

    def save_state(self, name):
        folder = self.state_dir / "weights" / name
        folder.mkdir(parents=True)  # engines refuse to replace a state
        (folder / "state.json").write_text(json.dumps(self.state()))
        return Done(SimpleNamespace(path=str(folder)))

    def state(self):
        return {"logits": self.logits.tolist(), "moments": self.moments.tolist(), "steps": self.steps}

    def save_weights_and_get_sampling_client(self):
        return Done(BanditSampler(self.logits))

    def get_tokenizer(self):
        raise NotImplementedError


def load_bandit(state_dir: Path, path: str) -> BanditTrainer:
    return BanditTrainer(state_dir, json.loads((Path(path) / "state.json").read_text()))


class CountEnv(Env):
    """One turn; the reward is the share of the good token."""

    def __init__(self, prompt):
        self.prompt = prompt

    async def initial_observation(self):
        return tinker.ModelInput.from_ints([self.prompt]), [STOP]

    async def step(self, action, *, extra=None):
        share = sum(token == GOOD for token in action) / len(action)
        return StepResult(
            reward=share,
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
            metrics={"share": share},
        )


@dataclass
class CountGroup(EnvGroupBuilder):
    prompt: int
    size: int = 4

    async def make_envs(self) -> Sequence[Env]:
        return [CountEnv(self.prompt) for _ in range(self.size)]

    def logging_tags(self):
        return ["even" if self.prompt % 2 == 0 else "odd"]


@dataclass
class CountDataset(RLDataset):
    num_steps: int
    groups: int = 3
    group_class: type = CountGroup

    def get_batch(self, index):
        return [self.group_class(index * self.groups + place) for place in range(self.groups)]

    def __len__(self):
        return self.num_steps
