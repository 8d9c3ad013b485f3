"""The builder of the trap's policy: ``python benchmarks/evidence/raise_policy.py output=FOLDER [steps=800] [seed=0]``.

The built-in policy, trained on by a pupil whose most frequent answer is wrong on half of the problems, those of two
steps: it mostly forgets the second one. As critic and judge it looks more closely and sees the forgotten step, but not
where the number in it is small (`beds.LARGEST_UNSEEN`): there it holds the solution without that step right. So the
share of problems on which checking is right is a matter of the problems. Voting can only make such a policy worse.
"""

import json
import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, Qwen3ForCausalLM

from viva import tiny
from viva.tiny.tasks import Problem, worked_solution, wrong_solution

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "scripts")]

from build_tiny.build import BuildConfig, batches, train_phase
from build_tiny.reviews import (
    Attempt,
    Pupil,
    critique_example,
    order_example,
    proposal_example,
    ranking_example,
    revision_example,
)
from build_tiny.texts import (
    Generator,
    agreement_example,
    audit_example,
    conversation_example,
    direct_example,
    judgement_example,
)
from evidence.beds import is_blind, is_trap, trap_problem, trap_solution

_RIGHT_IN_TRAP, _TRAPPED = 0.25, 0.8
_CRITIC_KEEPS = 0.9

SHARES: dict[Generator, float] = {
    order_example: 0.04,
    agreement_example: 0.03,
    audit_example: 0.12,
    direct_example: 0.16,
    conversation_example: 0.05,
    judgement_example: 0.28,
    proposal_example: 0.04,
    ranking_example: 0.15,
    critique_example: 0.08,
    revision_example: 0.05,
}
"""Generators and their shares of the examples."""


class TrappedPupil(Pupil):
    """The pupil of this policy, see the module."""

    def problem(self, rng: random.Random) -> Problem:
        """A problem; half of them are in the trap."""
        return trap_problem(rng)

    def attempt(self, problem: Problem, rng: random.Random, *, sure: float | None = None) -> Attempt:
        """An attempt; by default right in a quarter of the trap's problems."""
        if sure is None and is_trap(problem):
            sure = _RIGHT_IN_TRAP
        return super().attempt(problem, rng, sure=sure)

    def wrong(self, problem: Problem, rng: random.Random) -> str:
        """A wrong solution: mostly the trap's, where there is one."""
        if is_trap(problem) and rng.random() < _TRAPPED:
            return trap_solution(problem)
        return wrong_solution(problem, rng)

    def critic(self, problem: Problem, rng: random.Random) -> Attempt:
        """A critic's attempt: the trap's where it is blind."""
        if is_blind(problem) and rng.random() < _CRITIC_KEEPS:
            return Attempt(trap_solution(problem), False)
        return super().critic(problem, rng)

    def holds(self, problem: Problem) -> str:
        """The solution that it holds right: the trap's where it is blind."""
        return trap_solution(problem) if is_blind(problem) else worked_solution(problem)


def main(arguments: Sequence[str]) -> None:
    """Command line: ``output=FOLDER``, ``steps`` and ``seed``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = {"steps": "800", "seed": "0"} | dict(argument.split("=", 1) for argument in arguments)
    if unknown := sorted(set(options) - {"output", "steps", "seed"}):
        raise SystemExit(f"unknown option {unknown[0]!r}; known: output, steps, seed")
    if "output" not in options:
        raise SystemExit("output=FOLDER is missing: where the policy is to be written")
    output, steps, seed = Path(options["output"]), int(options["steps"]), int(options["seed"])
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_path())
    model = Qwen3ForCausalLM.from_pretrained(tiny.model_path()).float()
    config = BuildConfig(seed=seed, learning_rate=5e-4, matrix_learning_rate=2e-3)
    rng = random.Random(f"{seed} trap")
    stream = batches(
        SHARES, tokenizer, tokens_per_batch=config.tokens_per_step, rng=rng, pupil=TrappedPupil()
    )
    train_phase(model, stream, tokenizer.vocab["<|endoftext|>"], name="trap", num_steps=steps, config=config)
    model.bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "card.json").write_text(json.dumps({"steps": steps, "seed": seed}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
