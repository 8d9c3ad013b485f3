"""Trained models as GGUF files."""

from pathlib import Path

from viva.engine.gguf import is_gguf
from viva.engine.gguf_writing import Metadata, metadata_of_file, metadata_of_model, write_gguf
from viva.run.export import description_of, merged_model


def gguf_metadata(place: str, model: str, name: str) -> Metadata:
    """All but the weights of a GGUF file that is shown under a name.

    Args:
        place: Where the base model is. Of a GGUF file, everything is taken over.
        model: The base model as the engine loads it.
        name: In the file; its path says nothing to programs that load it.

    Raises:
        ValueError: If llama.cpp would not compute the same, or would cut text into other tokens.
    """
    if is_gguf(place):
        return metadata_of_file(place, name)
    config, tokenizer = description_of(model)
    return metadata_of_model(config, tokenizer, name)


def export_gguf(state_path: str, *, model: str, precision: str, metadata: Metadata, file: Path) -> None:
    """Write the base model with a saved adapter merged into it, or a model of which all was trained.

    Adapters are merged in bfloat16 for that precision, as the engine does, and else in float32, which then is rounded.

    Raises:
        ValueError: If the state is damaged, or of another model, or has weights that are too large for float16.
    """
    merged, _ = merged_model(state_path, model, precision if precision == "bfloat16" else "float32")
    write_gguf(file, merged, metadata, precision)
