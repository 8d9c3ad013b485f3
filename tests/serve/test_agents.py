"""Agents that run elsewhere play episodes, and what they were told is trained."""

import asyncio
import json
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import chz
import httpx
import pytest
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.rollouts import do_single_rollout
from tiny_engine import IM_END, make_tokenizer

import viva.cli
import viva.serve.agents
from viva.conversation.rendering import build_prompt, load_renderer
from viva.recipes import FailedRunError
from viva.recipes.agent import Config
from viva.recipes.loop import run_recipe
from viva.serve.agents import AgentCommand, AgentEnv, AgentFailedError, AgentGroupBuilder
from viva.serve.episodes import EpisodeServer

ROOT = Path(__file__).parents[2]

AGENT = """
import json, os, socket, sys

def post(path, body):
    # by hand: importing urllib takes longer than an episode, and there are hundreds
    address, sent = os.environ["OPENAI_BASE_URL"].removeprefix("http://"), json.dumps(body).encode()
    host, port = address.partition("/")[0].split(":")
    head = [f"POST /v1{path} HTTP/1.0", f"Host: {host}:{port}", "Content-Type: application/json"]
    head += [f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}", f"Content-Length: {len(sent)}"]
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall("\\r\\n".join([*head, "", ""]).encode() + sent)
        status, *_, answer = connection.makefile().read().split("\\n")
    if (code := status.split()[1]) != "200":
        sys.exit("HTTP Error " + code)
    return json.loads(answer)

def ask(*texts):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return post("/chat/completions", {"model": "policy", "messages": messages, "return_token_ids": True})

problem = json.loads(sys.stdin.readline())
"""
"""The beginning of every agent here."""

TWICE = """
first = ask(problem["question"])
second = ask(problem["question"], first["choices"][0]["message"]["content"], "Sure?")
print("\\n".join(json.dumps(each) for each in (first, second)), file=open(os.environ["HEARD"], "w"))
print("reward follows")
print(0.25)
"""

WORDS = ["yes", "no \u00e9"]


