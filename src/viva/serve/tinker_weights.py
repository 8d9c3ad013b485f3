"""Saved weights by the addresses that clients of Tinker's protocol know them by."""

import re
from pathlib import Path
from typing import Any

from viva.engine import LocalServiceClient
from viva.engine.checkpoint import read_state
from viva.serve.bodies import RequestError

_PATH = re.compile(r"tinker://(client-[0-9]{6,12})/(weights|sampler_weights)/([A-Za-z0-9_.-]{1,200})")


class SavedWeights:
    """What lies in the folder of a service of the local engine.

    Args:
        service: Saves there.
        state_dir: The folder.
    """

    def __init__(self, service: LocalServiceClient, state_dir: Path) -> None:
        self._service = service
        self._state_dir = state_dir

    def folder(self, address: str) -> Path:
        """The folder of saved weights.

        Raises:
            RequestError: If the address is none, or nothing lies there.
        """
        match = _PATH.fullmatch(address)
        if match is None or set(match[3]) == {"."}:
            raise RequestError(
                "the path must be tinker://CLIENT/weights/NAME or tinker://CLIENT/sampler_weights/NAME, as saving "
                f"returned it; got {address[:200]!r}"
            )
        folder = self._state_dir.joinpath(*match.groups())
        if not folder.is_dir():
            raise RequestError(f"there are no saved weights at {address}", status=404)
        return folder

    def info(self, body: dict[str, Any]) -> dict[str, Any]:
        """What is known of saved weights."""
        state = read_state(str(self.folder(str(body.get("tinker_path")))))
        rank = state.settings.rank
        return {"base_model": state.base_model, "is_lora": rank > 0, "lora_rank": rank or None}

    async def delete(self, run: str, checkpoint: str) -> None:
        """Delete saved weights."""
        folder = self.folder(f"tinker://{run}/{checkpoint}")
        await self._service.create_rest_client().delete_checkpoint_from_tinker_path(str(folder))


def address_of(folder: str) -> str:
    """The address of saved weights, for clients that do not see this disk."""
    return "tinker://" + "/".join(Path(folder).parts[-3:])
