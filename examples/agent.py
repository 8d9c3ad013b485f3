"""An agent that asks twice: it solves a problem, looks at its solution again, and is paid for the last number.

    viva train agent 'command=python examples/agent.py' train_prompts_path=problems.jsonl

Nothing here is Viva's: ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` say who answers.
"""

import json
import re
import sys

import openai


def last_number(text: str) -> str | None:
    """The answer of a solution."""
    return next(reversed(re.findall(r"-?\d+", text)), None)


def main() -> None:
    """One episode."""
    problem = json.loads(sys.stdin.readline())
    client = openai.OpenAI()
    messages = [{"role": "user", "content": problem["question"]}]
    for follow_up in ("Check your solution and give the final number.", None):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages.append({"role": "assistant", "content": answer.content})
        if follow_up is not None:
            messages.append({"role": "user", "content": follow_up})
    print(float(last_number(answer.content) == str(problem["answer"])))


if __name__ == "__main__":
    main()