class Words:
    """A policy that says its words one after another, and remembers what it was asked."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()
        self.prompts: list[list[int]] = []

    async def __call__(self, model_input: Any, stop: Any, **_: Any) -> TokensWithLogprobs:
        assert stop == [IM_END]
        word = WORDS[len(self.prompts) % len(WORDS)]
        self.prompts.append(model_input.to_ints())
        tokens = [*self.tokenizer.encode(word, add_special_tokens=False), IM_END]
        return TokensWithLogprobs(tokens=tokens, maybe_logprobs=[-1.0] * len(tokens), stop_reason="stop")


@pytest.fixture
def server() -> EpisodeServer:
    return EpisodeServer(load_renderer(make_tokenizer(), model_name="nobody/qwen3"))


def env_of(server: EpisodeServer, code: str, *, timeout_s: float = 60.0, slots: int = 1) -> AgentEnv:
    argv = (sys.executable, "-c", AGENT + code)
    command = AgentCommand(argv=argv, timeout_s=timeout_s, slots=asyncio.Semaphore(slots))
    return AgentEnv(server, command, {"question": "2 + 3?", "answer": "5"})


async def test_what_an_agent_hears_is_what_is_recorded(
    server: EpisodeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = tmp_path / "heard"
    monkeypatch.setenv("HEARD", str(heard))
    policy = Words()
    trajectory = await do_single_rollout(policy, env_of(server, TWICE))
    answers = [json.loads(line) for line in heard.read_text().splitlines()]
    renderer = load_renderer(policy.tokenizer, model_name="nobody/qwen3")
    asked = [{"role": "user", "content": "2 + 3?"}]
    talk = [*asked, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "Sure?"}]
    for turn, answer, messages, word in zip(
        trajectory.transitions, answers, (asked, talk), WORDS, strict=True
    ):
        assert turn.ob.to_ints() == answer["prompt_token_ids"] == build_prompt(renderer, messages).to_ints()
        assert turn.ac.tokens == answer["choices"][0]["token_ids"]
        assert answer["choices"][0]["message"]["content"] == word
        assert answer["choices"][0]["finish_reason"] == "stop"
    assert [turn.reward for turn in trajectory.transitions] == [0.0, 0.25]
    assert policy.prompts == [turn.ob.to_ints() for turn in trajectory.transitions]


async def test_a_posted_reward_counts_more_than_the_last_line(server: EpisodeServer) -> None:
    code = 'ask("x"); post("/reward", {"reward": 2}); print(7)'
    trajectory = await do_single_rollout(Words(), env_of(server, code))
    assert trajectory.transitions[-1].reward == 2.0


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("", "asked the policy nothing; it ended with status 0"),
        ('ask("x")', "posted none, and its last line is no finite number: ''"),
        ('ask("x"); print("nan")', "no finite number: 'nan'"),
        ('ask("x"); print(1); sys.exit("broken")', "it ended with status 1: broken"),
        ('ask("x"); print(1); raise KeyError("oh")', "status 1: .*KeyError: 'oh'"),
        ('ask("x"); post("/reward", {"reward": "much"})', "HTTP Error 400"),
        ('post("/chat/completions", {"model": "m", "messages": [], "temperature": 2})', "HTTP Error 400"),
    ],
)
async def test_an_agent_that_fails_is_a_failed_rollout_with_its_reason(
    server: EpisodeServer, code: str, complaint: str
) -> None:
    env = env_of(server, code)
    with pytest.raises(AgentFailedError, match=f"(?s){complaint}"):
        await do_single_rollout(Words(), env)
    await env.close()


async def test_an_agent_that_takes_too_long_is_ended_with_all_it_started(server: EpisodeServer) -> None:
    code = """
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
ask(str(child.pid))
time.sleep(600)
"""
    policy = Words()
    env = env_of(server, code, timeout_s=3.0)
    with pytest.raises(AgentFailedError, match="took longer than 3 s"):
        await do_single_rollout(policy, env)
    child = asked_number(policy.prompts[0])
    await env.close()
    await gone(child)


def asked_number(prompt: list[int]) -> int:
    """The number that an agent asked."""
    return int(make_tokenizer().decode(prompt).partition("user\n")[2].partition("<")[0])


HELPER = """
import subprocess
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={apart})
ask(str(helper.pid))
"""
"""It inherits the agent's output."""


@pytest.mark.parametrize("code", ["print(1.0)", 'post("/reward", {"reward": 1})', 'sys.exit("broken")'])
async def test_an_agent_that_leaves_a_helper_ends_at_once_and_the_helper_with_it(
    server: EpisodeServer, code: str
) -> None:
    policy = Words()
    env = env_of(server, HELPER.format(apart=False) + code)
    async with asyncio.timeout(30):  # the episode has 60 s
        if "broken" in code:
            with pytest.raises(AgentFailedError, match="it ended with status 1: broken"):
                await do_single_rollout(policy, env)
        else:
            assert (await do_single_rollout(policy, env)).transitions[-1].reward == 1.0
        await env.close()
    await gone(asked_number(policy.prompts[0]))


@pytest.mark.parametrize("code", ["print(1.0)", "import time; time.sleep(600)"])
async def test_an_episode_ends_though_a_helper_with_a_session_of_its_own_holds_its_output(
    server: EpisodeServer, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viva.serve.agents, "_CLOSING_S", 0.2)
    env = env_of(server, HELPER.format(apart=True) + code)
    async with asyncio.timeout(30):
        observation, _ = await env.initial_observation()
        if "print" in code:
            assert (await env.step([IM_END])).reward == 1.0
        await env.close()
    os.kill(asked_number(observation.to_ints()), signal.SIGKILL)  # nothing else could find it


async def test_the_reward_is_found_at_the_end_of_a_long_output(server: EpisodeServer) -> None:
    code = 'ask("x"); print("word " * 10**6); print("word " * 10**6, file=sys.stderr); print(1.0)'
    assert (await do_single_rollout(Words(), env_of(server, code))).transitions[-1].reward == 1.0


