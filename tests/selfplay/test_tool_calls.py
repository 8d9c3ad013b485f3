"""Agents that call tools: who is asked again, what everybody sees, what is trained, what is kept."""

import asyncio
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from plain_tools import add, forge

import viva
from viva.conversation.protocol import Protocol, Round
from viva.conversation.records import Conversation, ToolCall
from viva.judging.records import ConversationRecord, Transcript
from viva.recipes.programs import train_recipe
from viva.rewards import find_reward
from viva.selfplay.check import check_protocol, find_protocol
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.testing import CHAT_TOKENS, Script, ScriptedPolicy, ScriptedReply, tiny_renderer
from viva.tiny.tasks import answer_of, problems
from viva.training.batch import plain_batch
from viva.training.metrics import rollout_metrics
from viva.training.rollouts import GroupOutcome, run_group
from viva.view.conversation import conversation_payload


def called(name: str, **arguments: object) -> str:
    return f"Let me see. <tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def adds_once(prompt: str, call: int) -> ScriptedReply | str:
    return (
        "It is 5."
        if "The tool answered" in prompt.rpartition("Before you reply")[2]
        else called("add", a=2, b=3)
    )


def agent_zero_is_paid(conversation: Conversation) -> dict[int, float]:
    return {agent_id: float(agent_id == 0) for agent_id in range(conversation.num_agents)}


def played(
    script: Script, *, style: str = "qwen3_instruct", **changes: Any
) -> tuple[GroupOutcome, ScriptedPolicy]:
    protocol = Protocol(
        rounds=[
            Round("argue", "Argue.", tools=[add, forge], **changes),
            Round("final", "Conclude.", ["argue"]),
        ]
    )
    policy = ScriptedPolicy(renderer=tiny_renderer(style), script=script)
    builder = MultiAgentConversationEnvGroupBuilder(
        question="2 + 3?",
        renderer=policy.renderer,
        protocol=protocol,
        reward=find_reward(agent_zero_is_paid),
        num_agents=2,
    )
    return asyncio.run(run_group(builder, policy, max_retries=0)), policy


def record_of(outcome: GroupOutcome) -> ConversationRecord:
    assert isinstance(outcome.builder, MultiAgentConversationEnvGroupBuilder)
    return ConversationRecord.model_validate(outcome.builder.record())


def test_an_agent_that_calls_is_shown_the_value_and_asked_again():
    outcome, policy = played(adds_once)
    record = record_of(outcome)
    turns = [turn for turn in record.turns if turn.agent_id == 0]
    assert [type(turn.response).__name__ for turn in turns] == ["ToolCall", "Solution", "Solution"]
    assert [turn.segment for turn in turns] == ["argue", "argue", "final"]
    first = turns[0].response
    assert isinstance(first, ToolCall)
    assert (first.tool, first.output, first.failure) == ("add", "5", None)
    assert turns[1].prompt.startswith(turns[0].prompt)
    assert turns[1].prompt.endswith(
        "</tool_call>\nThe tool answered:\n> 5\n\nCall a function again, or reply.\n"
    )
    # the other agent sees call and value in the next round, where there are no tools
    assert turns[2].prompt.count("The tool answered:\n> 5\n") == 2
    assert "Before you reply" not in turns[2].prompt
    metrics = rollout_metrics([outcome])
    assert (metrics["tools/called"], metrics["tools/failed"], len(policy.prompts)) == (0.5, 0.0, 6)


@pytest.mark.parametrize("style", CHAT_TOKENS)
def test_what_a_tool_returns_can_never_be_a_turn_or_a_control_token(style: str):
    forging, _ = played(lambda prompt, call: called("forge") if call < 2 else "x", style=style)
    plain, _ = played(lambda prompt, call: called("add", a=1, b=2) if call < 2 else "x", style=style)

    def observations(outcome: GroupOutcome) -> list[list[int]]:
        assert outcome.group is not None
        return [turn.ob.to_ints() for each in outcome.group.trajectories_G for turn in each.transitions]

    renderer = tiny_renderer(style)
    tokenizer: Any = renderer.tokenizer
    control: frozenset[int] = tokenizer.control_ids
    for one, other in zip(observations(forging), observations(plain), strict=True):
        assert [token for token in one if token in control] == [token for token in other if token in control]
    for turn in record_of(forging).turns:
        shown = turn.prompt.partition("The tool answered:\n")[2].partition("\nCall a function")[0]
        assert all(line.startswith("> ") for line in shown.split("\n") if "lose" in line or "obey" in line)
        assert (
            len(re.findall(r"^\[round 1, agent 1", turn.prompt, re.M)) <= 2
        )  # a call and a reply of its own


def test_only_what_the_policy_wrote_is_trained_calls_among_it():
    outcome, policy = played(adds_once)
    assert outcome.group is not None
    batch = plain_batch([outcome])
    decode: Any = policy.renderer.tokenizer.decode  # pyright: ignore[reportAttributeAccessIssue]
    trained = []
    for datum in batch.data_D:
        mask = datum.loss_fn_inputs["mask"].to_numpy()
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        advantages = datum.loss_fn_inputs["advantages"].to_numpy()
        assert not advantages[mask == 0].any()
        trained.append(decode([int(token) for token in targets[mask > 0]]).replace("<|im_end|>", ""))
    assert sorted(trained) == sorted([called("add", a=2, b=3), "It is 5.", "It is 5."] * 2)


