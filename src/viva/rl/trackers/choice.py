"""Which trackers a run has, as the option ``trackers`` names them."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

__all__ = ["CONSOLE", "DEFAULT_PROJECT", "PACKAGES", "TrackerChoice", "choose_trackers"]

CONSOLE = "console"
"""The line per step on the terminal."""

PACKAGES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}
"""Trackers that need a package; the extra of viva that installs it has the tracker's name."""

_WITH_PROJECT = ("trackio", "wandb")

DEFAULT_PROJECT = "viva"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerChoice:
    """One tracker."""

    name: str
    project: str = DEFAULT_PROJECT
    """Under which Trackio and Weights & Biases file the run."""


def choose_trackers(texts: Sequence[str]) -> tuple[TrackerChoice, ...]:
    """Read the option ``trackers``: a name each, for some of them with ``:PROJECT``.

    Raises:
        ValueError: If one is unknown, named twice, or its package is not installed; with the command that installs it.
    """
    choices: list[TrackerChoice] = []
    for text in texts:
        name, colon, project = text.partition(":")
        if name not in (CONSOLE, *PACKAGES):
            raise ValueError(_unknown(name))
        if any(name == other.name for other in choices):
            raise ValueError(f"trackers names {name} twice; name it once")
        if colon and (name not in _WITH_PROJECT or not project):
            raise ValueError(
                f"trackers: {text!r} is not a tracker; a project goes behind {' or '.join(_WITH_PROJECT)}, as in "
                f"{_WITH_PROJECT[-1]}:my-project"
            )
        if name in PACKAGES and not _is_installed(PACKAGES[name]):
            raise ValueError(
                f"trackers={name} needs the package {PACKAGES[name]}, which is not installed: "
                f"pip install 'viva[{name}]'"
            )
        choices.append(TrackerChoice(name=name, project=project or DEFAULT_PROJECT))
    return tuple(choices)


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    # trackers like to leave folders of their own name behind, which look like packages without a file
    return spec is not None and spec.origin is not None


def _unknown(name: str) -> str:
    allowed = [CONSOLE, *PACKAGES]
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"unknown tracker {name!r}; allowed: {', '.join(allowed)}.{hint} "
        "(metrics.jsonl in log_path is always written.)"
    )
