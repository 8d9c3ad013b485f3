"""Pictures of pages: the README's conversation, and any page of any run.

    python benchmarks/pictures.py conversation [FILE]      # by default docs/screens/smollm2_conversation.png
    python benchmarks/pictures.py RUN PLACE FILE           # such as: runs/demo/run conversation/16/0 page.png

Needs chromium on the PATH, and `make models` for the conversation: SmolLM2-135M-Instruct after the warm-up of
``words-warm`` (`evidence.warm`; some fifteen minutes, unless it is there) plays one step of the arm ``r_sol_steps``
with seed 0. Shown is the third of its four conversations down to the table of turns, the one in which most agents
revise to a right answer; which that is can differ by processor. A place is what the address of a page of `viva view`
has behind ``#/``.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")
FOLDER = Path(__file__).parents[1]
sys.path.append(str(FOLDER / "tests" / "helpers"))
WIDTH, MARGIN = 1240, 12
"""Of the pictures, in pixels."""


def conversation_run() -> Path:
    """One step of critique self-play after the warm-up."""
    from evidence.beds import bed_named
    from evidence.cell import Settings, train
    from evidence.warm import warm_up

    bed = bed_named("words-warm")
    warm_up(bed)
    settings = Settings(learning_rate=bed.learning_rates[0], steps=1)
    return train(bed, "r_sol_steps", 0, settings, FOLDER / "runs" / "pictures" / bed.name).path


def take(run: Path, place: str, file: Path, *, down_to: str = "body") -> None:
    """Write the page of a run at a place as PNG, from its top down to the end of the first such element."""
    from browser import Drawn, chromium, served

    with TemporaryDirectory() as profile, served(run) as address, chromium(Path(profile)) as page:
        page.set_viewport_size({"width": WIDTH, "height": 600})
        page.goto(address)
        Drawn(page).show(place)
        box = page.locator(down_to).first.bounding_box()
        height = box["y"] + box["height"] + MARGIN
        page.screenshot(path=file, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})


def main(arguments: list[str]) -> None:
    match arguments:
        case ["conversation"]:
            main(["conversation", str(FOLDER / "docs" / "screens" / "smollm2_conversation.png")])
        case ["conversation", file]:
            take(conversation_run(), "conversation/0/2", Path(file), down_to="table")
        case [run, place, file]:
            take(Path(run), place, Path(file))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
