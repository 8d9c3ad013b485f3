"""Cells of the bench of rewards."""


def cell(arm, seed, greedy, sampled=None, **more):
    """A line of the ledger on the bed ``steps``: per cent right by problem, at temperature 0 and 1."""
    problems = {"greedy": greedy, "sampled": greedy if sampled is None else sampled, "majority": greedy}
    line = {"bed": "steps", "arm": arm, "seed": seed, "learning_rate": 1e-3, "seconds": 60.0}
    return line | {"tokens": {"sampled": 1000, "total": 2000}, "problems": problems} | more