async def test_a_call_whose_client_hung_up_before_its_turn_is_not_played(server: EpisodeServer) -> None:
    env = env_of(server, 'ask("first"); ask("second"); print(1.0)')
    observation, _ = await env.initial_observation()
    heard = [observation]
    async with httpx.AsyncClient() as client:
        body = {"model": "policy", "messages": [{"role": "user", "content": "given up"}]}
        headers = {"Authorization": f"Bearer {env._episode.key}"}
        asking = asyncio.ensure_future(
            client.post(f"{server.address}/chat/completions", json=body, headers=headers)
        )
        waiting = env._episode.calls
        async with asyncio.timeout(30):
            while waiting.empty():
                await asyncio.sleep(0.01)
            asking.cancel()
            while not waiting._queue[0].reply.done():
                await asyncio.sleep(0.01)
    while not (result := await env.step([IM_END])).episode_done:
        heard.append(result.next_observation)
    texts = [make_tokenizer().decode(each.to_ints()) for each in heard]
    assert ["first" in texts[0], "second" in texts[1], len(texts)] == [True, True, 2]


async def gone(process: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(60):
        while True:
            with suppress(FileNotFoundError):
                if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    await asyncio.sleep(0.01)
                    continue
            return


async def test_a_cancelled_episode_leaves_no_process_and_frees_its_slot(server: EpisodeServer) -> None:
    builder = AgentGroupBuilder(
        server=server,
        command=env_of(server, 'ask(str(os.getpid()))\nask("again")')._command,
        problem={"question": "x", "answer": None},
        group_size=1,
    )
    (env,) = await builder.make_envs()
    observation, _ = await env.initial_observation()
    process = asked_number(observation.to_ints())
    os.kill(process, 0)
    await builder.cleanup()
    await gone(process)
    assert not builder.command.slots.locked()


async def test_an_episode_is_reached_by_its_own_key_alone(server: EpisodeServer) -> None:
    async with server.open() as one, server.open() as other, httpx.AsyncClient() as client:
        url = f"{server.address}/reward"
        for key, status in ((one.key, 200), (one.key.partition(".")[0] + ".x", 410), ("x" + one.key, 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.post(url, json={"reward": 1}, headers=headers)).status_code == status
        assert (one.reward, other.reward) == (1.0, None)


@pytest.mark.parametrize(
    "content",
    [
        '{"reward": true}',
        '{"reward": "1"}',
        '{"reward": null}',
        '{"reward": NaN}',
        '{"reward": 1e999}',
        f'{{"reward": 1{"0" * 400}}}',
        '{"reward": 1, "more": 2}',
        "{}",
    ],
)
async def test_a_reward_that_is_no_finite_number_is_refused(server: EpisodeServer, content: str) -> None:
    async with server.open() as episode, httpx.AsyncClient() as client:
        headers = {"Authorization": f"Bearer {episode.key}"}
        answer = await client.post(f"{server.address}/reward", content=content, headers=headers)
        assert (answer.status_code, episode.reward) == (400, None)
        assert "with a finite number" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "complaint"),
    [
        ({"temperature": 0.5}, "temperature: the run decides it; leave it out"),
        ({"temperature": 0}, "temperature: the run decides it"),
        ({"seed": 0}, "seed: the run decides it"),
        ({"max_tokens": 5}, "max_tokens: the run decides it"),
        ({"stream": True}, "stream: an agent's episode has no such answer"),
        ({"tools": [{}]}, "tools is not supported"),
    ],
)
async def test_fields_that_an_episode_has_no_use_for_are_refused(
    server: EpisodeServer, field: dict[str, Any], complaint: str
) -> None:
    async with server.open() as episode, httpx.AsyncClient() as client:
        answer = await client.post(
            f"{server.address}/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "x"}], **field},
            headers={"Authorization": f"Bearer {episode.key}"},
        )
    assert answer.status_code == 400
    assert complaint in answer.json()["error"]["message"]


def run_config(tmp_path: Path, model: str, command: list[str], **options: Any) -> Config:
    return Config(
        command=shlex.join(command),
        model_name=model,
        train_prompts=["What is 2 + 3?"],
        group_size=2,
        batch_size=4,
        max_steps=2,
        max_tokens=12,
        learning_rate=1e-3,
        lora_rank=4,
        log_path=str(tmp_path / "run"),
        **options,
    )


