"""How much may one judge's two answers weigh? Gains of a revision against their standard errors, by weight and floor.

    python benchmarks/judge_weight.py [trials=100] [run=FOLDER ...]
    python benchmarks/judge_weight.py labels

Simulated conversations of honest, noisy agents under the rules of ``robust``; a judge compares every revised solution
with the initial one in both orders. Judges: ``certain`` knows the better one; ``noisy`` has an opinion of its own on
every pair, alike in both orders; ``biased`` prefers what it sees first; ``guessing`` is sure of an opinion that has
nothing to do with quality. A row is one weight, in votes, of both answers together. Where nobody changes but for
words: the spread of gains over the standard error that the fit claims (above 1, it claims too little), and the share of
gains that are paid at each noise floor. Where everybody improves by 1: gain over standard error, and what is paid.

``labels``: agents and judge vote by label probabilities, and one of so many agents mends its solution, which all others
have had right all along. How sure must voters and judge be for its critics to be paid? A row is their share of a vote.

With ``run``, the same weights on the stored conversations of a run whose problems have answers: what is paid for
solutions that were mended, stayed as right or wrong as they were, or were spoilt.
"""

import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path

from viva.judging.ballots import Preference, divided
from viva.judging.bradley_terry import Duel
from viva.rewards.critique import stored_votes
from viva.rewards.review import PRESETS, ReviewVotes, initial, revised, score_review
from viva.view.files import iter_transcripts

FLOORS = (0.25, 0.5, 1.0)
ROBUST = replace(PRESETS["robust"], noise_floor=0.0)
VOTER = 1.5
"""Log-odds of an agent's vote per unit of quality: right in 78 % of pairs whose qualities differ by a normal number."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    sharpness: float
    """Log-odds per unit of quality."""
    opinion: float = 0.0
    """Deviation of log-odds that a pair has for no reason, alike in both orders."""
    bias: float = 0.0
    """Log-odds for what is shown first."""


JUDGES = {
    "certain": Judge(sharpness=6.0),
    "noisy": Judge(sharpness=1.5, opinion=1.5),
    "biased": Judge(sharpness=1.5, bias=3.0),
    "guessing": Judge(sharpness=0.0, opinion=4.0),
}


def chance(log_odds: float) -> float:
    return 1.0 / (1.0 + exp(-log_odds))


def ballots(quality: Sequence[float], rng: random.Random) -> dict[int, list[Preference]]:
    """Every agent on all others' solutions; of two agents, each on both."""
    agents = range(len(quality))
    pairs = [(a, b) for a in agents for b in agents if a < b]
    return {
        voter: [
            Preference(a, b) if rng.random() < chance(VOTER * (quality[a] - quality[b])) else Preference(b, a)
            for a, b in pairs
            if len(agents) == 2 or voter not in (a, b)
        ]
        for voter in agents
    }


def conversation(num_agents: int, change: float, judge: Judge, rng: random.Random) -> ReviewVotes:
    before = [rng.gauss(0.0, 1.0) for _ in range(num_agents)]
    duels: list[Duel] = []
    for agent in range(num_agents):
        log_odds = judge.sharpness * change + judge.opinion * rng.gauss(0.0, 1.0)
        old, new = initial(agent), revised(agent)
        duels.append(Duel(first=new, second=old, share=chance(log_odds + judge.bias), first_shown_first=True))
        duels.append(Duel(first=old, second=new, share=chance(judge.bias - log_odds), first_shown_first=True))
    return ReviewVotes(
        agents=tuple(range(num_agents)),
        initial=ballots(before, rng),
        final=ballots([quality + change for quality in before], rng),
        targets={},
        duels=tuple(duels),
    )


def weighted(votes: ReviewVotes, judge_votes: float) -> ReviewVotes:
    """The same with both answers about a pair together at a weight."""
    return replace(votes, duels=tuple(replace(duel, weight=judge_votes / 2) for duel in votes.duels))


def paid(gains: Sequence[tuple[float, float]], floor: float) -> list[float]:
    return [value if value > 0.0 and value >= floor * error else 0.0 for value, error in gains]


