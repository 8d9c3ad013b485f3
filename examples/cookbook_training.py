"""tinker-cookbook's own training loops on Viva's local engine: one line puts it where they look for a server.

python examples/cookbook_training.py loop=rl model_name=MODEL renderer_name=qwen3_instruct log_path=runs/cookbook
"""

import asyncio
import os
from typing import Any, Literal

import chz
import datasets
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.rl import train as train_rl
from tinker_cookbook.supervised import train as train_supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

import viva.engine
from viva.recipes.config import parse_options


@chz.chz
class Config:
    """Options of the example."""

    loop: Literal["supervised", "rl", "preference"]
    model_name: str
    renderer_name: str
    log_path: str
    conversations: str | None = chz.field(default=None, doc="JSONL of messages, for supervised")
    num_steps: int = 4
    learning_rate: float = 1e-3


@chz.chz
class PoliteAnswers(ComparisonDatasetBuilder):
    """Comparisons that always prefer the polite answer."""

    num_pairs: int = 8

    def get_train_and_test_datasets(self) -> tuple[datasets.Dataset, datasets.Dataset | None]:
        """The numbers that are asked about."""
        return datasets.Dataset.from_dict({"number": list(range(self.num_pairs))}), None

    def example_to_labeled_comparison(self, example: dict) -> LabeledComparison:
        """A polite answer A and a rude answer B to the same question."""
        question = {"role": "user", "content": f"Is {example['number']} a number?"}
        polite, rude = ({"role": "assistant", "content": text} for text in ("Yes, please.", "Go away."))
        comparison = Comparison(prompt_conversation=[question], completion_A=[polite], completion_B=[rude])
        return LabeledComparison(comparison=comparison, label="A")


def shared(config: Config) -> dict[str, Any]:
    """Options that all three loops know."""
    return {
        "log_path": config.log_path,
        "model_name": config.model_name,
        "recipe_name": "example",
        "renderer_name": config.renderer_name,
        "learning_rate": config.learning_rate,
        "lora_rank": 8,
        "eval_every": 0,
        "save_every": 2,
    }


def run_supervised(config: Config, common: ChatDatasetBuilderCommonConfig) -> None:
    """``tinker_cookbook.supervised.train``."""
    if config.conversations is None:
        raise ValueError("loop=supervised needs conversations=FILE.jsonl")
    data = FromConversationFileBuilder(common_config=common, file_path=config.conversations)
    asyncio.run(
        train_supervised.main(
            train_supervised.Config(
                **shared(config),
                dataset_builder=data,
                max_steps=config.num_steps,
                num_epochs=config.num_steps,
            )
        )
    )


def run_rl(config: Config) -> None:
    """``tinker_cookbook.rl.train`` on its arithmetic environment."""
    data = ArithmeticDatasetBuilder(
        batch_size=2,
        group_size=4,
        n_batches=config.num_steps,
        model_name_for_tokenizer=config.model_name,
        renderer_name=config.renderer_name,
    )
    asyncio.run(
        train_rl.main(
            train_rl.Config(
                **shared(config),
                dataset_builder=data,
                max_tokens=8,
            )
        )
    )


def run_preference(config: Config, common: ChatDatasetBuilderCommonConfig) -> None:
    """``tinker_cookbook.preference.train_dpo``."""
    data = DPODatasetBuilderFromComparisons(comparison_builder=PoliteAnswers(), common_config=common)
    train_dpo.main(
        train_dpo.Config(
            **shared(config),
            dataset_builder=data,
            max_steps=config.num_steps,
            num_epochs=config.num_steps,
        )
    )


def main(config: Config) -> None:
    """Run one of the three loops; it finds the local engine where it looks for Tinker's."""
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=config.model_name,
        renderer_name=config.renderer_name,
        max_length=256,
        batch_size=4,
    )
    with viva.engine.install(state_dir=os.path.join(config.log_path, "state")):
        if config.loop == "supervised":
            run_supervised(config, common)
        elif config.loop == "rl":
            run_rl(config)
        else:
            run_preference(config, common)


if __name__ == "__main__":
    main(parse_options(Config, None))
