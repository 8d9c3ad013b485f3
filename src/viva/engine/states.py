"""What a checkpoint of ours says about itself, and clients made from one."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from viva.engine.checkpoint import read_checkpoint
from viva.engine.core import Core
from viva.engine.decoder import Decoder
from viva.engine.futures import LocalFuture
from viva.engine.lora import ALPHA, AdapterSettings
from viva.engine.model_folder import check_base, model_digests
from viva.engine.policy import Policy, stored_builder
from viva.engine.sampling_client import LocalSamplingClient

__all__ = ["State", "check_base_of", "describe", "open_policy", "open_sampling_client", "read_state"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A checkpoint whose files were found undamaged."""

    folder: Path
    base_model: str
    settings: AdapterSettings
    num_steps: int
    user_metadata: dict[str, str]
    base_digests: dict[str, str]
    """Of the base model, see `viva.engine.model_folder.model_digests`; empty where they were not recorded."""


def describe(policy: Policy, user_metadata: dict[str, str]) -> dict[str, Any]:
    """The description that `read_state` reads."""
    name = policy.base.name
    return {
        "base_model": os.path.abspath(name) if os.path.isdir(name) else name,
        "base_digests": policy.base.digests,
        "adapter": policy.settings.to_json(),
        "alpha": ALPHA,
        "num_steps": policy.optimizer.num_steps,
        "user_metadata": user_metadata,
    }


def read_state(path: str) -> State:
    """Read and check a checkpoint.

    Raises:
        ValueError: It is not one, or it is damaged.
    """
    folder = Path(path)
    manifest = read_checkpoint(folder)
    try:
        return State(
            folder=folder,
            base_model=manifest["base_model"],
            settings=AdapterSettings(**manifest["adapter"]),
            num_steps=manifest["num_steps"],
            user_metadata=manifest["user_metadata"],
            base_digests={
                str(part): str(digest) for part, digest in manifest.get("base_digests", {}).items()
            },
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path!r} does not describe a model ({error!r}); use another checkpoint."
        ) from error


def check_base_of(state: State, name: str, found: Mapping[str, str]) -> None:
    """Refuse a base model other than the one that a checkpoint was saved on.

    Args:
        state: The checkpoint.
        name: Path or hub name of the base model that it is to be used with.
        found: Its digests.

    Raises:
        ValueError: The two differ.
    """
    # of before digests were recorded: what the name stands for today
    recorded = state.base_digests or model_digests(state.base_model)
    is_checked = check_base(
        f"the checkpoint {str(state.folder)!r}", recorded, name, found, was=state.base_model
    )
    if not (is_checked and state.base_digests):
        why = (
            "its files are not on this machine"
            if state.base_digests
            else "the checkpoint has no record of it"
        )
        _log.warning("Whether %r is the base model of %s cannot be checked: %s.", name, state.folder, why)


def open_policy(core: Core, path: str, base_model: str | None, *, optimizer: bool) -> tuple[Policy, State]:
    """A policy that continues from a checkpoint.

    Args:
        core: The engine.
        path: Returned by ``save_state``.
        base_model: Where the base model is now, if it has moved.
        optimizer: Take over the optimiser's state too.

    Raises:
        ValueError: The checkpoint cannot be read or is of another model.
    """
    state = read_state(path)
    base = core.base_model(base_model or state.base_model)
    check_base_of(state, base.name, base.digests)
    policy = Policy(base, state.settings, core.limits)
    policy.load(state.folder, num_steps=state.num_steps if optimizer else None)
    return policy, state


def open_sampling_client(core: Core, path: str | None, base_model: str | None) -> LocalSamplingClient:
    """A sampling client for saved weights, or for a base model as it is.

    Args:
        core: The engine.
        path: Returned by ``save_weights_for_sampler`` or ``save_state``.
        base_model: Path or hub name; with ``path``, where the base model is now, if it has moved.

    Raises:
        ValueError: Neither is given, or the checkpoint cannot be read.
    """
    if path is None and base_model is None:
        raise ValueError("create_sampling_client needs model_path or base_model.")
    if path is None:
        base = core.base_model(base_model or "")
        build = base.decode_copy
    else:
        state = read_state(path)
        base = core.base_model(base_model or state.base_model)
        check_base_of(state, base.name, base.digests)
        build = stored_builder(base, state.settings, state.folder)
    decoder: LocalFuture[Decoder] = LocalFuture(core.pump, cancellable=False)
    decoder.resolve(core.new_decoder(build))
    return LocalSamplingClient(core, base, decoder, f"sampler-{core.count('sampler')}")