def simulated(trials: int) -> Iterator[str]:
    heads = "spread / claimed", *(f"paid at {floor:g}" for floor in FLOORS), "gain / error", "gain"
    yield f"| agents | judge | votes | {' | '.join(heads)} | {' | '.join(f'paid at {f:g}' for f in FLOORS)} |"
    yield f"|{'---|' * (3 + len(heads) + len(FLOORS))}"
    for num_agents in (2, 4, 8):
        for name, judge in JUDGES.items():
            for judge_votes in dict.fromkeys((0.5, 1.0, 2.0, float(num_agents - 1))):
                cells = [f"{num_agents}", name, f"{judge_votes:g}"]
                for change in (0.0, 1.0):
                    rng = random.Random(f"{num_agents} {name} {change}")
                    gains: list[tuple[float, float]] = []
                    for _ in range(trials):
                        votes = weighted(conversation(num_agents, change, judge, rng), judge_votes)
                        scored = score_review(votes, ROBUST).gains.values()
                        gains += [(gain.value, gain.standard_error) for gain in scored]
                    values, errors = zip(*gains, strict=True)
                    error = statistics.mean(errors)
                    if change:
                        mean = statistics.mean(values)
                        cells += [f"{mean / error:.2f}", f"{mean:.2f}"]
                        cells += [f"{statistics.mean(paid(gains, floor)):.3f}" for floor in FLOORS]
                    else:
                        cells += [f"{statistics.stdev(values) / error:.2f}"]
                        cells += [f"{statistics.mean(map(bool, paid(gains, floor))):.0%}" for floor in FLOORS]
                yield f"| {' | '.join(cells)} |"


def stored(folders: Sequence[Path]) -> Iterator[str]:
    """What the stored conversations of runs would pay for critique of solutions that were mended, kept or spoilt."""
    found: list[tuple[ReviewVotes, dict[int, int]]] = []
    for folder in folders:
        for _, transcript in iter_transcripts(folder, []):
            record = transcript.record
            if record is not None and record.streams and record.correct and record.correct_initial:
                votes = stored_votes(record, ROBUST)
                change = {a: int(record.correct[a]) - int(record.correct_initial[a]) for a in votes.agents}
                found.append((votes, change))
    yield f"\n{len(found)} stored conversations: mean paid (share of gains paid), by what became of the solution"
    yield f"\n| votes | floor | {' | '.join(OUTCOMES.values())} |\n|{'---|' * (2 + len(OUTCOMES))}"
    for judge_votes in (0.5, 1.0, 2.0, 3.0):
        by_outcome: dict[int, list[tuple[float, float]]] = {outcome: [] for outcome in OUTCOMES}
        for votes, change in found:
            gains = score_review(weighted(votes, judge_votes), ROBUST).gains
            for agent, gain in gains.items():
                if votes.texts[initial(agent)].split() != votes.texts[revised(agent)].split():
                    by_outcome[change[agent]].append((gain.value, gain.standard_error))
        for floor in FLOORS:
            columns = [paid(by_outcome[outcome], floor) for outcome in OUTCOMES]
            cells = [
                f"{statistics.mean(c):.3f} ({statistics.mean(map(bool, c)):.0%} of {len(c)})" for c in columns
            ]
            yield f"| {judge_votes:g} | {floor:g} | {' | '.join(cells)} |"


OUTCOMES = {1: "mended", 0: "as right or wrong as before", -1: "spoilt"}


def mended_by_labels(num_agents: int, share: float) -> tuple[float, float, float]:
    """Gain of the agent that mends its solution, its standard error, and what is paid for it."""
    agents = range(num_agents)
    pairs = {
        voter: [(a, b) for a in agents for b in agents if a < b and voter not in (a, b)] for voter in agents
    }
    before = {
        voter: [divided(b, a, share if a == 0 else 0.5) for a, b in own] for voter, own in pairs.items()
    }
    after = {voter: [divided(b, a, 0.5) for a, b in own] for voter, own in pairs.items()}
    duels: list[Duel] = []
    for agent in agents:
        part = share if agent == 0 else 0.5
        old, new = initial(agent), revised(agent)
        duels.append(Duel(first=new, second=old, share=part, first_shown_first=True))
        duels.append(Duel(first=old, second=new, share=1.0 - part, first_shown_first=True))
    votes = ReviewVotes(
        agents=tuple(agents),
        initial=before,
        final=after,
        targets={critic: [0] for critic in agents if critic},
        duels=tuple(duels),
        final_is_sampled=False,
    )
    gain = score_review(votes, PRESETS["robust"]).gains[0]
    return gain.value, gain.standard_error, gain.paid


def by_labels() -> Iterator[str]:
    numbers = (3, 4, 6)
    yield f"| share | {' | '.join(f'{number} agents: gain, error, paid' for number in numbers)} |"
    yield f"|---{'|---' * len(numbers)}|"
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        cells = [", ".join(f"{each:.2f}" for each in mended_by_labels(number, share)) for number in numbers]
        yield f"| {share:g} | {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> None:
    if list(argv) == ["labels"]:
        print("\n".join(by_labels()))
        return
    given = [argument.split("=", 1) for argument in argv]
    trials = int(dict(given).get("trials", "100"))
    for line in simulated(trials):
        print(line, flush=True)
    folders = [Path(value) for name, value in given if name == "run"]
    if folders:
        for line in stored(folders):
            print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
