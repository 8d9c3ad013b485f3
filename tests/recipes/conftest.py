import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parent)
)  # random_models and pages are shared by the tests of all recipes
