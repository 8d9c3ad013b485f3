"""The built-in policy: a small language model that ships with the package, so that everything runs at once.

It has Qwen3's architecture and chat format, knows short arithmetic word problems, Viva's reply format and
how to judge pairs of solutions, all of it imperfectly: it starts mediocre and can learn. ``scripts/build_tiny`` of the
repository made it.
"""

from pathlib import Path

__all__ = ["MODEL_NAME", "model_path"]

MODEL_NAME = "tiny"
"""The name that selects the built-in policy wherever a model name is asked for."""


def model_path() -> Path:
    """Folder of the built-in policy, loadable by ``transformers``.

    Raises:
        FileNotFoundError: If the folder is not there (a broken installation).
    """
    path = Path(__file__).parent / "model"
    if not (path / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the built-in policy is missing at {path}; "
            "reinstall viva, or build it with `python -m build_tiny.build` in the folder scripts of its repository"
        )
    return path
