"""The builder of the beds' policies: ``python benchmarks/evidence/raise_policy.py trap|rare output=FOLDER [seed=0]``.

``trap``: the built-in policy, trained on by a pupil whose most frequent answer is wrong on half of the problems, those
of two steps: it mostly forgets the second one. As critic and judge it looks more closely and sees the forgotten step,
but not where the number in it is small (`beds.LARGEST_UNSEEN`): there it holds the solution without that step right. So
the share of problems on which checking is right is a matter of the problems. Voting can only make such a policy worse.

``rare``: the built-in policy, trained on by a pupil who solves problems as often as their kind says (`beds.LEVELS`),
and half of the time where it is told to do every step (`arms.HINT`).
"""

import json
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, Qwen3ForCausalLM

from viva import tiny
from viva.conversation.rendering import direct_messages
from viva.tiny.tasks import Problem, worked_solution, wrong_solution

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "scripts")]

from build_tiny.build import BuildConfig, batches, train_phase
from build_tiny.reviews import (
    PLAIN,
    Attempt,
    Example,
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
from evidence.arms import HINT
from evidence.beds import LEVELS, is_blind, is_trap, trap_problem, trap_solution

_CRITIC_KEEPS = 0.9
_RIGHT_WHEN_HINTED = 0.5


class _TwoStepPupil(Pupil):
    """A pupil of problems half of which have two steps (`beds.is_trap`).

    Args:
        trapped: Share of its wrong solutions of those that lack the second one.
    """

    def __init__(self, *, trapped: float) -> None:
        self.trapped = trapped

    def problem(self, rng: random.Random) -> Problem:
        """A problem, half of them of two steps."""
        return trap_problem(rng)

    def wrong(self, problem: Problem, rng: random.Random) -> str:
        """A wrong solution, see the class."""
        if is_trap(problem) and rng.random() < self.trapped:
            return trap_solution(problem)
        return wrong_solution(problem, rng)


class TrappedPupil(_TwoStepPupil):
    """The pupil of the trap, see the module.

    Args:
        right: Share of right answers to the trap's problems.
        trapped: Share of wrong ones that are the trap's.
    """

    def __init__(self, *, right: float, trapped: float) -> None:
        super().__init__(trapped=trapped)
        self.right = right

    def attempt(self, problem: Problem, rng: random.Random, *, sure: float | None = None) -> Attempt:
        """An attempt; by default mostly wrong on the trap's problems."""
        if sure is None and is_trap(problem):
            sure = self.right
        return super().attempt(problem, rng, sure=sure)

    def critic(self, problem: Problem, rng: random.Random) -> Attempt:
        """A critic's attempt: the trap's where it is blind."""
        if is_blind(problem) and rng.random() < _CRITIC_KEEPS:
            return Attempt(trap_solution(problem), False)
        return super().critic(problem, rng)

    def holds(self, problem: Problem) -> str:
        """The solution that it holds right: the trap's where it is blind."""
        return trap_solution(problem) if is_blind(problem) else worked_solution(problem)


class RarePupil(_TwoStepPupil):
    """The pupil of rare successes, see the module."""

    def __init__(self) -> None:
        super().__init__(trapped=1.0)  # other wrong solutions of two steps come out right too often

    def attempt(self, problem: Problem, rng: random.Random, *, sure: float | None = None) -> Attempt:
        """An attempt; by default as often right as the problem's level says."""
        if sure is None:
            sure = next(level for level, kinds in LEVELS.items() if problem.kind in kinds) / 100
        return super().attempt(problem, rng, sure=sure)


def hinted_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """A worked answer behind the instruction."""
    problem = pupil.problem(rng)
    messages = [{"role": "system", "content": HINT}, *direct_messages(problem.question)]
    solution = pupil.attempt(problem, rng, sure=_RIGHT_WHEN_HINTED).solution
    return Example(messages=tuple(messages), parts=((solution, 1.0),))


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of training, which starts from the saved weights of the one before."""

    name: str
    steps: int
    pupil: Pupil
    shares: Mapping[Generator, float]
    """Generators and their shares of the examples."""


TRAP = (
    Phase(
        name="trap",
        steps=800,
        pupil=TrappedPupil(right=0.25, trapped=0.8),
        shares={
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
        },
    ),
    Phase(
        name="trap 2",
        steps=300,
        pupil=TrappedPupil(right=0.15, trapped=0.95),
        shares={
            direct_example: 0.22,
            conversation_example: 0.05,
            judgement_example: 0.15,
            proposal_example: 0.06,
            ranking_example: 0.3,
            critique_example: 0.15,
            revision_example: 0.07,
        },
    ),
)
CRITICS = (
    *TRAP,
    Phase(
        name="critics",
        steps=500,
        pupil=TrappedPupil(right=0.15, trapped=0.95),
        shares={
            direct_example: 0.14,
            conversation_example: 0.02,
            judgement_example: 0.1,
            proposal_example: 0.06,
            ranking_example: 0.22,
            critique_example: 0.32,
            revision_example: 0.14,
        },
    ),
)
_RARE_SHARES: Mapping[Generator, float] = {
    direct_example: 0.55,
    hinted_example: 0.3,
    proposal_example: 0.05,
    ranking_example: 0.05,
    judgement_example: 0.05,
}
RARE = (Phase(name="rare", steps=500, pupil=RarePupil(), shares=_RARE_SHARES),)
POLICIES = {"trap": TRAP, "critics": CRITICS, "rare": RARE}


def main(arguments: Sequence[str]) -> None:
    """Command line, see the module; finished phases are not repeated."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    policy, *rest = arguments or [""]
    if policy not in POLICIES:
        raise SystemExit(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
    options = {"seed": "0"} | dict(argument.split("=", 1) for argument in rest)
    if unknown := sorted(set(options) - {"output", "seed"}):
        raise SystemExit(f"unknown option {unknown[0]!r}; known: output, seed")
    if "output" not in options:
        raise SystemExit("output=FOLDER is missing: where the policy is to be written")
    output, seed = Path(options["output"]), int(options["seed"])
    before = tiny.model_path()
    for number, phase in enumerate(POLICIES[policy], 1):
        place = output / f"phase-{number}" if number < len(POLICIES[policy]) else output
        if not (place / "card.json").exists():
            raise_on(before, place, phase, seed)
        before = place


def raise_on(before: Path, after: Path, phase: Phase, seed: int) -> None:
    """Train a saved policy for one phase and save it."""
    tokenizer = AutoTokenizer.from_pretrained(before)
    model = Qwen3ForCausalLM.from_pretrained(before).float()
    config = BuildConfig(seed=seed, learning_rate=5e-4, matrix_learning_rate=2e-3)
    rng = random.Random(f"{seed} {phase.name}")
    stream = batches(
        phase.shares,
        tokenizer,
        tokens_per_batch=config.tokens_per_step,
        rng=rng,
        pupil=phase.pupil,
    )
    pad = tokenizer.vocab["<|endoftext|>"]
    train_phase(model, stream, pad, name=phase.name, num_steps=phase.steps, config=config)
    model.bfloat16().save_pretrained(after)
    tokenizer.save_pretrained(after)
    (after / "card.json").write_text(
        json.dumps({"phase": phase.name, "steps": phase.steps, "seed": seed}) + "\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
