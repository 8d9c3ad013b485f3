import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # review_agents is shared by the tests of critique self-play
