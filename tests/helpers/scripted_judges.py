"""Judges whose policy is a script."""

from collections.abc import Mapping
from typing import Any

from viva.judging.comparison import (
    VERDICT_PREFIX,
    TournamentPattern,
)
from viva.judging.judge import JudgeOptions, PolicyRef, PolicySelfComparisonJudge
from viva.testing import (
    CHAT_TOKENS,
    ScriptedSamplingClient,
    tiny_renderer,
)

BOTH, ONE = TournamentPattern.ALL_PAIRS_BOTH_WAYS, TournamentPattern.ALL_PAIRS_ONE_WAY
RENDERERS = {style: tiny_renderer(style) for style in CHAT_TOKENS}
RENDERER = RENDERERS["qwen3_instruct"]
SOLUTIONS = {0: "zero", 1: "one", 2: "two"}


def judge_of(client: Any, style: str = "qwen3_instruct", **options: Any) -> PolicySelfComparisonJudge:
    """A judge whose policy is a client."""
    return PolicySelfComparisonJudge(
        PolicyRef(sampling_client=client), RENDERERS[style], JudgeOptions(**options)
    )


def client_of(style: str = "qwen3_instruct", **options: Any) -> ScriptedSamplingClient:
    """A scripted client with the tokens of a chat format."""
    return ScriptedSamplingClient(renderer=RENDERERS[style], **options)


def shown(prompt: str) -> tuple[str, str]:
    """The solutions a judge's prompt shows as A and B."""
    first = prompt.split("Solution A:\n> ", 1)[1].split("\n", 1)[0]
    return first, prompt.split("Solution B:\n> ", 1)[1].split("\n", 1)[0]


def prefers_later(prompt: str) -> Mapping[str, float]:
    """The verdict that the text which comes later in the alphabet is better."""
    if not prompt.endswith(VERDICT_PREFIX):
        return {}
    first, second = shown(prompt)
    return {"A": 0.1, "B": 0.7, "T": 0.1} if first < second else {"A": 0.7, "B": 0.1, "T": 0.1}
