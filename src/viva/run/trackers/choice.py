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

_WANDB = "wandb"
_WITH_PROJECT = ("trackio", _WANDB)

DEFAULT_PROJECT = "viva"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerChoice:
    """One tracker."""

    name: str
    project: str = DEFAULT_PROJECT
    """Under which Trackio and Weights & Biases file the run."""
    run_name: str | None = None
    """The run's name there; ``None`` for that of its folder."""


def choose_trackers(
    texts: Sequence[str], *, wandb_project: str | None = None, wandb_name: str | None = None
) -> tuple[TrackerChoice, ...]:
    """Read the option ``trackers``: a name each, for some of them with ``:PROJECT``.

    Args:
        texts: The option.
        wandb_project: Another way to write ``wandb:PROJECT``.
        wandb_name: The run's name in Weights & Biases.

    Raises:
        ValueError: If one is unknown, named twice, or its package is not installed, with the command that installs it;
            or if the options contradict each other.
    """
    choices: list[TrackerChoice] = []
    for text in _with_project(texts, wandb_project, wandb_name):
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
                f"pip install 'viva-rl[{name}]'"
            )
        run_name = wandb_name if name == _WANDB else None
        choices.append(TrackerChoice(name=name, project=project or DEFAULT_PROJECT, run_name=run_name))
    return tuple(choices)


def _with_project(texts: Sequence[str], project: str | None, run_name: str | None) -> list[str]:
    """The option with the tracker that ``wandb_project`` asks for."""
    for option, value in (("wandb_project", project), ("wandb_name", run_name)):
        if value is not None and not value.strip():
            raise ValueError(f"{option} must be a name; got {value!r}. Give one, or leave the option out.")
    place = next((place for place, text in enumerate(texts) if text.partition(":")[0] == _WANDB), None)
    if place is None and project is None:
        if run_name is not None:
            raise ValueError(
                f"wandb_name={run_name} names a run in Weights & Biases, but trackers has no wandb: give "
                "wandb_project=PROJECT as well, or add wandb to trackers"
            )
        return list(texts)
    if place is None:
        return [*texts, f"{_WANDB}:{project}"]
    if project is None:
        return list(texts)
    if texts[place] not in (_WANDB, f"{_WANDB}:{project}"):
        raise ValueError(
            f"trackers={texts[place]} and wandb_project={project} name two projects; give one of them"
        )
    return [*texts[:place], f"{_WANDB}:{project}", *texts[place + 1 :]]


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
