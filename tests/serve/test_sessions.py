"""Who opens a session with a server ends it: runs however they end, and the other commands; the server lets go."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from sdk_heartbeats import heartbeats
from served_policies import TOKEN, Served, serving_policy, wait_for
from tiny_engine import ints, params

import viva
import viva.cli
from viva.recipes import FailedRunError
from viva.training import remote
from viva.training import service as sessions
from viva.training.service import EngineConfig, make_service

pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*(socket|Transport):pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", TOKEN)


@pytest.fixture(scope="module")
def served(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_policy(model, state_dir=tmp_path_factory.mktemp("states")) as server:
        yield server


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Sessions that were closed, each with how it ended."""
    told: list[tuple[str, str]] = []
    close = tinker.ServiceClient.close

    def recorded(service: Any, status: Any, detail: Any = None) -> Any:
        told.append((service._session_holder.get_session_id(), status))
        return close(service, status, detail)

    monkeypatch.setattr(tinker.ServiceClient, "close", recorded)
    return told


@pytest.fixture(autouse=True)
def no_heartbeat_survives() -> Iterator[None]:
    before = heartbeats()
    yield
    wait_for(lambda: heartbeats() <= before)


def test_heartbeats_are_found_while_a_session_is_open(served: Served) -> None:
    before = heartbeats()
    with tinker.ServiceClient(base_url=served.address, api_key=TOKEN) as service:
        service.create_sampling_client(base_model=served.service._core.model_names[0]).result()
        assert len(heartbeats() - before) == 1


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{served.address}/api/v1/{path}", json=body, headers={"X-API-Key": TOKEN})


def is_over(served: Served, session: str) -> bool:
    return post(served, "session_heartbeat", {"session_id": session}).status_code == 410


def train(model: str, address: str, path: Path, reward: Any = None, **options: Any) -> viva.Run:
    talk = viva.Protocol(
        rounds=[viva.Round("say", "Say something.", [])],
        reward=reward or (lambda talk: {0: 1.0, 1: len(talk.turns[0].text)}),
    )
    short: dict[str, Any] = {"steps": 1, "max_tokens": 4, "lora_rank": 4, "learning_rate": 1e-2}
    return viva.train(
        talk,
        model=model,
        prompts=["a", "b"],
        num_agents=2,
        batch_size=4,
        base_url=address,
        log_path=str(path),
        **(short | options),
    )


def test_a_run_ends_its_session_and_what_it_saved_stays(
    served: Served, model: str, tmp_path: Path, endings: list[tuple[str, str]]
) -> None:
    run = train(model, served.address, tmp_path / "run")
    ((session, status),) = endings
    assert status == "success"
    assert is_over(served, session)
    assert not any(name.startswith(session) for name in models_of(served))
    again = train(model, served.address, run.path, steps=2, behavior_if_exists="resume")
    assert len(again.metrics) == 2
    assert len(endings) == 2


def models_of(served: Served) -> list[str]:
    """Names of the models that clients train."""
    return list(served.tinker._models)


def test_a_run_that_fails_or_is_refused_ends_its_session(
    served: Served, model: str, tmp_path: Path, endings: list[tuple[str, str]]
) -> None:
    def reward(_: Any) -> Any:
        raise OSError("the reward's file is gone")

    with pytest.raises(FailedRunError):
        train(model, served.address, tmp_path / "failed", reward)
    with pytest.raises(ValueError, match="another"):
        train("another/model", served.address, tmp_path / "refused", renderer_name="role_colon")
    assert [status for _, status in endings] == ["errored", "errored"]
    assert all(is_over(served, session) for session, _ in endings)


def test_ctrl_c_ends_the_session(
    served: Served, model: str, tmp_path: Path, endings: list[tuple[str, str]]
) -> None:
    pressed: list[bool] = []

    def reward(_: Any) -> Any:
        if not pressed:  # conversations end together, and a second signal would end the process at once
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return {0: 1.0, 1: 0.0}

    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT"):
        train(model, served.address, tmp_path / "run", reward)
    ((session, status),) = endings
    assert status == "interrupted"
    assert is_over(served, session)


