"""Tools: Python functions that agents may call before they reply.

A call is a block in the reply, as Hermes, Qwen and other families are trained to write it::

    <tool_call>{"name": "calculate", "arguments": {"expression": "17 * 23"}}</tool_call>

The first block counts, and nothing behind it. The function runs in a process of its own (`viva.conversation.sandbox`);
what it returns, or why it returned nothing, is shown to the agent, quoted, and the agent is asked again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NotRequired, cast, get_type_hints

from viva.conversation.records import CallFailure, ToolCall, encodable
from viva.conversation.sandbox import LimitedFunction, run, warm

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FORM = f'{_OPEN}{{"name": "...", "arguments": {{...}}}}{_CLOSE}'
_MOST_CHILDREN = 4
_threads = ThreadPoolExecutor(_MOST_CHILDREN, thread_name_prefix="viva-tool")
MAX_CALLS = 3
"""Calls of one reply, by default."""
_WORDS = 400
"""Longest error text in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that agents may call, with the limits of each call.

    Agents read its name, its parameters and the first paragraph of its docstring. Its value goes back to them as it is
    if it is a text, else as JSON. It should be a function of its arguments alone: a run that is resumed calls it again.

    Raises:
        ValueError: If the function is none that can be called by name, says nothing of itself, or a limit is no
            positive number.
    """

    function: Callable[..., object]
    timeout_s: float = 5.0
    """Longest time of a call, on the clock and of the processor."""
    memory_mb: int = 512
    """Most memory of a call, beside what its modules take."""
    max_chars: int = 2000
    """Longest output; the rest is cut off."""

    def __post_init__(self) -> None:
        """Reject what agents could not call."""
        if not inspect.isfunction(self.function) or self.function.__name__ == "<lambda>":
            raise ValueError(f"a tool must be a function declared with def; got {self.function!r}")
        what = f"the tool {self.name!r}"
        if inspect.iscoroutinefunction(self.function) or inspect.isgeneratorfunction(self.function):
            raise ValueError(f"{what} must be a plain function: declare it without async and yield")
        if not inspect.getdoc(self.function):
            raise ValueError(f"{what} has no docstring, by which agents know what it does: write one")
        for name, value in (
            ("timeout_s", self.timeout_s),
            ("memory_mb", self.memory_mb),
            ("max_chars", self.max_chars),
        ):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} of {what} must be a positive number; got {value}")
        _arguments(self.function)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def told(self) -> str:
        """One line for the prompt: name, parameters and what it does."""
        said = (inspect.getdoc(self.function) or "").partition("\n\n")[0]
        return f"{self.name}{_signature(self.function)}: {' '.join(said.split())}"

    def check(self) -> None:
        """Load the function in a process of its own; ValueError if that fails."""
        warm(self._job())

    async def call(self, arguments: Mapping[str, object]) -> tuple[str, CallFailure | None]:
        """The function's value as text, or the error and its kind."""
        from pydantic import ValidationError

        try:
            fitting = _arguments(self.function).validate_python(arguments)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            return (
                f"{'; '.join(wrong)[:_WORDS]}. It is {self.name}{_signature(self.function)}",
                "bad_arguments",
            )
        loop = asyncio.get_running_loop()
        text, failure = await loop.run_in_executor(_threads, run, self._job(), fitting)
        return encodable(text), cast("CallFailure | None", failure)

    def _job(self) -> LimitedFunction:
        return LimitedFunction(self.function, self.timeout_s, self.memory_mb, self.max_chars)


def _signature(function: Callable[..., object]) -> str:
    # annotations that are texts are shown without quotation marks
    return str(inspect.signature(function)).replace("'", "")


@cache
def _arguments(function: Callable[..., object]) -> TypeAdapter[dict[str, object]]:
    """Checks and converts the arguments of a function: a pydantic ``TypeAdapter`` of a dictionary by name."""
    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticUserError
    from typing_extensions import TypedDict

    name = function.__name__
    parameters = inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if odd := [str(each) for each in parameters if each.kind not in by_name]:
        raise ValueError(f"the tool {name!r} must take its arguments by name; got {', '.join(odd)}")
    try:
        hints = get_type_hints(function)
        fields = {
            each.name: hints.get(each.name, Any)
            if each.default is inspect.Parameter.empty
            else NotRequired[hints.get(each.name, Any)]
            for each in parameters
        }
        taken = cast(Any, TypedDict)(name, fields)
        taken.__pydantic_config__ = ConfigDict(extra="forbid")
        return TypeAdapter(taken)
    except (NameError, PydanticUserError) as error:
        raise ValueError(
            f"the tool {name!r} has parameters of a type that JSON cannot give: {error}. Use str, int, float, bool, "
            "list or dict"
        ) from error


def told_tools(tools: Sequence[Tool], max_calls: int, calls: Sequence[str]) -> str:
    """The end of a prompt: the tools there are, and the calls of this turn as they are shown."""
    listed = "".join(f"- {tool.told}\n" for tool in tools)
    opening = (
        f"\n\nBefore you reply, you may call a function (calls allowed: {max_calls}, one at a time). A call is written "
        f"like this, with nothing behind it, and you will be shown what it returns:\n{_FORM}\n{listed}"
    )
    told = "".join(f"\nYou wrote:\n{shown}" for shown in calls)
    if not calls:
        return opening
    left = max_calls - len(calls)
    return (
        f"{opening}{told}\n{'Call a function again, or reply.' if left else 'No call is left: reply now.'}\n"
    )


async def answer_call(text: str, tools: Sequence[Tool]) -> ToolCall | None:
    """The first call in a reply with what came back; ``None`` if there is none."""
    found = find_call(text)
    if found is None:
        return None
    name, arguments, stop = found
    output, failure = await _output(name, arguments, tools)
    return ToolCall(
        tool=encodable(name),
        arguments="" if arguments is None else encodable(json.dumps(arguments, ensure_ascii=False)),
        output=output,
        failure=failure,
        stop=stop,
    )


def find_call(text: str) -> tuple[str, dict[str, object] | None, int] | None:
    """Name, arguments and end of the first call in a reply; no arguments if it cannot be read."""
    start = text.find(_OPEN)
    if start < 0:
        return None
    start += len(_OPEN)
    written, close, _ = text[start:].partition(_CLOSE)
    return *_read(written), start + len(written) + len(close)


def _read(written: str) -> tuple[str, dict[str, object] | None]:
    """Name and arguments of a call; no arguments if it cannot be read."""
    try:
        found = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):  # also of an integer with more digits than Python reads
        return "", None
    if (
        isinstance(found, list) and len(cast("list[object]", found)) == 1
    ):  # some families write a list of calls
        found = cast("list[object]", found)[0]
    if not isinstance(found, dict):
        return "", None
    fields = cast("dict[str, object]", found)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "", None
    return name, arguments


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


async def _output(
    name: str, arguments: Mapping[str, object] | None, tools: Sequence[Tool]
) -> tuple[str, CallFailure | None]:
    if arguments is None:
        return f"a call is one JSON object in one block: {_FORM}", "malformed"
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        known = ", ".join(tool.name for tool in tools)
        return f"there is no function {name[:_WORDS]!r}; there are: {known}", "unknown_tool"
    return await tool.call(arguments)
