import asyncio
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viva.conversation.protocol import Protocol, Round
from viva.conversation.records import ToolCall
from viva.conversation.tools import Tool, answer_call
from viva.selfplay.user_code import load_target


def calculate(expression: str, places: int = 2) -> str:
    """The value of a sum.

    Only agents of the first paragraph's reading.
    """
    if expression == "loop":
        while True:
            pass
    if expression == "sleep":
        time.sleep(60)
    if expression == "memory":
        return str(len(bytearray(1 << 32)))
    if expression == "exit":
        os._exit(3)
    if expression == "long":
        return "x" * 10_000_000
    if expression == "print":
        sys.stdout.write("noise\n")
        return str(sys.stdin.read())
    if expression == "key":
        return json.dumps([name for name in os.environ if "KEY" in name])
    if expression == "count":
        seen.append(1)
        return str(len(seen))
    return str(round(sum(map(float, expression.split("+"))), places))


seen: list[int] = []
TOOL = Tool(function=calculate, timeout_s=1.0, memory_mb=256, max_chars=100)


def written(name: str = "calculate", **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def call(text: str, tool: Tool = TOOL) -> ToolCall | None:
    return asyncio.run(answer_call(text, [tool]))


def outcome(text: str) -> tuple[str, str | None]:
    found = call(text)
    assert found is not None
    return found.output, found.failure


def test_a_call_is_found_in_a_reply_and_answered_and_what_stands_behind_it_is_left_out():
    text = f"I compute.\n{written(expression='2+3.5')} It is 7."
    found = call(text)
    assert found is not None
    assert (found.tool, found.output, found.failure) == ("calculate", "5.5", None)
    assert json.loads(found.arguments) == {"expression": "2+3.5"}
    assert text[: found.stop].endswith("</tool_call>")


def test_a_list_of_one_call_and_a_call_that_ends_with_the_reply_are_read():
    assert outcome('<tool_call>\n[{"name": "calculate", "arguments": {"expression": "1+1"}}]')[0] == "2.0"


@pytest.mark.parametrize(
    ("text", "failure", "told"),
    [
        ("<tool_call>calculate(2)</tool_call>", "malformed", "one JSON object"),
        ('<tool_call>{"name": "calculate", "arguments": "2"}', "malformed", "one JSON object"),
        ("<tool_call>" + '{"a":' * 5000, "malformed", "one JSON object"),
        (
            '<tool_call>{"name": "calculate", "arguments": {"places": ' + "9" * 9999 + "}}",
            "malformed",
            "JSON",
        ),
        ('<tool_call>{"name": "calculate", "arguments": {"places": NaN}}', "malformed", "JSON"),
        (written("calculat", expression="2"), "unknown_tool", "there are: calculate"),
        (written(), "bad_arguments", "expression: Field required"),
        (written(expression="2", places="many"), "bad_arguments", "places: "),
        (written(expression="2", digits=3), "bad_arguments", "digits: "),
        (written(expression="two"), "raised", "ValueError: could not convert"),
        (written(expression="loop"), "timeout", "longer than 1 s"),
        (written(expression="sleep"), "timeout", "longer than 1 s"),
        (written(expression="memory"), "memory", "more than 256 MB"),
        (written(expression="exit"), "crashed", "status 3"),
    ],
)
def test_a_call_that_fails_says_why(text: str, failure: str, told: str):
    output, found = outcome(text)
    assert found == failure
    assert told in output


def test_output_is_cut_and_what_a_tool_prints_or_reads_is_no_answer():
    text, failure = outcome(written(expression="long"))
    assert (text, failure) == ("x" * 100 + "\n[cut: 10,000,000 characters]", None)
    assert outcome(written(expression="print")) == ("", None)


def test_no_call_sees_what_another_one_left_and_none_sees_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VIVA_TEST_API_KEY", "secret")
    assert [outcome(written(expression="count"))[0] for _ in range(3)] == ["1"] * 3
    fresh = Tool(function=calculate, timeout_s=2.0)
    found = call(written(expression="key"), fresh)
    assert found is not None
    assert "VIVA_TEST_API_KEY" not in json.loads(found.output)


def count_things(kind: str) -> object:
    """Values that JSON has no form for."""
    values: dict[str, object] = {
        "scalar": np.int64(3),
        "truth": np.bool_(True),
        "nested": {"mean": np.float32(0.5), "each": np.arange(3)},
        "wide": np.longdouble(3),
        "other": 1 + 2j,
    }
    return values[kind]


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("scalar", "3"),
        ("truth", "true"),
        ("nested", '{"mean": 0.5, "each": [0, 1, 2]}'),
        ("wide", repr(np.longdouble(3))),
        ("other", "(1+2j)"),
    ],
)
def test_numbers_of_numpy_are_shown_as_numbers(kind: str, shown: str):
    found = call(written("count_things", kind=kind), Tool(function=count_things, timeout_s=5.0))
    assert found is not None
    assert (found.output.strip('"'), found.failure) == (shown, None)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='<tool_cal>/{}[]":, \\nu0eé\ud800', max_size=60))
