"""An environment of tinker-cookbook, or one written for it, by name.

    viva train environment environment=arithmetic group_size=8 batch_size=32 model_name=<hub name or path>
    viva train environment environment=path.py:DATASET 'environment_options={"level": 3}' max_steps=50
    viva train environment environment=verifiers:TASKSET 'environment_options={"python": "verifiers-env/bin/python"}'

What is named is a data set builder, a data set class or a function that returns one; it is called with those of the
run's values that it takes (renderer, sizes, seed, steps) and with ``environment_options``.

``verifiers:TASKSET`` is a taskset of verifiers 0.4, or for 0.1.14 to 0.3 a module with ``load_environment``. verifiers
brings much with it, and 0.4 an ``openai`` below 3, so it may live in an environment of its own: each episode is a
process of a Python that has it, see `viva.serve.verifiers_episode`. Members of a group play the same task.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import util
from typing import TYPE_CHECKING, Any

import chz
from packaging.version import Version

from viva.loopback import check_packages
from viva.recipes.config import DataOptions, RecipeConfig
from viva.recipes.reward import refuse_unused
from viva.selfplay.user_code import is_target, load_target, source_digests

if TYPE_CHECKING:
    from tinker_cookbook.rl.types import RLDataset

    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.training.loop import Training

_COOKBOOK = "tinker_cookbook.recipes"
NAMED = {
    "arithmetic": f"{_COOKBOOK}.math_rl.arithmetic_env:ArithmeticDataset",
    "gsm8k": f"{_COOKBOOK}.math_rl.math_env:Gsm8kDatasetBuilder",
    "guess_number": f"{_COOKBOOK}.multiplayer_rl.guess_number.env:GuessNumberDatasetBuilder",
    "math": f"{_COOKBOOK}.math_rl.math_env:MathDatasetBuilder",
    "text_arena": f"{_COOKBOOK}.multiplayer_rl.text_arena.env:TwoPlayerTextArenaDatasetBuilder",
    "twenty_questions": f"{_COOKBOOK}.multiplayer_rl.twenty_questions.env:TwentyQuestionsDatasetBuilder",
}
"""The cookbook's environments that have a short name; any other goes by ``module:CLASS``."""

_OURS = "viva"
"""The cookbook's name for the run's own renderer and tokenizer."""

_UNUSED = (
    *chz.chz_fields(DataOptions),
    *("system_prompt", "num_agents", "personas", "on_failure", "grader"),
)

_VERIFIERS = "verifiers:"
_ASK_VERSION = "from importlib.metadata import version; print(version('verifiers'))"
_REMEDY = (
    "make an environment for it, python -m venv verifiers-env && verifiers-env/bin/pip install 'verifiers>=0.4,<0.5' "
    "(or 'verifiers<0.4' for a package with load_environment), "
    'and name it: \'environment_options={"python": "verifiers-env/bin/python"}\''
)
_OLDEST = Version("0.1.14")
_MINOR = ((0, 1), (0, 2), (0, 3), (0, 4))
_TIMEOUT_S = 600.0
_MOST_PROCESSES = 8


@chz.chz
class Config(RecipeConfig):
    """Options of an environment."""

    environment: str = chz.field(
        doc="arithmetic, gsm8k, guess_number, math, text_arena, twenty_questions, verifiers:TASKSET, module:CLASS or "
        "path.py:FUNCTION"
    )
    environment_options: dict[str, float | str | bool] | None = chz.field(
        default=None, doc="arguments of the environment, by name"
    )
    group_size: int = chz.field(default=4, doc="trajectories that are compared with one another")
    batch_size: int | None = chz.field(
        default=None, doc="trajectories per step; default: the largest multiple of group_size up to 128"
    )
    max_steps: int | None = chz.field(default=20, doc="steps of the run")
    num_test_conversations: int = chz.field(default=0, doc="without effect here")

    log_path: str = "runs/environment"

    def make_plan(self) -> Plan:
        """Check all options; neither a model nor the environment's data are loaded."""
        from viva.recipes.plan import BatchUnit, at_least, plan_run
        from viva.training.data import PromptItem

        at_least(self, {"group_size": 1})
        why = f"environment={self.environment} says what is asked, of whom, and who is right"
        refuse_unused(self, _UNUSED, why, RecipeConfig)
        if self.max_steps is None:
            raise ValueError("max_steps must say how long the run is; got none")
        if self.environment.startswith(_VERIFIERS):
            command_of(self.environment, self.environment_options or {})
            is_own = False
        else:
            _arguments(_made_by(self), {}, self)
            is_own = is_target(self.environment)
        return plan_run(
            self,
            recipe="environment",
            summary=f"{self.environment}, groups of {self.group_size}",
            unit=BatchUnit(samples=self.group_size, name="group_size", groups="groups"),
            record={"user_code": source_digests(self.environment)} if is_own else None,
            items=([PromptItem(question=self.environment)], []),
        )

    async def build_training(self, plan: Plan, opened: OpenRun) -> Training:
        """The loop's parts for an open run."""
        from viva.recipes.loop import make_training

        if self.environment.startswith(_VERIFIERS):
            dataset = _verifiers_tasks(self, plan, opened)
        else:
            dataset = await _dataset(self, plan, opened)
        return await make_training(plan, opened, None, dataset=dataset)


