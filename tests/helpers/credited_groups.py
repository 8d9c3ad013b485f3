"""Groups of the bandit whose spans earn."""

from bandit_engine import GOOD, CountGroup

from viva.rewards.credit import GroupCredit, SpanCredit

STREAM = "r_sol"


class Credited(CountGroup):
    """Pays nothing by reward; the first tokens of every reply earn 1 where they are good."""

    spans: tuple = ()

    async def compute_group_rewards(self, trajectory_group, env_group):
        own = [trajectory.transitions[0] for trajectory in trajectory_group]
        self.spans = tuple(
            SpanCredit(
                seat=seat,
                transition=0,
                start=0,
                stop=1,
                stream=STREAM,
                round_index=0,
                reward=float(turn.ac.tokens[0] == GOOD),
            )
            for seat, turn in enumerate(own)
        )
        return [(-turn.reward, {}) for turn in own]

    def credit(self):
        return GroupCredit(spans=self.spans, weights={STREAM: 1.0})


Credited.record = lambda self: [
    {name: getattr(span, name) for name in SpanCredit.__dataclass_fields__} for span in self.spans
]
