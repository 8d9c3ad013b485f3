"""Environments of verifiers by name: ``viva train environment environment=verifiers:TASKSET``.

Tasksets of verifiers 0.4, and what ``load_environment`` of a module returns for 0.1.14 to 0.3. verifiers brings much
with it, and 0.4 an ``openai`` below 3, so it may live in an environment of its own: each episode is a process of a
Python that has it, see `viva.serve.verifiers_episode`. Members of a group play the same task.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from typing import TYPE_CHECKING

from packaging.version import Version
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

from viva.loopback import check_packages

if TYPE_CHECKING:
    from viva.recipes.common import OpenRun

PREFIX = "verifiers:"
_VERSION = "from importlib.metadata import version; print(version('verifiers'))"
_REMEDY = (
    "make an environment for it, python -m venv verifiers-env && verifiers-env/bin/pip install 'verifiers>=0.4,<0.5' "
    "(or 'verifiers<0.4' for a package with load_environment), "
    'and name it: \'environment_options={"python": "verifiers-env/bin/python"}\''
)
_OLDEST = Version("0.1.14")
_MINOR = ((0, 1), (0, 2), (0, 3), (0, 4))
_TIMEOUT_S = 600.0
_MOST_PROCESSES = 8


def command_of(environment: str, options: Mapping[str, float | str | bool]) -> tuple[str, ...]:
    """The command that plays an episode.

    Args:
        environment: Behind `PREFIX`, the taskset's id, or the module that has ``load_environment``.
        options: ``python``, the interpreter that has verifiers (default: this one), and fields of the taskset's
            configuration, or arguments of ``load_environment``.

    Raises:
        ValueError: If the interpreter has no verifiers of 0.1.14 to 0.4, or packages to serve the policy are missing.
    """
    check_packages("viva train environment")
    python = str(options.get("python", sys.executable))
    try:
        asked = subprocess.run([python, "-P", "-c", _VERSION], capture_output=True, text=True, check=False)
        found = asked.stdout.strip()
    except OSError as error:
        raise ValueError(
            f"python={python} in environment_options cannot be run: {error}; {_REMEDY}"
        ) from error
    if not found or Version(found).release[:2] not in _MINOR or Version(found) < _OLDEST:
        has = f"verifiers {found}" if found else "no verifiers"
        raise ValueError(
            f"environment={environment} needs verifiers 0.1.14 to 0.4; {python} has {has}: {_REMEDY}"
        )
    script = util.find_spec("viva.serve.verifiers_episode")
    assert script is not None
    assert script.origin is not None
    fields = {name: value for name, value in options.items() if name != "python"}
    return python, "-P", script.origin, environment.removeprefix(PREFIX), json.dumps(fields)


@dataclass(frozen=True, kw_only=True)
class _Tasks(RLDataset):
    """One group of episodes for each task, in order; the script begins anew behind the last."""

    make_group: Callable[[int], EnvGroupBuilder]
    groups_per_batch: int
    num_steps: int

    def __len__(self) -> int:
        return self.num_steps

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of a step."""
        first = index * self.groups_per_batch
        return [self.make_group(first + place) for place in range(self.groups_per_batch)]


def tasks(
    opened: OpenRun, argv: tuple[str, ...], *, group_size: int, groups_per_batch: int, num_steps: int
) -> RLDataset:
    """The data set of a run."""
    from viva.serve.agents import AgentCommand, AgentGroupBuilder
    from viva.serve.episodes import EpisodeServer

    server = EpisodeServer(opened.renderer)
    command = AgentCommand(argv=argv, timeout_s=_TIMEOUT_S, slots=asyncio.Semaphore(_MOST_PROCESSES))

    def make_group(number: int) -> AgentGroupBuilder:
        problem: dict[str, str | None] = {"question": str(number), "answer": None}
        return AgentGroupBuilder(server=server, command=command, problem=problem, group_size=group_size)

    return _Tasks(make_group=make_group, groups_per_batch=groups_per_batch, num_steps=num_steps)
