"""Pictures of pages: the README's conversation, and any page of any run.

    python benchmarks/pictures.py conversation [FILE]      # by default docs/screens/smollm2_conversation.png
    python benchmarks/pictures.py RUN PLACE FILE           # such as: runs/demo/run conversation/16/0 page.png

Needs chromium on the PATH, and `make models` for the conversation: SmolLM2-135M-Instruct after the warm-up of
``words-warm`` (`evidence.warm`; some ten minutes, unless it is there) plays one step of the arm ``r_sol_steps`` with
seed 0. Shown is its first conversation. A place is what the address of a page of `viva view` has behind ``#/``.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")
FOLDER = Path(__file__).parents[1]
sys.path.append(str(FOLDER / "tests" / "helpers"))
WIDTH = 1240


def conversation_run() -> Path:
    """One step of critique self-play after the warm-up."""
    from evidence.beds import bed_named
    from evidence.cell import Settings, train
    from evidence.warm import warm_up

    bed = bed_named("words-warm")
    warm_up(bed)
    settings = Settings(learning_rate=bed.learning_rates[0], steps=1)
    return train(bed, "r_sol_steps", 0, settings, FOLDER / "runs" / "pictures" / bed.name).path


def take(run: Path, place: str, file: Path) -> None:
    """Write the page of a run at a place, as long as it is, as PNG."""
    from browser import Drawn, chromium, served

    with TemporaryDirectory() as profile, served(run) as address, chromium(Path(profile)) as page:
        page.set_viewport_size({"width": WIDTH, "height": 600})
        page.goto(address)
        Drawn(page).show(place)
        page.screenshot(path=file, full_page=True)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["conversation"]:
            take(conversation_run(), "conversation/0/0", FOLDER / "docs/screens/smollm2_conversation.png")
        case ["conversation", file]:
            take(conversation_run(), "conversation/0/0", Path(file))
        case [run, place, file]:
            take(Path(run), place, Path(file))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
