"""tinker-cookbook's own environments, unmodified, in Viva's training loop on the local engine.

python examples/cookbook_environments.py log_path=runs/problems
python examples/cookbook_environments.py env=twenty_questions log_path=runs/questions num_steps=5

The default, word problems, is the one that the built-in policy learns: it reads nothing else. With the others it trains
nothing, and says why; give them a pretrained model (model_name=...).
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Literal

import chz
from tinker_cookbook.completers import TinkerMessageCompleter
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDataset, ArithmeticEnv
from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import GuessNumberDataset
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.env import TwentyQuestionsDataset
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

from viva.engine import LocalSamplingClient
from viva.recipes.common import RunOptions, finish_run, open_run, resolve_model
from viva.recipes.config import parse_options
from viva.rewards.credit import token_texts
from viva.sdk import settled
from viva.tiny.tasks import Problem, problems
from viva.training.loop import LoopConfig, Training, train
from viva.training.sampling import Sampling
from viva.training.service import EngineConfig
from viva.training.update import UpdateConfig


@chz.chz
class Config:
    """Options of the example."""

    env: Literal["word_problems", "arithmetic", "guess_number", "twenty_questions", "text_arena"] = (
        "word_problems"
    )
    log_path: str
    model_name: str = "tiny"
    num_steps: int = 20
    groups_per_step: int = 4
    group_size: int = 8
    max_tokens: int = 24
    learning_rate: float = 1e-3


class WordProblem(ArithmeticEnv):
    """The cookbook's environment with a question that the built-in policy can read."""

    def __init__(self, problem: Problem, renderer: Renderer) -> None:
        super().__init__(problem.answer, 0, renderer)
        self.problem = problem

    def get_question(self) -> str:
        """The problem."""
        return self.problem.question


class WordProblems(RLDataset):
    """So many problems in every step."""

    def __init__(self, config: Config, renderer: Renderer) -> None:
        self.config = config
        self.renderer = renderer
        self.problems = list(problems("train", config.num_steps * config.groups_per_step, seed=0))

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        """A group of attempts at each problem of a step."""
        count = self.config.groups_per_step
        return [
            ProblemGroupBuilder(partial(WordProblem, problem, self.renderer), self.config.group_size)
            for problem in self.problems[index * count : (index + 1) * count]
        ]

    def __len__(self) -> int:
        """Steps."""
        return self.config.num_steps


def make_dataset(config: Config, renderer: Renderer, other: LocalSamplingClient) -> RLDataset:
    """The cookbook's data set; `other` is the model as it is, for the part that is not trained."""
    num_groups = config.num_steps * config.groups_per_step
    if config.env == "word_problems":
        return WordProblems(config, renderer)
    if config.env == "arithmetic":
        return ArithmeticDataset(config.groups_per_step, renderer, config.group_size, config.num_steps)
    if config.env == "guess_number":
        answers = [37 * index % 1024 for index in range(num_groups)]
        return GuessNumberDataset(answers, renderer, config.groups_per_step, config.group_size)
    if config.env == "twenty_questions":
        answerer = TinkerMessageCompleter(other, renderer, max_tokens=5)
        words = ["apple", "river", "clock", "horse"] * num_groups
        return TwentyQuestionsDataset(
            answerer, words[:num_groups], renderer, config.groups_per_step, config.group_size
        )
    # two players of the same policy in one game; needs the package textarena
    from tinker_cookbook.recipes.multiplayer_rl.text_arena.env import (
        TwoPlayerEnvGroupBuilder,
        TwoPlayerTextArenaDataset,
    )

    builder = TwoPlayerEnvGroupBuilder("TicTacToe-v0", renderer, num_envs=2, self_play=True)
    return TwoPlayerTextArenaDataset(2 * config.groups_per_step, builder, 2 * num_groups)


async def main(config: Config) -> None:
    """Train an adapter; metrics, checkpoints, adapter and report are in `log_path` as those of any run."""
    options = RunOptions(
        model=resolve_model(config.model_name),
        renderer_name=None,
        engine=EngineConfig(),
        lora_rank=16,
        seed=0,
        log_path=Path(config.log_path).expanduser(),
        behavior_if_exists="resume",
        record=chz.asdict(config),
        free_options=("log_path",),
        num_steps=config.num_steps,
    )
    opened = await open_run(options)
    try:
        other = await settled(opened.service.create_sampling_client(base_model=options.model))
        training = Training(
            config=LoopConfig(
                update=UpdateConfig(learning_rate=config.learning_rate),
                sampling=Sampling(max_tokens=config.max_tokens),
            ),
            client=opened.client,
            dataset=make_dataset(config, opened.renderer, other),
            folder=opened.folder,
            resume_from=opened.resume_from,
            token_texts=partial(token_texts, opened.renderer.tokenizer),
        )
        finish_run(training, model=options.model, is_complete=await train(training))
    finally:
        opened.folder.close()


if __name__ == "__main__":
    asyncio.run(main(parse_options(Config, None)))
