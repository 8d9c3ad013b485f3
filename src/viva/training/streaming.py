"""Training on a batch group by group while it is still being played, for engines that do both at the same time.

The loss is a sum, so the gradients of the groups add up to the one of the batch; the optimiser's step comes after the
last. A group is sent as soon as it and all before it are played: the order of the sums does not depend on time.
"""

from collections.abc import Awaitable

import tinker

from viva.run.clients import TrainingClient
from viva.training.advantages import batch_advantages
from viva.training.data_processing import assemble_training_data
from viva.training.rollouts import GroupOutcome
from viva.training.update import UpdateConfig, send

__all__ = ["GroupStream"]


class GroupStream:
    """Sends the groups of one batch."""

    def __init__(self, client: TrainingClient, config: UpdateConfig) -> None:
        self.sent: list[Awaitable[tinker.ForwardBackwardOutput]] = []
        self._client = client
        self._config = config
        self._played: dict[int, GroupOutcome] = {}
        self._next = 0

    def add(self, index: int, outcome: GroupOutcome) -> None:
        """A group of the batch was played."""
        self._played[index] = outcome
        while self._next in self._played:
            advantages = batch_advantages([self._played.pop(self._next)])
            data_D, _ = assemble_training_data(advantages.groups_P, advantages.advantages_P_G)
            if data_D:
                self.sent.append(send(self._client, data_D, self._config))
            self._next += 1
