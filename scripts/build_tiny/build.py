"""The builder of the built-in policy: ``cd scripts; python -m build_tiny.build [output=FOLDER] [seed=0]``.

Five phases of next-token training on generated text (`build_tiny.texts`): sums, where an answer stands, and plain
answers; the whole mixture; comparisons of answers; judgements; rankings. Matrices learn by Muon (K. Jordan et al.,
2024), everything else by AdamW. Under an hour on two cores. Writes a folder that ``transformers`` loads, with
``card.json``, which says how it was made.
"""

import json
import logging
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from viva import tiny

from .reviews import PLAIN, Example, Pupil
from .texts import COMPARISONS, JUDGEMENTS, LESSONS, MIXTURE, ORDERS, Generator

logger = logging.getLogger(__name__)

EncodedExample = tuple[list[int], list[float]]

_VOCAB_SIZE = 1024
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PIECES = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '\\n' if not loop.first else '' }}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)
_PROMPT_WEIGHT = 0.02
_POOL = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """How the policy is raised. Sizes in tokens, steps and layers."""

    seed: int = 0
    lesson_steps: int = 500
    mixture_steps: int = 2000
    comparison_steps: int = 900
    judgement_steps: int = 500
    order_steps: int = 350
    tokens_per_step: int = 4096
    learning_rate: float = 1e-3
    """Of AdamW."""
    matrix_learning_rate: float = 4e-3
    """Of Muon, in AdamW's scale of updates."""
    warmup_steps: int = 30
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 4


def build_tokenizer(path: Path, *, seed: int, num_examples: int = 1500) -> PreTrainedTokenizerFast:
    """Train the tokenizer on text of every generator and save it to a folder."""
    rng = random.Random(seed)
    examples = [make(rng) for make in MIXTURE for _ in range(num_examples)]
    texts = [str(message["content"]) for example in examples for message in example.messages]
    texts += [example.reply for example in examples]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(_PIECES, "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=list(_CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=2048,
    )
    fast.save_pretrained(path)
    return PreTrainedTokenizerFast.from_pretrained(path)


def encode_example(example: Example, tokenizer: PreTrainedTokenizerFast) -> EncodedExample:
    """Token ids and loss weights of one example in the chat format.

    Returns:
        ``(tokens_T, weights_T)``: the prompt weighs little, the reply as its parts say.
    """
    start, end = tokenizer.vocab["<|im_start|>"], tokenizer.vocab["<|im_end|>"]

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    tokens_T: list[int] = []
    for index, message in enumerate(example.messages):
        newline = ids("\n") if index else []
        tokens_T += [*newline, start, *ids(f"{message['role']}\n"), *ids(str(message["content"])), end]
    tokens_T += [*ids("\n"), start, *ids("assistant\n")]
    weights_T = [_PROMPT_WEIGHT] * len(tokens_T)
    for text, weight in example.parts:
        part_T = ids(text)
        tokens_T += part_T
        weights_T += [weight] * len(part_T)
    return [*tokens_T, end], [*weights_T, 1.0]


def batches(
    shares: dict[Generator, float],
    tokenizer: PreTrainedTokenizerFast,
    *,
    tokens_per_batch: int,
    rng: random.Random,
    pupil: Pupil = PLAIN,
) -> Iterator[list[EncodedExample]]:
    """Endless batches of examples of similar length, each at most `tokens_per_batch` padded tokens."""
    generators, weights = list(shares), list(shares.values())
    while True:
        pool = [
            encode_example(make(rng, pupil), tokenizer) for make in rng.choices(generators, weights, k=_POOL)
        ]
        pool.sort(key=lambda item: len(item[0]))
        cuts: list[list[EncodedExample]] = [[]]
        for item in pool:
            if len(item[0]) * (len(cuts[-1]) + 1) > tokens_per_batch:
                cuts.append([])
            cuts[-1].append(item)
        rng.shuffle(cuts)
        yield from cuts


