"""An environment of the cookbook that pays for small letters."""

from functools import partial

from tinker_cookbook.rl.problem_env import ProblemEnv
from tinker_cookbook.rl.types import RLDataset

GOOD = set("abcdefghijklmnopqrstuvwxyz")


class LetterEnv(ProblemEnv):
    """Pays for small letters."""

    def get_question(self):
        return "Write."

    def check_answer(self, sample_str):
        return sum(letter in GOOD for letter in sample_str) / 12

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return "letters"


class Letters(RLDataset):
    def __init__(self, renderer, num_steps, builder_class):
        self.renderer, self.num_steps, self.builder_class = renderer, num_steps, builder_class

    def get_batch(self, index):
        return [
            self.builder_class(partial(LetterEnv, self.renderer, format_coef=0.0), num_envs=8)
            for _ in range(2)
        ]

    def __len__(self):
        return self.num_steps
