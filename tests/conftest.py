"""What holds for every test: calm threads, set before anything loads torch, and repeatable property tests.

``pytest --hypothesis-profile=explore`` draws new examples on every run.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# processes that share the cores; a test of several threads asks for them
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# a deadline would fail tests for the load of the machine they run on
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")
