"""A problem, scripted policies, and how a group of any strategy is played and turned into samples."""

from tinker_cookbook.rl.problem_env import ProblemGroupBuilder

from viva.experts.assisted import PromptAugmentedEnv
from viva.testing import ScriptedPolicy, tiny_renderer
from viva.training.rollouts import run_group
from viva.training.samples import batch_samples

RENDERER = tiny_renderer()
QUESTION = "2 + 2?"
HINT = [{"role": "system", "content": "Work slowly. Begin with Well."}]


class Sum(PromptAugmentedEnv):
    """Right is whatever ends in 4; the hint is only for the sampler."""

    def __init__(self, renderer=RENDERER, hint=(), **options):
        super().__init__(renderer, list(hint), [], **options)

    def get_question(self):
        return QUESTION

    def check_answer(self, sample_str):
        return sample_str.endswith("4")

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return "4"


def hinted(**options):
    return Sum(hint=HINT, **options)


def problems(size=2):
    return ProblemGroupBuilder(env_thunk=Sum, num_envs=size)


async def play(builder, script, renderer=RENDERER):
    """Outcome, samples, and the prompts the policy saw."""
    policy = ScriptedPolicy(renderer=renderer, script=script)
    outcome = await run_group(builder, policy, max_retries=0)
    return outcome, batch_samples([outcome]), policy.prompts


def text_of(tokens, renderer=RENDERER):
    return renderer.tokenizer.decode(list(tokens))


def trained_text(sample, renderer=RENDERER):
    """What each turn of a sample is trained in, and the trained tokens, as text."""
    return [(text_of(turn.trained_in, renderer), text_of(turn.tokens, renderer)) for turn in sample.turns_K]
