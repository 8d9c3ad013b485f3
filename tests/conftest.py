"""What holds for every test: calm threads, set before anything loads torch."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