def test_a_run_whose_server_is_gone_ends_within_a_bound(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sessions.FAREWELL_S, "errored", 0.5)
    monkeypatch.setattr("viva.training.service.watched", partial(remote.watched, limit_s=0.0, every_s=0.1))
    gone: list[float] = []
    with ExitStack() as stack:
        served = stack.enter_context(serving_policy(model, state_dir=tmp_path / "states"))

        def reward(_: Any) -> Any:
            if not gone:
                stack.close()
                gone.append(time.monotonic())
            return {0: 1.0, 1: 0.0}

        with pytest.raises(FailedRunError, match="has been out of reach"):
            train(model, served.address, tmp_path / "run", reward)
    assert time.monotonic() - gone[0] < 10


@pytest.mark.parametrize("ending", ["success", "errored", "interrupted"])
async def test_an_end_that_nobody_hears_takes_no_longer_than_its_bound(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Any
) -> None:
    monkeypatch.setitem(sessions.FAREWELL_S, ending, 0.5)
    with serving_policy(model, state_dir=tmp_path) as served:
        service = make_service(EngineConfig(engine="remote", base_url=served.address), state_dir=tmp_path)
        await service.create_sampling_client(base_model=model)
    began = time.monotonic()
    await sessions.end_session(service, ending)
    assert 0.4 < time.monotonic() - began < 3


async def test_an_interrupt_of_the_farewell_is_obeyed_at_once(model: str, tmp_path: Path) -> None:
    with serving_policy(model, state_dir=tmp_path) as served:
        service = make_service(EngineConfig(engine="remote", base_url=served.address), state_dir=tmp_path)
        await service.create_sampling_client(base_model=model)
    leaving = asyncio.create_task(sessions.end_session(service, "success"))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert time.monotonic() - began < sessions.FAREWELL_S["success"] / 2


@pytest.mark.parametrize("command", ["eval", "screen"])
def test_other_commands_end_their_sessions(
    served: Served, model: str, tmp_path: Path, endings: list[tuple[str, str]], command: str
) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"query": "1+1?", "answer": "2"}\n' * 2)
    asked = {
        "eval": ["eval", model, f"test_prompts_path={problems}", "num_samples=1"],
        "screen": ["screen", model, str(problems), "num_samples=2", "num_pairs=0"],
    }[command]
    options = [f"base_url={served.address}", f"output={tmp_path}/out.json", "max_tokens=4"]
    assert viva.cli.main([*asked, *options]) == 0
    ((session, status),) = endings
    assert status == "success"
    assert is_over(served, session)


@pytest.mark.parametrize("suffix", ["", ":", ":train:0", "x"])
def test_the_end_of_no_session_is_answered_and_ends_nothing(served: Served, model: str, suffix: str) -> None:
    with tinker.ServiceClient(base_url=served.address, api_key=TOKEN) as service:
        client = service.create_lora_training_client(base_model=model, rank=4, seed=3).result()
        session = client.model_id.partition(":")[0]
        name = f"{session}{suffix}" if suffix else "never-opened"
        answer = post(served, f"sessions/{name}/finish", {"reason": {"type": "success"}, "detail": None})
        assert (answer.status_code, answer.json()) == (200, {})
        assert not is_over(served, session)
        assert client.save_state("still").result().path.startswith("tinker://")
    for _ in range(2):
        assert post(served, f"sessions/{session}/finish", {}).status_code == 200
    assert is_over(served, session)


def test_the_end_of_a_session_leaves_what_others_use(served: Served, model: str) -> None:
    with tinker.ServiceClient(base_url=served.address, api_key=TOKEN) as mine:
        with tinker.ServiceClient(base_url=served.address, api_key=TOKEN) as theirs:
            client = theirs.create_lora_training_client(base_model=model, rank=4, seed=3).result()
            path = client.save_weights_for_sampler("live").result().path
            state = client.save_state("here").result().path
            own = client.save_weights_and_get_sampling_client().result()
        sampler = mine.create_sampling_client(model_path=path).result()
        assert sampler.sample(ints([1, 2]), 1, params(max_tokens=2)).result().sequences
        assert mine.create_training_client_from_state_with_optimizer(state).result().get_info().lora_rank == 4
        chat = served.client().chat.completions.create(
            model=path, messages=[{"role": "user", "content": "hi"}], max_tokens=2
        )
        assert chat.model == path
        asked = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": 1},
            "sampling_session_id": own._sampling_session_id,
            "seq_id": 9,
        }
        gone = post(served, "asample", asked)
        assert gone.status_code == 404
        assert "its session is over" in gone.json()["detail"]
