"""How much the engine does at once."""

from dataclasses import dataclass, fields

__all__ = ["EngineLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Upper bounds that trade memory for speed. They do not change results beyond rounding."""

    decode_rows: int = 256
    """Sequences decoded together by one sampling snapshot."""
    prefill_tokens: int = 4096
    """Padded prompt tokens in one prefill batch (a longer prompt is a batch of its own)."""
    training_tokens: int = 4096
    """Tokens in one training micro-batch, padding included (a longer sequence is a micro-batch of its own)."""
    logits: int = 2**25
    """Logits held at once while training, prompt scoring or sampling."""
    prefix_cache_bytes: int = 2**28
    """Keys and values of finished sequences kept for prompts that continue them, per snapshot."""
    merged_models: int = 2
    """Snapshots whose merged weights are kept in memory."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "prefix_cache_bytes" else 1
            if value < least:
                raise ValueError(f"{field.name} must be at least {least}, not {value}.")
