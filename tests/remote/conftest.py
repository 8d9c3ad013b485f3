"""Tests of a real server need one: `make test-remote` sets ``VIVA_SKYRL`` to the folder of its environment."""

import os

collect_ignore = [] if os.environ.get("VIVA_SKYRL") else ["server"]
