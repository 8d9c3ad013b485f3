"""The enumerable policy that benchmarks/estimators.py measures with is also the oracle of these tests."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks"), str(Path(__file__).parent)]