def test_no_reply_makes_the_reader_raise(text: str):
    call(text)
    call(f"<tool_call>{text}")


def test_reading_takes_time_linear_in_the_reply():
    def seconds(count: int) -> float:
        text = '<tool_call>{"name": "' * count
        start = time.perf_counter()
        for _ in range(5):
            call(text)
        return time.perf_counter() - start

    seconds(1000)
    assert seconds(40_000) < 40 * 8 * max(seconds(1000), 1e-3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("TOOL = Tool(function=lambda x: x)", "declared with def"),
        ("TOOL = Tool(function=len)", "declared with def"),
        ("def f(x):\n    pass\nTOOL = Tool(function=f)", "no docstring"),
        ("def f(*x):\n    'A.'\nTOOL = Tool(function=f)", "by name"),
        ("async def f(x):\n    'A.'\nTOOL = Tool(function=f)", "plain function"),
        ("def f(x: 'Unknown'):\n    'A.'\nTOOL = Tool(function=f)", "that JSON cannot give"),
        (
            "def f(x: Tool):\n    'A.'\nclass Own: pass\nf.__annotations__['x'] = Own\nTOOL = Tool(function=f)",
            "JSON",
        ),
        ("def f(x):\n    'A.'\nTOOL = Tool(function=f, timeout_s=0)", "timeout_s"),
    ],
)
def test_a_function_that_agents_could_not_call_is_refused(tmp_path: Path, source: str, message: str):
    path = tmp_path / "own.py"
    path.write_text(f"from viva.conversation.tools import Tool\n{source}\n")
    with pytest.raises(ValueError, match=message):
        load_target(f"{path}:TOOL")


def test_a_tool_of_a_users_file_brings_what_it_uses_and_says_if_it_cannot(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text(
        "import math\nimport threading\nfrom viva.conversation.tools import Tool\nLOCK = threading.Lock()\n"
        "def root(x: float):\n    'Root.'\n    return {'root': half(math.sqrt(x))}\n"
        "def half(x):\n    return x / 2\n"
        "def locked():\n    'Locked.'\n    return LOCK.locked()\n"
        "GOOD, BAD = Tool(function=root), Tool(function=locked)\n"
    )
    good, bad = (load_target(f"{path}:{name}") for name in ("GOOD", "BAD"))
    good.check()
    found = call(written("root", x=16), good)
    assert found is not None
    assert found.output == '{"root": 2.0}'
    with pytest.raises(ValueError, match="cannot be sent to a process of its own"):
        bad.check()


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_arguments_may_be_of_types_of_the_users_file(tmp_path: Path, future: str):
    """Regression: they were sent by name to a process that cannot import the file, which ended at every call."""
    path = tmp_path / "own.py"
    path.write_text(
        f"{future}import dataclasses\nimport enum\nimport pydantic\nfrom viva.conversation.tools import Tool\n"
        "class Op(enum.Enum):\n    ADD = 'add'\n    TAKE = 'take'\n"
        "@dataclasses.dataclass\nclass Point:\n    x: float\n"
        "class Model(pydantic.BaseModel):\n    x: float\n"
        "def calc(op: Op, p: Point, m: Model):\n    'Calculates.'\n"
        "    return p.x + m.x if op is Op.ADD else p.x - m.x\n"
        "TOOL = Tool(function=calc)\n"
    )
    tool = load_target(f"{path}:TOOL")
    for op, value in (("add", "3.0"), ("take", "-1.0"), ("add", "3.0")):
        found = call(written("calc", op=op, p={"x": 1}, m={"x": 2}), tool)
        assert found is not None
        assert (found.output, found.failure) == (value, None)


def test_tools_of_one_name_and_no_call_at_all_are_mistakes():
    protocol = Protocol(rounds=[Round("solve", "Solve.", tools=[calculate, TOOL], max_calls=0)])
    with pytest.raises(ValueError, match=r"two tools 'calculate'[\s\S]*max_calls must be at least 1; got 0"):
        protocol.check()
    with pytest.raises(ValueError, match=r"'solve' has max_calls=5 and no tools to call: give it tools"):
        Protocol(rounds=[Round("solve", "Solve.", max_calls=5)]).check()
