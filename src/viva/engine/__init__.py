"""A Tinker-compatible engine in this process: PyTorch, ``transformers`` models and ``peft`` LoRA.

``LocalServiceClient`` stands where ``tinker.ServiceClient`` stands; the clients it creates have the same methods.
``install()`` puts it there for programs that make their clients themselves.
The names are imported on first use, so that ``import viva.engine`` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from viva.engine.sampling_client import LocalSamplingClient
    from viva.engine.scheduler import EngineLimits
    from viva.engine.service import LocalServiceClient, install
    from viva.engine.training_client import LocalTrainingClient

__all__ = ["EngineLimits", "LocalSamplingClient", "LocalServiceClient", "LocalTrainingClient", "install"]

_HOME = {
    "EngineLimits": "viva.engine.scheduler",
    "LocalSamplingClient": "viva.engine.sampling_client",
    "LocalServiceClient": "viva.engine.service",
    "LocalTrainingClient": "viva.engine.training_client",
    "install": "viva.engine.service",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
