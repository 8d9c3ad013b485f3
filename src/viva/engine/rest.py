"""What training loops need of ``tinker``'s REST client: what a checkpoint says about itself, and its removal."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

from tinker import types
from tinker.lib.public_interfaces.rest_client import RestClient

from viva.engine.core import Core, Operation
from viva.engine.futures import LocalFuture
from viva.engine.sdk import refuses_the_rest
from viva.engine.states import read_state

__all__ = ["LocalRestClient"]


@refuses_the_rest(RestClient)
class LocalRestClient:
    """Looks after checkpoints. Paths are those that ``save_state`` and ``save_weights_for_sampler`` returned."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def get_telemetry(self) -> None:
        """Nothing is reported to anybody."""

    def get_training_run_by_tinker_path(self, tinker_path: str) -> LocalFuture[types.TrainingRun]:
        """The run that a checkpoint is of, with the metadata that was stored.

        Raises:
            ValueError: The checkpoint cannot be read.
        """
        state = read_state(tinker_path)
        run = types.TrainingRun(
            training_run_id=state.folder.absolute().parents[1].name,
            base_model=state.base_model,
            model_owner="local",
            is_lora=state.settings.rank > 0,
            lora_rank=state.settings.rank or None,
            last_request_time=datetime.fromtimestamp(state.folder.stat().st_mtime, UTC),
            user_metadata=state.user_metadata,
        )
        future: LocalFuture[types.TrainingRun] = LocalFuture(self._core.pump, cancellable=False)
        future.resolve(run)
        return future

    async def get_training_run_by_tinker_path_async(self, tinker_path: str) -> types.TrainingRun:
        """`get_training_run_by_tinker_path`, awaited."""
        return await self.get_training_run_by_tinker_path(tinker_path)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> LocalFuture[None]:
        """Delete a checkpoint, once the operations called so far are done.

        Raises:
            ValueError: The folder is no checkpoint, or none of this service's ``state_dir``.
        """
        self._core.check_own(Path(tinker_path))
        folder = read_state(tinker_path).folder

        def operation() -> Operation:
            yield
            shutil.rmtree(folder)

        return self._core.operations.submit(operation())

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """`delete_checkpoint_from_tinker_path`, awaited."""
        await self.delete_checkpoint_from_tinker_path(tinker_path)
