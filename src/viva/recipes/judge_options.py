"""Options that say how a judge is asked, the same in training and in evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import chz

if TYPE_CHECKING:
    from viva.judging.endpoint import EndpointOptions


@chz.chz
class JudgeConfig:
    """How a judge is asked, and within what bounds one behind an endpoint."""

    judge_mode: Literal["logprob", "verdict"] | None = chz.field(
        default=None,
        doc="read the labels' probabilities (default), or a verdict that the judge writes (default of endpoints)",
    )
    judge_prompt: str | None = chz.field(
        default=None, doc="what the judge is told; a text of its own by default"
    )
    judge_max_tokens: int = chz.field(default=256, doc="longest verdict")
    judge_model: str | None = chz.field(
        default=None, doc="of a judge at https://host/v1: the model's name there; viva eval: [A,B] for two"
    )
    judge_key_variable: str | None = chz.field(
        default=None,
        doc="environment variable with its key; default: OPENAI_API_KEY for https, none for http",
    )
    judge_concurrency: int = chz.field(default=8, doc="requests to it at a time")
    judge_timeout_s: float = chz.field(default=60.0, doc="longest time of one request")
    judge_retries: int = chz.field(default=5, doc="further attempts where it is busy")
    judge_max_requests: int | None = chz.field(default=None, doc="budget of requests")
    judge_max_total_tokens: int | None = chz.field(default=None, doc="budget of tokens, prompts included")
    judge_max_price: float | None = chz.field(default=None, doc="budget in the currency of judge_prices")
    judge_prices: list[float] | None = chz.field(
        default=None, doc="of a million tokens read and of a million sampled, like [0.15, 0.6]"
    )
    judge_body: str | None = chz.field(
        default=None, doc='fields laid over each request, as JSON; null takes one away: {"temperature": null}'
    )

    def endpoint(self, url: str, model: str | None) -> EndpointOptions:
        """The judge at an address.

        Raises:
            ValueError: If an option is out of range, or the key is not in the environment.
        """
        from viva.judging.endpoint import EndpointOptions

        prices = self.judge_prices
        if prices is not None and len(prices) != 2:
            raise ValueError(f"judge_prices must be two, of tokens read and of tokens sampled; got {prices}")
        return EndpointOptions(
            url=url,
            model=model or "",
            key_variable=self.judge_key_variable,
            concurrency=self.judge_concurrency,
            timeout_s=self.judge_timeout_s,
            retries=self.judge_retries,
            max_requests=self.judge_max_requests,
            max_total_tokens=self.judge_max_total_tokens,
            max_price=self.judge_max_price,
            prices=None if prices is None else (prices[0], prices[1]),
            body=_body(self.judge_body),
        )


ENDPOINT_BOUNDS = (
    *("judge_key_variable", "judge_concurrency", "judge_timeout_s", "judge_retries"),
    *("judge_max_requests", "judge_max_total_tokens", "judge_max_price", "judge_prices"),
)
"""Options of judges behind an endpoint that change nothing in their answers."""
ENDPOINT_OPTIONS = ("judge_model", *ENDPOINT_BOUNDS, "judge_body")
"""Options of judges behind an endpoint."""


def is_address(name: str) -> bool:
    """Whether a judge's name is the address of an endpoint."""
    return name.startswith(("https://", "http://"))


def _body(text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        found: object = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f'judge_body must be a JSON object, like {{"temperature": null}}; got {text!r}')
    return cast("dict[str, Any]", found)