def _made_by(config: Config) -> Any:
    target = NAMED.get(config.environment, config.environment)
    if not is_target(target):
        raise ValueError(
            f"unknown environment {config.environment!r}; allowed: {', '.join(NAMED)}, module:CLASS or path.py:FUNCTION"
        )
    try:
        made_by = load_target(target)
    except ImportError as error:
        raise ValueError(
            f"environment={config.environment} needs a package that is not there: {error}. docs/environments.md lists "
            "which extra of tinker-cookbook brings it"
        ) from error
    if not callable(made_by):
        raise ValueError(
            f"environment={config.environment} must be a class or a function; got {type(made_by).__name__}"
        )
    return made_by


def _arguments(made_by: Any, known: dict[str, Any], config: Config) -> dict[str, Any]:
    """The arguments it takes, of the run's values and the user's."""
    takes = inspect.signature(made_by).parameters
    own = dict(config.environment_options or {})
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    unknown = [] if anything else sorted(set(own) - set(takes))
    if unknown:
        raise ValueError(
            f"environment_options names {unknown[0]!r}, which {config.environment} does not take; it takes "
            f"{', '.join(takes)}"
        )
    return {name: value for name, value in known.items() if name in takes} | own


async def _dataset(config: Config, plan: Plan, opened: OpenRun) -> RLDataset:
    from tinker_cookbook.renderers import register_renderer
    from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
    from tinker_cookbook.tokenizer_utils import register_tokenizer

    from viva.engine import LocalServiceClient, install
    from viva.training.data import FirstSteps

    num_steps, groups = len(plan.order), plan.order.groups_per_batch
    # by these names the cookbook finds the renderer in which text can never become a control token
    register_renderer(_OURS, lambda tokenizer, processor=None: opened.renderer)
    register_tokenizer(_OURS, lambda: opened.renderer.tokenizer)
    known = {
        "renderer": opened.renderer,
        "tokenizer": opened.renderer.tokenizer,
        **dict.fromkeys(("renderer_name", "model_name_for_tokenizer", "model_name"), _OURS),
        **dict.fromkeys(("batch_size", "groups_per_batch"), groups),
        **dict.fromkeys(("group_size", "train_group_size"), config.group_size),
        **dict.fromkeys(("n_batches", "num_batches", "num_steps"), num_steps),
        "seed": config.seed,
        "base_url": config.base_url,
    }
    made_by = _made_by(config)
    try:
        made = made_by(**_arguments(made_by, known, config))
        if isinstance(made, RLDatasetBuilder):
            with ExitStack() as stack:
                if isinstance(opened.service, LocalServiceClient):
                    # builders that ask for Tinker's client get this engine
                    stack.enter_context(install(opened.service))
                made = (await made())[0]
    except TypeError as error:
        raise ValueError(
            f"environment={config.environment} cannot be made: {error}; see environment_options"
        ) from error
    if not isinstance(made, RLDataset):
        raise ValueError(
            f"environment={config.environment} must make an RLDataset of tinker-cookbook; got {type(made).__name__}"
        )
    if len(made) < num_steps:
        raise ValueError(
            f"environment={config.environment} has {len(made)} batches of {groups} groups, and max_steps is "
            f"{num_steps}; give max_steps={len(made)}, or a smaller batch_size"
        )
    return FirstSteps(dataset=made, num_steps=num_steps)


def command_of(environment: str, options: Mapping[str, float | str | bool]) -> tuple[str, ...]:
    """The command that plays an episode.

    Args:
        environment: Behind ``verifiers:``, the taskset's id, or the module that has ``load_environment``.
        options: ``python``, the interpreter that has verifiers (default: this one), and fields of the taskset's
            configuration, or arguments of ``load_environment``.

    Raises:
        ValueError: If the interpreter has no verifiers of 0.1.14 to 0.4, or packages to serve the policy are missing.
    """
    check_packages("viva train environment")
    python = str(options.get("python", sys.executable))
    try:
        asked = subprocess.run(
            [python, "-P", "-c", _ASK_VERSION], capture_output=True, text=True, check=False
        )
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
    return python, "-P", script.origin, environment.removeprefix(_VERIFIERS), json.dumps(fields)


def _verifiers_tasks(config: Config, plan: Plan, opened: OpenRun) -> RLDataset:
    """One group of episodes for each task, in order; the script begins anew behind the last."""
    from tinker_cookbook.rl.types import RLDataset

    from viva.serve.agents import AgentCommand, AgentGroupBuilder
    from viva.serve.episodes import EpisodeServer

    server, size = EpisodeServer(opened.renderer), plan.order.groups_per_batch
    argv = command_of(config.environment, config.environment_options or {})
    command = AgentCommand(argv=argv, timeout_s=_TIMEOUT_S, slots=asyncio.Semaphore(_MOST_PROCESSES))

    class Tasks(RLDataset):
        def __len__(self) -> int:
            return len(plan.order)

        def get_batch(self, index: int) -> list[AgentGroupBuilder]:
            return [
                AgentGroupBuilder(
                    server=server,
                    command=command,
                    problem={"question": str(number), "answer": None},
                    group_size=config.group_size,
                )
                for number in range(index * size, (index + 1) * size)
            ]

    return Tasks()
