"""The reward ``answers``, the ceiling of all others: the verifiable reward of Lambert et al., 2024 (arXiv 2411.15124).

r_i = 1[solution i gives the known answer]
"""

from dataclasses import dataclass

from viva.rewards.solutions import SolutionReward, Solutions


@dataclass(frozen=True, kw_only=True)
class Answers(SolutionReward):
    """1 for a right final solution, else 0; needs known answers."""

    name: str = "answers"

    @property
    def needs_answers(self) -> bool:
        """Yes."""
        return True

    def pay(self, group: Solutions) -> list[float]:
        """Rewards by the known answer."""
        if group.graded_G is None:
            raise ValueError(
                f"the reward {self.name!r} needs a known answer for every problem; this one has none. Give it in the "
                "key answer, or use a reward that needs none: majority, log_probability"
            )
        return list(group.graded_G)


def answers() -> Answers:
    """The known answers as reward: 1 for an agent whose final solution is right, else 0."""
    return Answers()
