"""What the tests of the pages share: reading a page, and a run whose engine is scripted."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tinker

from viva.cli import main
from viva.engine import LocalServiceClient
from viva.recipes.common import OpenRun, RunOptions
from viva.run.folder import prepare_run_folder
from viva.testing import ScriptedSamplingClient

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def tables(page: str, heading: str) -> list[list[list[str]]]:
    """Cells of the tables whose first heading begins with a word, without the two heading lines."""
    found: list[list[list[str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", page, re.M):
        rows = [
            [cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in block.splitlines()
        ]
        if rows[0][0].startswith(heading):
            found.append(rows[2:])
    return found


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def documented_options(page: str) -> dict[str, tuple[str, str]]:
    """Default and meaning by option; a row names several options with one default, or as many defaults."""
    found: dict[str, tuple[str, str]] = {}
    for row in (row for table in tables(page, "option") for row in table if len(row) == 3):
        names, defaults = codes(row[0]), codes(row[1])
        defaults = defaults * len(names) if len(defaults) == 1 else defaults
        for name, default in zip(names, defaults, strict=True):
            assert name not in found, f"{name} is documented twice"
            found[name] = (default, row[2])
    return found


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def generic(metric: str) -> str:
    """The name under which the first page documents a metric."""
    metric = re.sub(r"^agent_\d+/", "agent_<i>/", metric.removeprefix("test/conversation/"))
    metric = re.sub(r"^rollout/drop_rate/agent_\d+$", "rollout/drop_rate/agent_<i>", metric)
    metric = re.sub(r"^sign/.*", "sign/<figure>", metric)
    metric = re.sub(r"^test/direct_(avg|maj|pass)@\d+(_\w+)?$", "test/direct_<figure>@<n>", metric)
    metric = re.sub(r"^rollout/drop_rate/round_\d+$", "rollout/drop_rate/round_<r>", metric)
    return re.sub(
        r"^void/.*", "void/<metric>", re.sub(r"^rollout/errors/.*", "rollout/errors/<type>", metric)
    )


async def done(value: object) -> object:
    return value


class Trainer:
    """A training client that learns nothing; every snapshot is one scripted policy."""

    def __init__(self, sampler: ScriptedSamplingClient, state_dir: Path) -> None:
        self.sampler = sampler
        self.state_dir = state_dir

    def save_weights_and_get_sampling_client(self) -> ScriptedSamplingClient:
        return self.sampler

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
        return done(
            tinker.ForwardBackwardOutput(
                loss_fn_output_type="", loss_fn_outputs=outputs, metrics={"loss:sum": 0.0}
            )
        )

    def optim_step(self, adam_params):
        return done(tinker.OptimStepResponse(metrics={"grad_norm": 1.0}))

    def save_state(self, name):
        folder = self.state_dir / "weights" / name
        folder.mkdir(parents=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / file).touch()
        return done(SimpleNamespace(path=str(folder)))


def script_the_engine(monkeypatch: pytest.MonkeyPatch, sampler: ScriptedSamplingClient) -> None:
    """Recipes open a run whose every snapshot is the scripted policy."""

    async def open_run(options: RunOptions, check: Any = None) -> OpenRun:
        folder = prepare_run_folder(options.log_path, behavior="raise", config=options.record).open()
        client: Any = Trainer(sampler, folder.state_dir)
        return OpenRun(
            folder=folder,
            resume_from=None,
            service=LocalServiceClient(),
            client=client,
            renderer=sampler.renderer,
            context_window=None,
        )

    monkeypatch.setattr("viva.recipes.loop.open_run", open_run)


def printed(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """The output of a ``viva`` command that succeeds."""
    assert command.startswith("viva ")
    assert main(shlex.split(command)[1:]) == 0
    return capsys.readouterr().out