def _learning_rate_factor(step: int, num_steps: int, warmup_steps: int) -> float:
    """Linear warm-up, then half a cosine, within one phase."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def _optimizers(model: Qwen3ForCausalLM, config: BuildConfig) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW for embeddings and norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [
        torch.optim.Muon(
            matrices, lr=config.matrix_learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.05),
    ]


def _new_model(config: BuildConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(config.seed)
    heads = config.hidden_size // 64
    settings = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen3ForCausalLM(Qwen3Config.from_dict(settings))


def _loss(model: Qwen3ForCausalLM, items: Sequence[EncodedExample], pad: int) -> torch.Tensor:
    """Weighted mean cross-entropy of one padded batch, in nats per unit of weight."""
    length = max(len(tokens_T) for tokens_T, _ in items)
    tokens_BT = torch.tensor([tokens_T + [pad] * (length - len(tokens_T)) for tokens_T, _ in items])
    weights_BT = torch.tensor([weights_T + [0.0] * (length - len(weights_T)) for _, weights_T in items])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BTV = model(input_ids=tokens_BT[:, :-1]).logits
    loss_N = torch.nn.functional.cross_entropy(
        logits_BTV.float().flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="none"
    )
    weights_N = weights_BT[:, 1:].flatten()
    return (loss_N * weights_N).sum() / weights_N.sum()


def build(output: Path, config: BuildConfig) -> None:
    """Raise a policy and write it to `output`.

    Raises:
        FileExistsError: If the folder already holds a model.
    """
    if (output / "model.safetensors").exists():
        raise FileExistsError(f"{output} already holds a model; remove it or choose another output folder")
    tokenizer = build_tokenizer(output, seed=config.seed)
    model = _new_model(config, tokenizer)
    pad = tokenizer.vocab["<|endoftext|>"]
    for name, shares, num_steps in (
        ("lessons", LESSONS, config.lesson_steps),
        ("mixture", MIXTURE, config.mixture_steps),
        ("comparisons", COMPARISONS, config.comparison_steps),
        ("judgements", JUDGEMENTS, config.judgement_steps),
        ("orders", ORDERS, config.order_steps),
    ):
        model.bfloat16().float()  # each phase starts as from a saved model
        rng = random.Random(f"{config.seed} {name}")
        stream = batches(shares, tokenizer, tokens_per_batch=config.tokens_per_step, rng=rng)
        train_phase(model, stream, pad, name=name, num_steps=num_steps, config=config)
    model.bfloat16().save_pretrained(output)
    (output / "card.json").write_text(json.dumps({"config": asdict(config)}, indent=1) + "\n")


def train_phase(
    model: Qwen3ForCausalLM,
    stream: Iterator[list[EncodedExample]],
    pad: int,
    *,
    name: str,
    num_steps: int,
    config: BuildConfig,
) -> None:
    """One phase, with optimisers of its own."""
    optimizers = _optimizers(model, config)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: _learning_rate_factor(step, num_steps, config.warmup_steps)
        )
        for optimizer in optimizers
    ]
    started = time.monotonic()
    for step in range(num_steps):
        loss = _loss(model, next(stream), pad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step % 100 == 99:
            minutes = (time.monotonic() - started) / 60
            logger.info("%s %d of %d, loss %.3f, %.1f min", name, step + 1, num_steps, loss.item(), minutes)


def main(arguments: Sequence[str]) -> None:
    """Command line: ``output=FOLDER`` and any field of `BuildConfig` as ``name=value``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = dict(argument.split("=", 1) for argument in arguments)
    output = Path(options.pop("output", str(Path(tiny.__file__).parent / "model")))
    fields = BuildConfig.__dataclass_fields__
    unknown = sorted(set(options) - set(fields))
    if unknown:
        raise SystemExit(f"unknown option {unknown[0]!r}; known: output, {', '.join(fields)}")
    config = BuildConfig(**{name: type(fields[name].default)(value) for name, value in options.items()})
    build(output, config)


if __name__ == "__main__":
    main(sys.argv[1:])
