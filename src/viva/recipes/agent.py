"""An agent of your own, in any language, as the environment: it asks the policy as any OpenAI client does.

    viva train agent 'command=python agent.py' train_prompts_path=problems.jsonl model_name=<hub name or path>

Every episode is one process of the command. It reads its problem, one line of JSON, from its standard input;
``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` are in its environment. Its reward is the number in its last line of output,
or what it posts to ``/v1/reward``. What the policy told it is trained, token for token, against the other episodes of
the same problem.
"""

from __future__ import annotations

import asyncio
import math
import shlex
import shutil
from typing import TYPE_CHECKING

import chz

from viva.loopback import check_packages
from viva.recipes.config import RecipeConfig
from viva.recipes.reward import refuse_unused

if TYPE_CHECKING:
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.training.loop import Training


@chz.chz
class Config(RecipeConfig):
    """Options of an agent."""

    command: str = chz.field(doc="the agent, like 'python agent.py'; no shell reads it")
    group_size: int = chz.field(default=4, doc="episodes of one problem, which are compared with one another")
    batch_size: int | None = chz.field(
        default=None, doc="episodes per step; default: the largest multiple of group_size up to 128"
    )
    agent_timeout_s: float = chz.field(default=600.0, doc="longest time of an episode")
    max_processes: int = chz.field(default=8, doc="processes of the agent at once")
    num_test_conversations: int = chz.field(default=0, doc="without effect here")

    log_path: str = "runs/agent"

    def make_plan(self) -> Plan:
        """Check all options and read the problems; neither a model nor the agent is started."""
        from viva.recipes.plan import BatchUnit, at_least, plan_run

        check_packages("viva train agent")
        at_least(self, {"group_size": 1, "max_processes": 1})
        unused = ("num_agents", "personas", "on_failure")
        refuse_unused(self, unused, "an episode is one process of command", RecipeConfig)
        if not 0 < self.agent_timeout_s < math.inf:
            raise ValueError(
                f"agent_timeout_s must be a number of seconds above 0; got {self.agent_timeout_s}"
            )
        _arguments(self.command)
        return plan_run(
            self,
            recipe="agent",
            summary=f"{self.command}, groups of {self.group_size}",
            unit=BatchUnit(samples=self.group_size, name="group_size", groups="groups"),
        )

    async def build_training(self, plan: Plan, opened: OpenRun) -> Training:
        """The loop's parts for an open run."""
        from viva.recipes.loop import make_training
        from viva.serve.agents import AgentCommand, AgentGroupBuilder
        from viva.serve.episodes import EpisodeServer
        from viva.training.data import PromptDataset, PromptItem

        server, argv = EpisodeServer(opened.renderer), tuple(_arguments(self.command))
        slots = asyncio.Semaphore(self.max_processes)
        command = AgentCommand(argv=argv, timeout_s=self.agent_timeout_s, slots=slots)

        def make_builder(item: PromptItem, seed: int) -> AgentGroupBuilder:
            del seed  # the policy's samples have seeds of their own
            problem = {"question": item.question, "answer": item.answer}
            return AgentGroupBuilder(
                server=server, command=command, problem=problem, group_size=self.group_size
            )

        dataset = PromptDataset(order=plan.order, make_builder=make_builder)
        return await make_training(plan, opened, None, dataset=dataset)


def _arguments(command: str) -> list[str]:
    """The command's words, the first of which is a program that can be run."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"command={command!r} cannot be read: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ValueError(
            f"command={command!r} must begin with a program that can be run, like python; there is no "
            f"{words[0] if words else 'word'!r}"
        )
    return words
