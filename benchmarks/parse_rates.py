"""How often replies of SmolLM2-135M-Instruct can be read, by segment and by the words that ask for them.

    python benchmarks/parse_rates.py [sets=default,short,...] [conversations=12] [seed=0] [max_tokens=120]

A set is the protocol's own words (``default``) or one of the trials below; ``form`` has those of
``examples/smollm2_critique.yaml``. Conversations of three agents on the one-step word problems of ``make demo``, at
temperature 0.8: critique self-play, or, in sets that begin with ``turns``, two rounds in turns. Nothing is trained or
judged. One row a segment: replies; per cent read exactly, in part, and not at all; per cent that the model ended
itself; mean tokens. The last row: answers at the end, and per cent of them that are right. Needs ``make models``.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import yaml

from viva.conversation.protocol import Protocol
from viva.conversation.rendering import load_renderer
from viva.engine import LocalServiceClient
from viva.judging.answers import is_correct
from viva.recipes.demo import model_path, word_problems
from viva.recipes.demonstrations import Unpaid
from viva.selfplay.critique import critique_protocol
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.selfplay.round_robin import round_robin_protocol
from viva.training.rollouts import run_groups
from viva.training.sampling import Sampling, SeatSampler

NUM_AGENTS = 3
_WORDS: Mapping[str, str] = yaml.safe_load(
    (Path(__file__).resolve().parents[1] / "examples" / "smollm2_critique.yaml").read_text(encoding="utf-8")
)["prompts"]
TRIALS: Mapping[str, Mapping[str, str]] = {
    "short": {
        "system": "You solve a problem with others.",
        "proposal": "{persona} Solve the problem. Give only the final number.",
        "ranking": "Which solution is best? Write only: Ranking: and then the letters {others}, best first, with > "
        "between them.",
        "critique": "Look at solution {others}. For each, write one line: Critique of, its letter, a colon, and what "
        "is wrong or right.",
        "revision": "Write Revise: or Defend: and then your final number.",
        "verdict": "Which solution is best? Write only: Ranking: and then the letters {others}, best first, with > "
        "between them.",
    },
    "start": {
        "proposal": "{persona} Answer in one short sentence with the final number.",
        "ranking": 'Begin your reply with "Ranking:" and put > between the letters of {others}, the better one first. '
        "Write nothing else.",
        "critique": 'Begin each line with "Critique of" and one of the letters {others} and a colon. Say in one '
        "sentence whether its number is right.",
        "revision": 'Begin your reply with "Revise:" or "Defend:". Then give the final number in one short sentence.',
        "verdict": 'Begin your reply with "Ranking:" and put > between the letters of {others}, the better one first. '
        "Write nothing else.",
    },
    "form": {
        **_WORDS,
        "ranking": "Compare solutions {others}. Your whole reply is one line of this form, the better one first:\n"
        "Ranking: letter > letter",
        "verdict": "Compare solutions {others}. Your whole reply is one line of this form, the better one first:\n"
        "Ranking: letter > letter",
    },
    "turns-default": {},
    "turns-short": {
        "system": "You solve a problem with others. Reply with one JSON object with the keys reflection, evaluation "
        "and solution.",
        "turn": '{persona} Reply with {"reflection": "...", "evaluation": "...", "solution": "..."} and nothing else.',
    },
    "turns-bare": {"system": "You solve a problem with others.", "turn": "Give only the final number."},
}


def protocol_of(name: str) -> Protocol:
    """The protocol in the words of a set."""
    base = round_robin_protocol(2) if name.startswith("turns") else critique_protocol(NUM_AGENTS)
    if name in ("default", "turns-default"):
        return base
    return base.with_prompts(TRIALS[name])


async def rates(name: str, *, count: int, seed: int, max_tokens: int) -> list[tuple[str, ...]]:
    """Rows of the table."""
    model = str(model_path())
    service = LocalServiceClient(device="cpu")
    sampler = service.create_sampling_client(base_model=model)
    renderer = load_renderer(sampler.get_tokenizer(), model_name=model)
    problems, _ = word_problems(seed=seed)
    builders = [
        MultiAgentConversationEnvGroupBuilder(
            question=question,
            renderer=renderer,
            protocol=protocol_of(name),
            reward=Unpaid(),
            answer=str(answer),
            num_agents=NUM_AGENTS,
            seed=seed + index,
        )
        for index, (question, answer) in enumerate(problems[:count])
    ]
    policy = SeatSampler(
        sampler=sampler, sampling=Sampling(seed=seed, max_tokens=max_tokens, temperature=0.8)
    )
    outcomes = await run_groups(builders, policy)
    statuses: dict[str, Counter[str]] = {}
    ended: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    right: list[bool] = []
    for outcome, builder, (_, answer) in zip(outcomes, builders, problems, strict=False):
        if outcome.group is None:
            continue
        for trajectory in outcome.group.trajectories_G:
            for turn in trajectory.transitions:
                segment = str(turn.logs["segment"])
                status = next(
                    each for each in ("ok", "repaired", "unstructured") if turn.metrics[f"parse/{each}"]
                )
                statuses.setdefault(segment, Counter())[status] += 1
                ended[segment] += turn.ac.stop_reason == "stop"
                tokens[segment] += len(turn.ac.tokens)
        record = builder.record() or {}
        right += [
            is_correct(turn["response"]["solution"], str(answer))
            for turn in record["turns"]
            if turn["segment"] in ("revision", "turn") and turn["round_index"] > 0
        ]
    rows: list[tuple[str, ...]] = []
    for segment, found in statuses.items():
        number = found.total()
        shares = (found[each] / number for each in ("ok", "repaired", "unstructured"))
        rows.append(
            (
                name,
                segment,
                str(number),
                *(f"{100 * share:.0f}" for share in shares),
                f"{100 * ended[segment] / number:.0f}",
                f"{tokens[segment] / number:.0f}",
            )
        )
    rows.append((name, "right at the end", str(len(right)), f"{100 * sum(right) / len(right):.0f}"))
    return rows


def main(argv: list[str]) -> None:
    """Print the table."""
    given = dict(argument.split("=", 1) for argument in argv)
    for name in given.get("sets", "default").split(","):
        began = time.time()
        rows = asyncio.run(
            rates(
                name,
                count=int(given.get("conversations", "12")),
                seed=int(given.get("seed", "0")),
                max_tokens=int(given.get("max_tokens", "120")),
            )
        )
        sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in rows))
        sys.stdout.write(f"{name}: {time.time() - began:.0f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
