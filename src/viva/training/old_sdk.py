"""Clients of older SDKs, made to be awaited.

Newer SDKs answer at once with a future of a client. Older ones block until there is one, and warn where that would
stop an event loop; they have an ``_async`` twin for each such method, which newer ones deprecate.
"""

from importlib import import_module
from inspect import getattr_static, signature
from typing import Any, cast

import tinker

from viva.run.clients import ServiceClient

__all__ = ["awaitable_service", "header_options", "hosted_address"]

_BLOCKING = frozenset(
    {
        "create_lora_training_client",
        "create_sampling_client",
        "create_training_client_from_state",
        "create_training_client_from_state_with_optimizer",
        "forward_backward_custom",
        "save_weights_and_get_sampling_client",
    }
)


class _Awaitable:
    """A client whose blocking methods return coroutines; everything else is the client's own."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        if name not in _BLOCKING:
            return getattr(self._client, name)
        twin = getattr(self._client, f"{name}_async")

        async def method(*args: Any, **options: Any) -> Any:
            made = await twin(*args, **options)
            return _Awaitable(made) if isinstance(made, tinker.TrainingClient) else made

        return method


def hosted_address(key: str) -> str:
    """Where the SDK finds hosted Tinker."""
    return str(import_module("tinker._client").AsyncTinker(api_key=key).base_url)


def header_options(headers: dict[str, str]) -> dict[str, Any]:
    """The option of a service client that sends headers with every request; nothing where there are none."""
    if not headers:
        return {}
    is_new = "default_headers_overrides" in signature(tinker.ServiceClient).parameters
    return {"default_headers_overrides" if is_new else "default_headers": headers}


def awaitable_service(service: tinker.ServiceClient) -> ServiceClient:
    """The service, or one that stands for it if its SDK blocks."""
    twin = getattr_static(type(service), "create_lora_training_client_async")
    is_new = hasattr(twin, "__deprecated__")
    return cast(ServiceClient, service if is_new else _Awaitable(service))
