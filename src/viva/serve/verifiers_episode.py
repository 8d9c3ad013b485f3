"""One episode of an environment of verifiers: the command of an agent, for a Python that has verifiers.

It reads a line of JSON, ``{"question": NUMBER OF THE TASK}``, from its standard input, asks the policy at
``OPENAI_BASE_URL`` and writes the episode's reward, see `viva.serve.agents`. Its arguments are the id of the taskset
and the fields of its configuration, as JSON. verifiers 0.4 knows tasksets by name; before it, an environment was what
``load_environment`` of a module returns, and its fields are that function's arguments. The policy has no tools: what an
environment needs beyond a chat, verifiers refuses itself. The file is run as a script that imports nothing of Viva,
since verifiers may live in an environment of its own.
"""

import asyncio
import itertools
import json
import os
import sys
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

_HARNESS = "viva_one_reply"


def _harness() -> ModuleType:
    """A module with the harness: what asks the policy, and where verifiers finds it by name."""
    vf: Any = import_module("verifiers.v1")
    openai: Any = import_module("openai")

    class OneReply(vf.Harness[vf.HarnessConfig]):
        """Asks for one reply to the conversation so far."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True  # launched again behind each message of the environment
        NEEDS_CONTAINER = False
        EXECUTES_CODE = False

        async def launch(self, *given: Any, **named: Any) -> Any:
            """Ask the interception server, which passes the call on and keeps it."""
            names = ("ctx", "trace", "runtime", "endpoint", "secret", "mcp_urls", "data")
            known = {**dict(zip(names, given, strict=False)), **named}
            system, prompt = self.resolve_prompt(known["data"])
            messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [each.model_dump(include={"role", "content"}) for each in prompt or ()]
            async with openai.AsyncOpenAI(
                base_url=known["endpoint"], api_key=known["secret"], max_retries=0
            ) as client:
                said = await client.chat.completions.create(model=known["ctx"].model, messages=messages)
            return vf.ProgramResult(exit_code=0, stdout=said.choices[0].message.content or "", stderr="")

    made: Any = ModuleType(_HARNESS)
    made.OneReply = OneReply
    made.__all__ = ["OneReply"]
    return made


async def reward_of(taskset: str, options: dict[str, object], number: int) -> float:
    """Play one task of a taskset of verifiers 0.4.

    Returns:
        The rewards of its agents, averaged.

    Raises:
        RuntimeError: If the episode failed.
    """
    vf: Any = import_module("verifiers.v1")
    loaders: Any = import_module("verifiers.v1.utils.loaders")
    roles_of: Any = import_module("verifiers.v1.configs.agent").agent_config_fields
    fields: dict[str, object] = {"taskset": {"id": taskset, **options}}
    role = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}}
    fields |= dict.fromkeys(roles_of(loaders.resolve_env_config(fields)), role)
    env = loaders.load_environment(loaders.resolve_env_config(fields))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        context = vf.ModelContext(model="policy", client=client)
        episode = await env.run_episode(_task(env.taskset, number), context)
    if not episode.ok:
        errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
        raise RuntimeError(
            "; ".join(f"{each.type}: {each.message}" for each in errors) or "the episode failed"
        )
    return sum(trace.reward for trace in episode.traces) / len(episode.traces)


def _task(tasks: Any, number: int) -> Any:
    """The task of a number; numbers beyond the last begin anew."""
    if not tasks.bounded:
        return next(itertools.islice(iter(tasks), number, None))
    known = list(tasks)
    return known[number % len(known)]


async def loaded_reward_of(name: str, options: dict[str, object], number: int) -> float:
    """Play one task of an environment as verifiers had them before 0.4.

    Raises:
        RuntimeError: If the episode failed.
    """
    vf: Any = import_module("verifiers")
    types: Any = import_module("verifiers.types")
    env = vf.load_environment(name, **options)
    tasks = env.get_dataset()
    client = types.ClientConfig(
        api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=0
    )
    played = await env.run_rollout(dict(tasks[number % len(tasks)]), client, "policy", {})
    if played.get("error"):
        raise RuntimeError(f"the episode failed: {played['error']}")
    return float(played["reward"])


def main(taskset: str, options: str) -> None:
    """Play the task whose number is on the standard input, and write its reward."""
    sys.path.insert(0, os.getcwd())  # tasksets of the user's own
    number = int(json.loads(sys.stdin.readline())["question"])
    play = loaded_reward_of
    if version("verifiers").startswith("0.4."):
        sys.modules[_HARNESS] = _harness()
        play = reward_of
    reward = asyncio.run(play(taskset, json.loads(options), number))
    sys.stdout.write(f"{reward}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
