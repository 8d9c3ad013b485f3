import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # asked_answers is shared by the tests of the text
