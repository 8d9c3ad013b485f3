"""Examples of a warm-up that teaches to call the calculator: conversations of `calculator.py`, played by a script.

python examples/calculator_calls.py FOLDER     writes calls.jsonl, and the problems train.jsonl and test.jsonl
viva train warmup examples=FOLDER/calls.jsonl model_name=tiny train_prompts_path=FOLDER/train.jsonl
"""

import asyncio
import json
import sys
from pathlib import Path

from calculator import SOLVERS

from viva.judging.records import ConversationRecord
from viva.recipes.demo import write_problems
from viva.rewards import find_reward
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.testing import ScriptedPolicy, tiny_renderer
from viva.tiny.tasks import Problem, problems, worked_solution
from viva.training.rollouts import run_group

NUM_AGENTS = 2
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'


def expression(problem: Problem) -> str:
    """What is to be calculated, as one expression."""
    first, *rest = problem.steps
    whole = f"{first.left}{first.operator}{first.right}"
    return "".join([whole, *(f"{step.operator}{step.right}" for step in rest)]).replace("x", "*")


async def examples(problem: Problem) -> list[dict[str, object]]:
    """The messages of all turns of a conversation in which every agent calls once, then solves the problem."""

    def script(prompt: str, call: int) -> str:
        may_call = "Before you reply, you may call" in prompt and "\nYou wrote:\n" not in prompt
        return CALL % expression(problem) if may_call else worked_solution(problem)

    policy = ScriptedPolicy(renderer=tiny_renderer(), script=script)
    builder = MultiAgentConversationEnvGroupBuilder(
        question=problem.question,
        renderer=policy.renderer,
        protocol=SOLVERS,
        reward=find_reward("majority"),
        num_agents=NUM_AGENTS,
    )
    await run_group(builder, policy, max_retries=0)
    record = ConversationRecord.model_validate(builder.record())
    before = {"role": "system", "content": record.system_prompt}
    return [
        {
            "messages": [
                before,
                {"role": "user", "content": turn.prompt},
                {"role": "assistant", "content": turn.text},
            ]
        }
        for turn in record.turns
    ]


def main(folder: Path, count: int = 200) -> None:
    """Write the examples and the problems."""
    write_problems(folder / "train.jsonl", "train", 400, seed=0)
    write_problems(folder / "test.jsonl", "test", 60, seed=0)
    known = problems("train", count, seed=1)
    lines = [json.dumps(each) for problem in known for each in asyncio.run(examples(problem))]
    (folder / "calls.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
