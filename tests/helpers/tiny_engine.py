"""Tiny random models and short names, shared by the tests of the engine.

Weights are large, so that the next token depends strongly on every earlier one: with the usual small ones
all logits are nearly equal and most mistakes invisible.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from viva.engine import LocalTrainingClient

with_kernels = pytest.mark.skipif(os.environ.get("VIVA_KERNELS") == "off", reason="kernels are switched off")
"""Marks tests of kernels, and of what is in their place only where they are on."""

needs_targets = pytest.mark.skipif(
    not hasattr(tinker.SampleResponse, "target_prompt_logprobs"),
    reason="this version of the SDK has no such field",
)

EOS = 256
IM_END = 257
FAMILIES = ("gemma", "gemma2", "gemma3", "llama", "mistral", "qwen2", "qwen3")

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_WINDOW = 7
_KINDS = ["linear_attention", "full_attention"]
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def make_config(family: str) -> Any:
    import transformers

    heads = {"head_dim": 8}
    mixed = {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    configs = {
        "gemma": lambda: transformers.GemmaConfig(**_SIZES, **heads),
        "gemma2": lambda: transformers.Gemma2Config(
            **_SIZES, **heads, **mixed, attn_logit_softcapping=5.0, final_logit_softcapping=8.0
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(**_SIZES, **heads, **mixed),
        "llama": lambda: transformers.LlamaConfig(**_SIZES, **heads, tie_word_embeddings=False),
        "mistral": lambda: transformers.MistralConfig(**_SIZES, **heads, sliding_window=_WINDOW),
        "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
        "qwen3": lambda: transformers.Qwen3Config(**_SIZES, **heads, tie_word_embeddings=True),
        # experts kept in one tensor, beside shared ones and dense layers
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **(_SIZES | {"num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 16}),
            **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
            **{"first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **_SIZES,
            **heads,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            mlp_only_layers=[0],
        ),
        # layers of linear attention
        "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_SIZES, **heads, **_LINEAR, layer_types=_KINDS),
        "qwen3_next": lambda: transformers.Qwen3NextConfig(
            **_SIZES, **heads, **_LINEAR, layer_types=_KINDS, num_experts=4, moe_intermediate_size=16
        ),
    }
    return configs[family]()


def make_model(folder: Path, family: str) -> str:
    """The folder of a random model."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        transformers.AutoModelForCausalLM.from_config(make_config(family)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def make_tokenizer() -> Any:
    """Bytes, an end-of-text token, an end-of-turn token and a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>", "<|im_start|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def ints(tokens: list[int]) -> tinker.ModelInput:
    """A prompt."""
    return tinker.ModelInput.from_ints(tokens)


def params(**changes: Any) -> tinker.SamplingParams:
    """Sampling settings that run to ``max_tokens`` unless told otherwise."""
    return tinker.SamplingParams(**({"max_tokens": 8, "stop": [], "seed": 0} | changes))


def supervised(tokens: list[int], weights: list[float] | None = None) -> tinker.Datum:
    """A datum of next-token targets."""
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    if weights is not None:
        inputs["weights"] = weights
    return tinker.Datum(model_input=ints(tokens[:-1]), loss_fn_inputs=inputs)


def policy_datum(tokens: list[int], seed: int = 0, shift: float = 0.3) -> tinker.Datum:
    """A datum of a policy-gradient loss; the first half has no advantage."""
    generator = np.random.default_rng(seed)
    num = len(tokens) - 1
    advantages = generator.normal(size=num)
    advantages[: num // 2] = 0
    return tinker.Datum(
        model_input=ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": (-3 + shift * generator.normal(size=num)).tolist(),
            "advantages": advantages.tolist(),
        },
    )


def gradients(client: LocalTrainingClient) -> dict[str, torch.Tensor]:
    """Copies of what has been accumulated."""
    found = client._policy._parameters
    return {name: parameter.grad.clone() for name, parameter in found.items() if parameter.grad is not None}


def train(
    client: LocalTrainingClient, texts: list[list[int]], steps: int = 3, learning_rate: float = 0.03
) -> None:
    """Move the weights noticeably away from where they started."""
    for _ in range(steps):
        client.forward_backward([supervised(text) for text in texts], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=learning_rate)).result()


def plain_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logprobs of tokens 1 and up by one plain forward pass, ``[N - 1]``."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def run(coroutine: Any) -> Any:
    """Run an async program in a fresh event loop."""
    return asyncio.run(coroutine)


def weights(client: LocalTrainingClient) -> dict[str, torch.Tensor]:
    """Copies of what is trained."""
    return client._policy._weights()


def sample(
    client: Any, prompt: list[int], num_samples: int = 1, **changes: Any
) -> list[tinker.SampledSequence]:
    """The samples of a prompt."""
    return list(client.sample(ints(prompt), num_samples, params(**changes)).result().sequences)