def test_a_run_trains_what_its_agents_were_told(tmp_path: Path, model: str) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT + 'print(len(ask(problem["question"])["choices"][0]["token_ids"]))')
    assert asyncio.run(run_recipe(run_config(tmp_path, model, [sys.executable, str(agent)]))) is None
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/groups" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["rollout/groups"] == 2
        assert 1 <= row["reward/mean"] <= 12


def test_episodes_that_all_fail_are_a_void_group_and_no_reward(tmp_path: Path, model: str) -> None:
    agent = tmp_path / "agent.py"
    broken = 'if "2" in problem["question"]: sys.exit("out of order")\n'
    agent.write_text(AGENT + broken + 'ask(problem["question"]); print(0.0)')
    config = run_config(tmp_path, model, [sys.executable, str(agent)])
    config = chz.replace(config, train_prompts=["1 + 1?", "2 + 2?"], max_steps=1)
    assert asyncio.run(run_recipe(config)) is None
    (row, *_) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (row["rollout/groups"], row["rollout/void"], row["rollout/failed_seats"]) == (2, 1, 0)
    lines = (tmp_path / "run" / "transcripts.jsonl").read_text().splitlines()
    void, paid = sorted(map(json.loads, lines), key=lambda group: not group["void"])
    assert (void["rewards"], paid["rewards"]) == (None, [0.0, 0.0])
    assert "out of order" in void["void_reason"]


def test_a_step_of_which_all_episodes_fail_ends_the_run_with_the_reason(tmp_path: Path, model: str) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT + 'sys.exit("out of order")')
    with pytest.raises(
        FailedRunError, match=r"(?s)all 2 groups of step 1 failed: seat 0 failed.*out of order"
    ):
        asyncio.run(run_recipe(run_config(tmp_path, model, [sys.executable, str(agent)])))
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_what_an_agent_pays_for_is_learned_and_chance_is_not(
    tmp_path: Path, model: str, is_shuffled: bool
) -> None:
    agent = tmp_path / "agent.py"
    # a coin by the sampled tokens, so that every run of the test is the same
    coin = "import zlib; print(zlib.crc32(repr(tokens).encode()) % 2)"
    pay = coin if is_shuffled else "print(share)"
    agent.write_text(
        AGENT
        + 'tokens = ask(problem["question"])["choices"][0]["token_ids"]\n'
        + "share = sum(token < 128 for token in tokens) / len(tokens)\n"
        + f'print(share, file=open({str(tmp_path / "shares")!r}, "a"))\n{pay}\n'
    )
    config = chz.replace(
        run_config(tmp_path, model, [sys.executable, "-S", str(agent)]),
        group_size=8,
        batch_size=16,
        max_steps=14,
        learning_rate=4e-3,
    )
    assert asyncio.run(run_recipe(config)) is None
    shares = [float(line) for line in (tmp_path / "shares").read_text().splitlines()]
    assert len(shares) == 14 * 16
    gain = sum(shares[-32:]) / 32 - sum(shares[:32]) / 32
    assert gain < 0.15 if is_shuffled else gain > 0.25, gain


@pytest.mark.slow
def test_the_example_trains(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"query": "What is 2 + 3?", "answer": 5}\n')
    command = shlex.join([sys.executable, str(ROOT / "examples" / "agent.py")])
    options = ["group_size=2", "batch_size=2", "max_steps=1", "max_tokens=32", f"log_path={tmp_path / 'run'}"]
    asked = ["train", "agent", f"command={command}", f"train_prompts_path={problems}", *options]
    assert viva.cli.main(asked) == 0
    (row,) = [
        row
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if "rollout/groups" in (row := json.loads(line))
    ]
    assert row["reward/mean"] in (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"command": "no-such-program x"}, "there is no 'no-such-program'"),
        ({"command": "python 'x"}, "cannot be read: No closing quotation"),
        ({"command": ""}, "must begin with a program"),
        (
            {"command": "python x", "agent_timeout_s": 0.0},
            "agent_timeout_s must be a number of seconds above 0",
        ),
        ({"command": "python x", "group_size": 0}, "group_size"),
        ({"command": "python x", "num_agents": 7}, "num_agents would change nothing"),
    ],
)
def test_mistakes_are_told_before_anything_starts(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Config(train_prompts=["x"], **options).make_plan()
