"""Populations of voters for critique self-play, at the level of what they write: lines of votes, not ballots.

Solutions have true qualities; an honest voter prefers one to the other with the Bradley-Terry probability of their
difference, or always, if it is sure. Run as a script, it prints the table of what each preset pays.
"""

import math
import random
from statistics import fmean

from viva.judging.ballots import Preference, Tie, count_votes
from viva.rewards.review import PRESETS, ReviewVotes, initial, revised, score_review

AGENTS = (0, 1, 2, 3)
SURE = 1e6
NOISY = 1.5
"""Log-odds of an honest vote per unit of quality."""


def pairs_of(items):
    return [(one, other) for i, one in enumerate(items) for other in items[i + 1 :]]


def ballot(voter, lines, items=AGENTS, own=None):
    """What counts of a voter's lines."""
    return count_votes(lines, items=items, own=[voter] if own is None else own).votes


def ballots(lines_by_voter):
    return {voter: ballot(voter, lines) for voter, lines in lines_by_voter.items()}


def honest(pairs, quality, rng, sharpness=SURE):
    lines = []
    for one, other in pairs:
        margin = sharpness * (quality[one] - quality[other])
        if margin == 0 and sharpness == SURE:
            lines.append(Tie(one, other))
        else:
            first = rng.random() < 0.5 * (1 + math.tanh(0.5 * margin))
            lines.append(Preference(one, other) if first else Preference(other, one))
    return lines


def honest_lines(quality, voters=AGENTS, *, rng=None, sharpness=SURE):
    rng = rng or random.Random(0)
    return {voter: honest(pairs_of(list(quality)), quality, rng, sharpness) for voter in voters}


def self_promoting(voter, items=AGENTS, times=1):
    return [Preference(voter, other) for other in items if other != voter] * times


def stuffed(lines, times=20):
    return [line for line in lines for _ in range(times)]


def rank_of(agent, scores):
    """1 for the best; agents that are equally good share the better rank."""
    return 1 + sum(score > scores[agent] + 1e-9 for score in scores.values())


CHANGES = {
    "everyone improves by 1": (1.0, 1.0, 1.0, 1.0),
    "nobody changes, other words": (0.0, 0.0, 0.0, 0.0),
    "nobody changes a word": None,
    "everyone gets worse by 1": (-1.0, -1.0, -1.0, -1.0),
    "only agent 0 improves by 1.5": (1.5, 0.0, 0.0, 0.0),
}


def conversation(change, rng, sharpness=NOISY):
    """Four noisy honest agents, each of whom criticises all others."""
    before = {agent: rng.gauss(0, 1) for agent in AGENTS}
    after = {agent: before[agent] + (change or (0.0,) * 4)[agent] for agent in AGENTS}
    both = {initial(agent): before[agent] for agent in AGENTS}
    both |= {revised(agent): after[agent] for agent in AGENTS}
    crossing = [(revised(agent), initial(agent)) for agent in AGENTS]
    across = {
        voter: ballot(voter, honest(crossing, both, rng, sharpness), list(both), [revised(voter)])
        for voter in AGENTS
    }
    texts = {item: f"solution {item[1]}" for item in both} if change is None else {}
    return ReviewVotes(
        agents=AGENTS,
        initial=ballots(honest_lines(before, rng=rng, sharpness=sharpness)),
        final=ballots(honest_lines(after, rng=rng, sharpness=sharpness)),
        across=across,
        targets={critic: [target for target in AGENTS if target != critic] for critic in AGENTS},
        texts=texts,
    )


def paid(preset, change, trials, seed=7):
    """Mean over conversations: r_diag of an agent, what agent 0's critics are paid for it, and what others' are."""
    rng = random.Random(seed)
    totals = [score_review(conversation(change, rng), PRESETS[preset]) for _ in range(trials)]
    return {
        "r_diag": fmean(fmean(one.r_diag.values()) for one in totals),
        "for agent 0": fmean(one.gains[0].paid for one in totals),
        "for others": fmean(fmean(one.gains[agent].paid for agent in (1, 2, 3)) for one in totals),
    }


def table(trials=400):
    """What each preset pays for the same conversations, as a table for the documentation."""
    rows = [
        "| what critique did | preset | r_diag (mean) | paid per critique of agent 0 | ... of another |",
        "|---|---|---|---|---|",
    ]
    for name, change in CHANGES.items():
        for preset in PRESETS:
            figures = paid(preset, change, trials)
            cells = " | ".join(f"{value:.3f}" for value in figures.values())
            rows.append(f"| {name} | {preset} | {cells} |")
    return "\n".join(rows)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
