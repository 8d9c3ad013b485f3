"""Stand-ins for the package verifiers, as far as an episode touches it: 0.3.1, and 0.4.0 with a user who answers.

Names, arguments and results are those of the packages. `install` writes one of them into a folder for ``PYTHONPATH``.
"""

from pathlib import Path

_ASK = """
import json, os, urllib.request


def ask(base_url, key, model, messages):
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""

_BEFORE_0_4 = {
    "verifiers/__init__.py": """
from importlib import import_module


def load_environment(env_id, **env_args):
    return import_module(env_id).load_environment(**env_args)
""",
    "verifiers/types.py": """
from dataclasses import dataclass


@dataclass(kw_only=True)
class ClientConfig:
    api_base_url: str
    api_key_var: str
    max_retries: int
""",
    "capitals/__init__.py": """
import os

from asking import ask


class Environment:
    def __init__(self, fails):
        self.fails = fails

    def get_dataset(self):
        return [{"example_id": n, "prompt": [{"role": "user", "content": word}]} for n, word in enumerate("ab")]

    async def run_rollout(self, input, client, model, sampling_args):
        messages = list(input["prompt"])
        for turn in ("again", None):
            said = ask(client.api_base_url, os.environ[client.api_key_var], model, messages)
            messages.append({"role": "assistant", "content": said})
            if turn:
                messages.append({"role": "user", "content": turn})
        return {"reward": len(said) / 2, "error": "ran out of paper" if self.fails else None}


def load_environment(fails=False):
    return Environment(fails)
""",
}

_0_4 = {
    "verifiers/__init__.py": "",
    "verifiers/v1/utils/__init__.py": "",
    "verifiers/v1/configs/__init__.py": "",
    "verifiers/v1/__init__.py": """
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

ConfigT = TypeVar("ConfigT")


class HarnessConfig:
    pass


class Harness(Generic[ConfigT]):
    APPENDS_SYSTEM_PROMPT = False
    SUPPORTS_RESUME = False
    NEEDS_CONTAINER = True

    def resolve_prompt(self, task):
        assert self.APPENDS_SYSTEM_PROMPT
        return task.system_prompt, task.prompt


@dataclass(kw_only=True)
class ProgramResult:
    exit_code: int
    stdout: str
    stderr: str


@dataclass(kw_only=True)
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass(kw_only=True)
class ModelContext:
    model: str
    client: Any
""",
    "verifiers/v1/configs/agent.py": """
def agent_config_fields(config):
    return ("player",)
""",
    "verifiers/v1/utils/loaders.py": """
from importlib import import_module
from types import SimpleNamespace


def resolve_env_config(fields):
    return SimpleNamespace(**fields)


def load_environment(config):
    made = import_module(config.taskset["id"])
    return made.Environment(config)
""",
    "guessing/__init__.py": """
import contextlib
import os
from importlib import import_module
from types import SimpleNamespace


class Message(SimpleNamespace):
    def model_dump(self, include):
        return {name: value for name, value in vars(self).items() if name in include}


class Tasks:
    def __init__(self, endless):
        self.bounded = not endless

    def __iter__(self):
        yield from "abc"


class Environment:
    def __init__(self, config):
        self.options = {name: value for name, value in config.taskset.items() if name != "id"}
        self.taskset = Tasks(self.options.get("endless", False))
        assert config.player["runtime"] == {"type": "subprocess"}
        found = import_module(config.player["harness"]["id"])  # as verifiers finds a harness
        self.harness = getattr(found, found.__all__[0])()

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        assert self.harness.SUPPORTS_RESUME and not self.harness.NEEDS_CONTAINER
        data = SimpleNamespace(system_prompt="Be brief.", prompt=task)
        url, secret = context.client.base_url, os.environ[context.client.api_key_var]
        talk = [Message(role="user", content=task, id=0)]
        for word in ("Higher.", "Lower.", None):
            said = await self.harness.launch(context, None, None, url, secret, {}, data)
            assert said.exit_code == 0
            talk += [Message(role="assistant", content=said.stdout, id=1), Message(role="user", content=word, id=2)]
            data = SimpleNamespace(system_prompt="Be brief.", prompt=list(talk))
        failed = [SimpleNamespace(type="TaskError", message="no paper")] if self.options.get("fails") else []
        traces = [SimpleNamespace(reward=reward, errors=failed) for reward in (1.0, len(said.stdout) * 1.0)]
        return SimpleNamespace(ok=not failed, errors=[], traces=traces)
""",
}


def install(folder: Path, version: str) -> str:
    """Write a stand-in.

    Args:
        folder: An empty folder.
        version: ``0.3.1``, which has the environment ``capitals``, or ``0.4.0``, which has the taskset ``guessing``.

    Returns:
        The folder, for ``PYTHONPATH``.
    """
    files = {"0.3.1": _BEFORE_0_4, "0.4.0": _0_4}[version]
    about = f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n"
    metadata = {f"verifiers-{version}.dist-info/METADATA": about}
    for name, text in (files | metadata | {"asking.py": _ASK}).items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return str(folder)
