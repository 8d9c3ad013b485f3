"""The examples with tinker-cookbook: its environments in Viva's loop, its loops on Viva's engine."""

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tinker
from random_models import make_model

import viva.cli
import viva.engine
from viva.engine import LocalServiceClient

ROOT = Path(__file__).parents[1]


def example(name: str) -> Any:
    """An example, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model that speaks ChatML."""
    return str(make_model(tmp_path_factory.mktemp("model"), "qwen3", names_labels=False))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def textarena(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the package of that name: a game of up to four moves, in which the second mover wins."""
    games: list[Any] = []

    class Game:
        def __init__(self) -> None:
            self.state = SimpleNamespace(current_player_id=0, done=False, rewards=None)
            self.moves: list[tuple[int, str]] = []
            games.append(self)

        def reset(self, num_players: int) -> None:
            assert num_players == 2

        def get_observation(self) -> tuple[int, str]:
            return (
                self.state.current_player_id,
                f"Player {self.state.current_player_id}, move {len(self.moves)}",
            )

        def step(self, move: str) -> tuple[bool, dict[str, Any]]:
            self.moves.append((self.state.current_player_id, move))
            self.state.current_player_id = 1 - self.state.current_player_id
            if len(self.moves) == 4:
                self.state.done, self.state.rewards = True, {0: -1, 1: 1}
            return self.state.done, {}

        def close(self) -> None:
            assert self.state.done

    module = ModuleType("textarena")
    vars(module).update(make=lambda env_id: Game(), Env=object, State=object)
    monkeypatch.setitem(sys.modules, "textarena", module)
    monkeypatch.delitem(sys.modules, "tinker_cookbook.recipes.multiplayer_rl.text_arena.env", raising=False)
    return games


SMALL = {"num_steps": 2, "groups_per_step": 2, "group_size": 2, "max_tokens": 6}


async def test_the_examples_default_trains_the_built_in_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cookbook = example("cookbook_environments")
    sizes = {"num_steps": 3, "groups_per_step": 4, "group_size": 4}
    await cookbook.main(cookbook.Config(log_path=str(tmp_path / "run"), **sizes))
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(row["optim/steps"] for row in rows) >= 2
    assert all(0 < row["correct"] < 1 for row in rows)
    assert "warning" not in capsys.readouterr().out


async def test_an_example_that_trains_nothing_says_why_and_what_to_do(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cookbook = example("cookbook_environments")
    options = {"env": "arithmetic", "log_path": str(tmp_path / "run"), "model_name": model}
    await cookbook.main(cookbook.Config(**options, **SMALL))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 2
    assert "replies are cut at max_tokens" in warnings[0]
    assert "Raise max_tokens" in warnings[0]
    assert "the optimiser took no step" in warnings[1]


@pytest.mark.parametrize("env", ["arithmetic", "guess_number", "twenty_questions"])
async def test_the_cookbooks_environments_train_in_vivas_loop(tmp_path: Path, model: str, env: str) -> None:
    cookbook = example("cookbook_environments")
    await cookbook.main(cookbook.Config(env=env, log_path=str(tmp_path / "run"), model_name=model, **SMALL))
    transcripts = lines(tmp_path / "run" / "transcripts.jsonl")
    assert len(transcripts) == 4
    assert not any(row["void"] for row in transcripts)
    rewards = {reward for row in transcripts for reward in row["rewards"]}
    # what a random model earns there: penalties for what is not in the right form, or nothing
    assert rewards == {"arithmetic": {-0.1}, "guess_number": {-10.0}, "twenty_questions": {0.0}}[env]
    checkpoint = lines(tmp_path / "run" / "checkpoints.jsonl")[-1]
    assert (checkpoint["next_step"], checkpoint["final"]) == (2, True)


async def test_a_run_of_an_own_environment_has_words_a_report_an_adapter_and_can_be_exported(
    tmp_path: Path, model: str
) -> None:
    cookbook, run = example("cookbook_environments"), tmp_path / "run"
    config = cookbook.Config(env="arithmetic", log_path=str(run), model_name=model, **SMALL)
    await cookbook.main(config)
    for row in lines(run / "tokens.jsonl"):
        assert all("".join(turn["pieces"]) for turn in row["turns"])
    assert "<title>run: Viva report</title>" in (run / "report.html").read_text()
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    to = tmp_path / "exported"
    assert await asyncio.to_thread(viva.cli.main, ["export", str(run), f"to={to}"]) == 0
    assert (to / "model" / "model.safetensors").is_file()
    await cookbook.main(config)  # a complete run is left as it is


async def test_two_players_of_the_cookbook_play_each_other_in_vivas_loop(
    tmp_path: Path, model: str, textarena: list[Any]
) -> None:
    cookbook = example("cookbook_environments")
    run = tmp_path / "run"
    await cookbook.main(cookbook.Config(env="text_arena", log_path=str(run), model_name=model, **SMALL))
    assert [[player for player, _ in game.moves] for game in textarena] == [[0, 1, 0, 1]] * 4
    assert [row["rewards"] for row in lines(run / "transcripts.jsonl")] == [[-1.0, 1.0]] * 4
    metrics = lines(run / "metrics.jsonl")
    assert all(row["optim/grad_norm"] > 0 for row in metrics)


async def test_tic_tac_toe_of_textarena_is_played_by_two_players_of_the_policy(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("textarena")
    # a stand-in of another test may be in it
    monkeypatch.delitem(sys.modules, "tinker_cookbook.recipes.multiplayer_rl.text_arena.env", raising=False)
    cookbook = example("cookbook_environments")
    run = tmp_path / "run"
    await cookbook.main(cookbook.Config(env="text_arena", log_path=str(run), model_name=model, **SMALL))
    # a random model's first move is none, and loses
    assert [row["rewards"] for row in lines(run / "transcripts.jsonl")] == [[-2.0, 0.0]] * 4
    assert all(row["optim/grad_norm"] > 0 for row in lines(run / "metrics.jsonl"))


def conversations(folder: Path) -> str:
    path = folder / "conversations.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes, gladly."}]}
        for n in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def quiet_cookbook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cookbook's loops without their changes to the process: log handlers, signal handlers."""
    from tinker_cookbook.utils import ml_log

    monkeypatch.setattr(ml_log, "configure_logging_module", lambda *args, **kwargs: None)


@pytest.mark.usefixtures("quiet_cookbook")
@pytest.mark.parametrize("loop", ["supervised", "rl", "preference"])
def test_the_cookbooks_loops_run_on_the_local_engine(tmp_path: Path, model: str, loop: str) -> None:
    cookbook = example("cookbook_training")
    real = tinker.ServiceClient
    run = tmp_path / "run"
    options = {"loop": loop, "model_name": model, "renderer_name": "qwen3_instruct", "log_path": str(run)}
    if loop == "supervised":
        options["conversations"] = conversations(tmp_path)
    cookbook.main(cookbook.Config(**options, num_steps=4, learning_rate=0.01))
    assert tinker.ServiceClient is real
    metrics = lines(run / "metrics.jsonl")
    assert len(metrics) == 4
    if loop == "supervised":
        assert metrics[-1]["train_mean_nll"] < metrics[0]["train_mean_nll"] - 0.5
    elif loop == "preference":
        assert metrics[-1]["dpo_loss"] < metrics[0]["dpo_loss"] - 0.05
        assert metrics[-1]["accuracy"] == 1.0
    else:
        assert all(row["optim/kl_sample_train_v2"] < 1e-6 for row in metrics)
    checkpoints = lines(run / "checkpoints.jsonl")
    last = checkpoints[-1]
    assert last["name"] == "final"
    client = LocalServiceClient().create_training_client_from_state_with_optimizer(last["state_path"])
    assert client.get_info().model_name == model
    # the same command again finds the run complete, or goes on from its checkpoint
    cookbook.main(cookbook.Config(**options, num_steps=4, learning_rate=0.01))
    assert len(lines(run / "metrics.jsonl")) == 4


def test_the_page_shows_the_switch_as_it_is() -> None:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    real = tinker.ServiceClient
    (code,) = [
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "install" in block
    ]
    exec(compile(code, "environments.md", "exec"), {})
    assert tinker.ServiceClient is real
    assert all(f"examples/{name}" in page for name in ("cookbook_environments.py", "cookbook_training.py"))


def test_installed_clients_share_one_engine_and_undo_restores(tmp_path: Path, model: str) -> None:
    real = tinker.ServiceClient
    with viva.engine.install(state_dir=tmp_path) as switch:
        first = tinker.ServiceClient(user_metadata={"a": "b"}, display_name="me")
        second: Any = tinker.ServiceClient()
        assert isinstance(first, tinker.ServiceClient)
        path = first.create_lora_training_client(model, rank=2, seed=0).save_state("x").result().path
        assert second.create_training_client_from_state(path).get_info().lora_rank == 2
        assert [found.model_name for found in switch.service.get_server_capabilities().supported_models] == [
            model
        ]
        with pytest.raises(ValueError, match=r"base_url names a server, but viva\.engine\.install"):
            tinker.ServiceClient(base_url="http://there")
    assert tinker.ServiceClient is real
    switch.undo()
    assert tinker.ServiceClient is real


def test_switches_are_undone_in_reverse_order() -> None:
    real = tinker.ServiceClient
    outer = viva.engine.install()
    inner = viva.engine.install(LocalServiceClient())
    try:
        with pytest.raises(RuntimeError, match="undo the later one first"):
            outer.undo()
    finally:
        inner.undo()
        outer.undo()
    assert tinker.ServiceClient is real
    with pytest.raises(ValueError, match=r"a service or options for a new one, not both; got \['seed'\]"):
        viva.engine.install(LocalServiceClient(), seed=1)


async def test_a_checkpoint_tells_its_metadata_and_can_be_deleted(tmp_path: Path, model: str) -> None:
    service = LocalServiceClient(state_dir=tmp_path)
    client = service.create_lora_training_client(model, rank=2, seed=0, user_metadata={"renderer_name": "x"})
    path = (await client.save_state("x")).path
    rest = service.create_rest_client()
    run = await rest.get_training_run_by_tinker_path_async(path)
    assert (run.base_model, run.lora_rank, run.user_metadata) == (model, 2, {"renderer_name": "x"})
    await rest.delete_checkpoint_from_tinker_path_async(path)
    assert not Path(path).exists()
    with pytest.raises(ValueError, match="checkpoint"):
        rest.get_training_run_by_tinker_path(path)
    with pytest.raises(ValueError, match="checkpoint"):
        rest.delete_checkpoint_from_tinker_path(str(tmp_path))