def test_failures_go_back_as_quoted_text_and_are_counted():
    replies = [called("subtract", a=2), called("add", a=2), "<tool_call>add(2, 3)"]

    def script(prompt: str, call: int) -> str:
        failures = prompt.rpartition("Before you reply")[2].count("The tool failed")
        return replies[failures] if "Before you reply" in prompt and failures < 3 else "5"

    outcome, policy = played(script)
    told = [turn.response for turn in record_of(outcome).turns if isinstance(turn.response, ToolCall)]
    assert [each.failure for each in told] == ["unknown_tool", "bad_arguments", "malformed"] * 2
    last = next(prompt for prompt in policy.prompts if "No call is left" in prompt)
    assert (
        "The tool failed, unknown_tool:\n> there is no function 'subtract'; there are: add, forge\n" in last
    )
    metrics = rollout_metrics([outcome])
    assert metrics["tools/failed"] == 1.0
    assert metrics["tools/failed/malformed"] == pytest.approx(1 / 3)
    assert metrics["tools/failed/timeout"] == 0.0


def test_a_call_beyond_the_last_is_the_reply():
    outcome, policy = played(lambda prompt, call: called("add", a=1, b=1), max_calls=2)
    kinds = [type(turn.response).__name__ for turn in record_of(outcome).turns if turn.agent_id == 0]
    assert kinds == ["ToolCall", "ToolCall", "Solution", "Solution"]
    assert len(policy.prompts) == 2 * 4


def test_an_agent_that_fails_after_a_call_leaves_no_trace_of_its_round():
    def script(prompt: str, call: int) -> str:
        if "The tool answered" in prompt:
            raise RuntimeError("lost")
        return called("add", a=1, b=1)

    outcome, _ = played(script)
    assert outcome.group is None
    assert record_of(outcome).turns == ()


def test_records_and_pages_know_calls():
    outcome, _ = played(adds_once)
    record = record_of(outcome)
    assert ConversationRecord.model_validate_json(record.model_dump_json()) == record
    assert "[returned]\n5" in str(record)
    payload = conversation_payload(Transcript(step=0, group=0, record=record))["record"]
    first, *_ = payload["turns"]
    assert (first["response"]["tool"], first["response"]["output"]) == ("add", "5")
    seen = [each["part"] for each in payload["turns"][-1]["sightings"] if each["is_seen"]]
    assert seen.count("call") == 2
    assert record.conversation().turns[0].response == record.turns[0].response
    votes = viva.rewards.majority()
    without = record.model_copy(
        update={"turns": tuple(turn for turn in record.turns if not isinstance(turn.response, ToolCall))}
    )
    for each in (record, without):
        assert asyncio.run(votes.stored_pay(each, 0)) == {0: 1.0, 1: 1.0}


def test_the_example_works_and_its_check_tells_the_tools():
    example = Path(__file__).parents[2] / "examples" / "calculator.py"
    lines, problems = check_protocol(find_protocol(f"{example}:SOLVERS", 2), 2)
    assert problems == []
    told = "  agents may call calculate(expression: str) -> float: The value of numbers joined by + - * / and brackets."
    assert told in lines


def test_the_tiny_policy_trains_a_protocol_with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own.py").write_text(
        "from viva import Protocol, Round\n\n\ndef add(a: int, b: int) -> int:\n    'Sum.'\n    return a + b\n\n\n"
        "def pay(conversation):\n    return {agent: float(len(text)) for agent, text in "
        "conversation.final_solutions.items()}\n\n\n"
        "SUMS = Protocol(rounds=[Round('solve', 'Solve it.', tools=[add])], reward=pay)\n"
    )
    (tmp_path / "p.jsonl").write_text('{"query": "What is 2 + 3?"}\n{"query": "What is 4 + 5?"}\n')
    monkeypatch.chdir(tmp_path)
    options = ["num_agents=2", "batch_size=4", "max_tokens=16", "lora_rank=4", "max_steps=1", "trackers=[]"]
    command = ["protocol=own.py:SUMS", "train_prompts_path=p.jsonl", "log_path=run", "eval_every=0", *options]
    assert train_recipe("protocol", command) == 0
    run = viva.load_run("run")
    assert run.metrics["tools/called"].tolist() == [0.0]
    assert all(
        "- add(a: int, b: int) -> int: Sum." in turn.prompt
        for each in run.conversations
        for turn in each.turns
    )


def test_the_examples_that_teach_to_call_show_each_agent_its_value_before_it_solves(
    monkeypatch: pytest.MonkeyPatch,
):
    folder = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(folder))
    made = runpy.run_path(str(folder / "calculator_calls.py"))
    for problem in problems("train", 5, seed=0):
        rows = asyncio.run(made["examples"](problem))
        said = [each["messages"][-1]["content"] for each in rows]
        shown = [each["messages"][1]["content"] for each in rows]
        assert [text.startswith("<tool_call>") for text in said] == [True, False, True, False, False, False]
        for place in (1, 3):
            assert f"The tool answered:\n> {problem.answer}\n" in shown[place]
        assert all(answer_of(text) == str(problem.answer) for text in said if "tool_call" not in text)
