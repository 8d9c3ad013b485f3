"""TRL's GRPOTrainer: one optimiser step of one prompt's completions, driven by its own training loop.

Settings: ``model`` (folder), ``size``, ``shape``, ``precision`` and ``micro_batch``, the rows that are trained at once.
Gradient checkpointing, its default, is off: it is slower. Completions are of one prompt even where others have distinct
prompts: a group needs two completions at least, and as nothing is shared between rows the work is the same.
"""

import tempfile
import time
from collections.abc import Iterator
from typing import Any

from channel import Channel, peak_gb
from work import LEARNING_RATE, LORA_ALPHA, LORA_RANK, SHAPES, prompts

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MANY = 1000


def train(channel: Channel) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    settings = channel.settings
    shape = SHAPES[settings["shape"]]
    bfloat16 = settings["precision"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    asked = [prompts(settings["model"], shape, number)[0] for number in range(MANY)]
    texts = [tokenizer.decode(tokens) for tokens in asked]
    assert tokenizer(texts[0])["input_ids"] == asked[0]
    steps: Iterator[int] = channel.steps()
    lengths: list[int] = []
    started = 0.0

    def rewards(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths[:] = [len(tokens) for tokens in completion_ids]
        return [float(index % 2) for index in range(len(completion_ids))]

    class Steps(TrainerCallback):
        """Waits for the word before every step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal started
            if next(steps, None) is None:
                raise SystemExit(0)
            started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            figures = {"cost": time.perf_counter() - started, "tokens": sum(lengths)}
            channel.send(figures | {"peak_gb": peak_gb()})

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=settings["micro_batch"],
            gradient_accumulation_steps=shape.rows // settings["micro_batch"],
            num_generations=shape.rows,
            max_completion_length=shape.completion,
            max_steps=MANY,
            learning_rate=LEARNING_RATE,
            temperature=1.0,
            bf16=bfloat16,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=MANY,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                settings["model"], dtype=torch.bfloat16 if bfloat16 else torch.float32
            ),
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=PROJECTIONS, lora_dropout=0.0
            ),
            callbacks=[Steps()],
        )
        channel.ready("trl", "torch", "transformers", "peft")
        trainer.train()


if __name__ == "__main__":
    train(Channel())
