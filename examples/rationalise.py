"""A search strategy of your own: show how to get to an answer that is given away, and learn it without that (STaR).

viva train math_efficiency 'strategies=["iid", "examples/rationalise.py:rationalise"]' train_prompts_path=problems.jsonl
"""

from viva.experts.assisted import PromptAugmentedGroupBuilder
from viva.judging.answers import extract_answer
from viva.recipes.strategies import Task


def rationalise(task: Task) -> PromptAugmentedGroupBuilder:
    """Samples behind a system message that gives the answer away; trained as replies to the bare problem."""
    answer = extract_answer(task.item.answer or "")
    hint = f"The answer is {answer}. Write a solution that gets there, as if nobody had told you."
    return PromptAugmentedGroupBuilder(
        env_thunk=lambda: task.env(hint=hint, leak_phrases=("told", "given answer")),
        num_envs=task.group_size,
    )
