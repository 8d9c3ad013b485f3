"""Metrics to Weights & Biases, for those who ask for it."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from viva.rl.seeds import derive_seed
from viva.rl.train import MetricSink

__all__ = ["check_wandb", "open_wandb"]


def check_wandb() -> None:
    """Fail early if the package is missing.

    Raises:
        ValueError: With the command that installs it.
    """
    if find_spec("wandb") is None:
        raise ValueError(
            "wandb_project needs the package wandb, which is not installed: pip install 'viva[wandb]'"
        )


def open_wandb(*, project: str, name: str | None, config: Mapping[str, Any], folder: Path) -> MetricSink:
    """A sink that logs to one W&B run; a resumed run goes on in the same one.

    Only the options in `config` are sent, no source code and no environment.
    """
    import wandb  # pyright: ignore[reportMissingImports] - an optional extra

    run: Any = wandb.init(
        project=project,
        name=name,
        id=f"viva-{derive_seed(str(folder.resolve())):08x}",
        resume="allow",
        config=dict(config),
        dir=str(folder),
        settings=wandb.Settings(disable_code=True, disable_git=True, save_code=False),
    )

    def log(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    return log
