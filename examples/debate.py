"""A debate as a protocol of your own: two statements each in alternate turns, then a final solution.

viva protocol check examples/debate.py:DEBATE --agents 2
viva train examples/debate.py:DEBATE num_agents=2 train_prompts_path=prompts.jsonl
"""

from viva import Protocol, Round, rewards

DEBATE = Protocol(
    rounds=[
        Round("opening", "Give an answer and defend it in three sentences.", ["opening"], "sequential"),
        Round("rebuttal", "Answer what was said against you.", ["opening", "rebuttal"], "sequential"),
        Round("conclusion", "Write the full solution that you now hold right.", ["opening", "rebuttal"]),
    ],
    reward=rewards.tournament(),
    name="debate",
    personas={0: "the Proposer.", 1: "the Opponent: look for what is wrong."},
)
