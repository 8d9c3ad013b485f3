"""Goes through the page of ``viva view`` by keyboard alone, and writes down what was pressed and what was then shown.

    python tests/helpers/keyboard_walk.py > docs/view_keyboard.md

The runs are made up, so the record is the same every time; a test compares it with the page in docs/.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from browser import chromium, served
from playwright.sync_api import TimeoutError
from view_runs import metrics_row, tokens, transcript, turns, write_lines

HEAD = """# The page by keyboard alone

Written by `python tests/helpers/keyboard_walk.py`: a browser goes through every view of `viva view` with keys only, on
two made-up runs, and writes down what it pressed and what it then read on the screen. A test does the same and
compares. *Tab to* stands for as many Tabs as it takes.
"""

MOST_TABS = 400

READ = """selector => {
    const text = node => node.selectedOptions ? node.selectedOptions[0].textContent
        : node.matches("input, output") ? node.value : node.innerText;
    const shown = [...document.querySelectorAll(selector)].filter(node => node.checkVisibility());
    return shown.map(node => text(node).replace(/\\s+/g, " ").trim());
}"""


class Walk:
    """Presses keys, reads, and keeps the record. Nothing is ever clicked."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self._rows: list[tuple[str, list[tuple[str, str, str]]]] = []

    def view(self, title: str) -> None:
        """Begin a part of the record."""
        self._rows.append((title, []))

    def press(self, keys: str, what: str, selector: str, expected: str) -> None:
        """Press keys (words like Tab and ``"texts"`` to type), wait for a text on the screen, and write both down.

        Args:
            keys: Separated by spaces.
            what: They are for.
            selector: Of the elements to read.
            expected: What one of them has to hold.
        """
        for key in keys.split(" "):
            if key.startswith('"'):
                self._page.keyboard.type(key.strip('"').replace("_", " "))
            else:
                self._page.keyboard.press(key)
        self._expect(keys.replace("_", " "), what, selector, expected)

    def tab_to(self, target: str, name: str, keys: str, what: str, selector: str, expected: str) -> None:
        """Press Tab until an element is in focus, then as `press`."""
        for _ in range(MOST_TABS):
            self._page.keyboard.press("Tab")
            if self._page.evaluate("target => document.activeElement.matches(target)", target):
                break
        else:
            raise AssertionError(f"{target} cannot be reached by Tab")
        for key in filter(None, keys.split(" ")):
            self._page.keyboard.press(key)
        self._expect(f"Tab to {name}{', ' if keys else ''}{keys}", what, selector, expected)

    def _expect(self, keys: str, what: str, selector: str, expected: str) -> None:
        holds = f"([selector, expected]) => ({READ})(selector).some(text => text.includes(expected))"
        try:
            self._page.wait_for_function(holds, arg=[selector, expected])
        except TimeoutError as error:
            shown = self._page.evaluate(READ, selector)
            raise AssertionError(
                f"after {keys}: {expected!r} is not in {selector}, which shows {shown}"
            ) from error
        shown = next(text for text in self._page.evaluate(READ, selector) if expected in text)
        self._rows[-1][1].append((keys, what, shown if len(shown) <= 160 else f"{shown[:160]}..."))

    def record(self) -> str:
        """The whole page of the record."""
        parts = [HEAD]
        for title, rows in self._rows:
            parts.append(f"\n## {title}\n\n| keys | to | on the screen |\n|---|---|---|\n")
            parts += [f"| {_cell(keys)} | {what} | {_cell(shown)} |\n" for keys, what, shown in rows]
        return "".join(parts)


def _cell(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"


def make_runs(folder: Path) -> list[Path]:
    """Two runs with all that the page can show, one reply of 20,000 characters included."""
    runs = [folder / "run-a", folder / "run-b"]
    long = turns()
    long[0] = long[0] | {"response": {"solution": "12, " * 5000}}
    for shift, run in enumerate(runs):
        run.mkdir()
        (run / "config.json").write_text(json.dumps({"model_name": "tiny", "seed": shift}))
        write_lines(run / "metrics.jsonl", [metrics_row(step, 0.1 * shift) for step in range(20)])
        rows = [transcript(step, group) for step in range(20) for group in range(4)]
        write_lines(run / "transcripts.jsonl", [*rows, transcript(20, 0, turns=long)])
        write_lines(run / "tokens.jsonl", [tokens(step, 0) for step in range(0, 20, 10)])
    (runs[0] / "eval").mkdir()
    figures = {"direct/avg@4": {"value": 0.5, "low": 0.4, "high": 0.6, "num_problems": 100}}
    target = {"name": "run-a", "checkpoint": "000020"}
    result = {"format": "viva evaluation 1", "target": target, "figures": figures}
    (runs[0] / "eval" / "000020-a.json").write_text(json.dumps(result))
    return runs


def record_of(page: Any, address: str) -> str:
    """Walk through all views; the record.

    Raises:
        AssertionError: If something cannot be reached.
    """
    page.goto(address)
    page.wait_for_function(
        "() => document.body.dataset.version && document.getElementById('status').textContent === ''"
    )
    walk = Walk(page)
    _curves(walk)
    _list(walk)
    _conversation(walk)
    _tokens(walk)
    _others(walk)
    return walk.record()


def _curves(walk: Walk) -> None:
    walk.view("Help and curves")
    walk.press("?", "see all keys", "#help dd", "next and previous")
    walk.press("Escape", "close the help", "#views [aria-current]", "Curves")
    walk.press('/ "ties"', "look for metrics by a name that none has", ".groups", "No metric has that name.")
    walk.press("Control+A Delete", "see all again", ".groups summary", "test")
    walk.press('"accuracy"', "find metrics by a part of their names", ".groups figcaption", "direct_accuracy")
    walk.tab_to("#smooth", "Smoothing", "End", "smooth the curves", "output", "0.99")
    walk.tab_to(
        "#smooth, figcaption a",
        "the chart's title",
        "Enter",
        "see one chart alone, as a link",
        ".alone figcaption",
        "test: direct_accuracy",
    )
    walk.tab_to(
        ".alone svg",
        "the chart",
        "Home ArrowRight",
        "read values off, step by step",
        ".values",
        "step 1 run-a",
    )
    walk.press("End", "go to the last step", ".values", "step 19")
    walk.press("1", "go back to all curves", ".groups summary", "test")
    walk.tab_to("summary", "the first section", "Enter", "fold it", "details:not([open]) > summary", "test")


def _list(walk: Walk) -> None:
    walk.view("List of conversations")
    walk.press("2", "see the conversations", ".pages", "81 conversations · page 1 of 2")
    walk.press("]", "go to the next page", ".pages", "page 2 of 2")
    walk.press("[", "and back", ".pages", "page 1 of 2")
    walk.press('/ "box_7"', "look for a question", ".pages", "4 conversations")
    walk.press("Control+A Delete", "see all again", ".pages", "81 conversations")
    walk.tab_to("[name=step_from]", "From step", "3", "filter by step", ".pages", "69 conversations")
    walk.press("Backspace", "see all again", ".pages", "81 conversations")
    walk.tab_to("[name=strategy]", "Strategy", "f", "filter by strategy", ".pages", "20 conversations")
    walk.tab_to("[name=answers]", "Answers", "ArrowDown", "filter by answers", "[name=answers]", "all right")
    walk.press("ArrowDown", "filter by others", ".pages", "20 conversations")
    walk.tab_to("[name=state]", "State", "ArrowDown", "filter by state", "[name=state]", "sound")
    walk.tab_to("[name=reward_from]", "Reward from", "3", "filter by reward", ".pages", "11 conversations")
    walk.tab_to("[name=order]", "Order", "ArrowDown", "sort", ".list tbody tr:first-child", "box 19-2")
    walk.press("Escape j j", "choose the second one", ".list [aria-selected=true]", "box 18-2")
    walk.press("Enter", "open it", ".conversation h2", "Step 18, conversation 2")


def _conversation(walk: Walk) -> None:
    walk.view("One conversation")
    walk.press("k", "see the one before in the list", ".conversation h2", "Step 19, conversation 2")
    walk.press("j", "see the next one", ".conversation h2", "Step 18, conversation 2")
    walk.press("e", "unfold all that the agents saw", "#turn-9 .seen", "In it: solution by agent 2")
    walk.tab_to(
        "#turn-9 .hidden-part summary",
        "a part that was hidden",
        "Enter",
        "read it",
        "#turn-9 .hidden-part[open] pre",
        "first: 12",
    )
    walk.tab_to(
        "#turn-9 .sampled summary",
        "Reply as sampled",
        "Enter",
        "read it",
        "#turn-9 .sampled pre",
        "revision of agent 2",
    )
    walk.tab_to(
        ".arc",
        "an arrow",
        "Enter",
        "go from a critique's arrow to its text",
        ".critique.flash",
        "agent 1 is off by one",
    )
    walk.tab_to(
        "[aria-label=Rewards]",
        "the rewards",
        "",
        "read V before and after, and every stream",
        "table.streams tbody tr",
        "0.250 ± 0.100",
    )
    walk.tab_to(
        "[role=region]:has(.matrix)",
        "the rankings",
        "",
        "read who ranks whom",
        ".rankings .cycles",
        "agent 0 > agent 1 > agent 2 > agent 0",
    )
    walk.tab_to(
        "[role=region]:has(.verdicts)",
        "the verdicts",
        "",
        "read them in both orders",
        ".judge-panel .flips",
        "33.3 % (1 of 3)",
    )
    walk.press("u", "go back to the list, filters kept", ".pages", "11 conversations")


def _tokens(walk: Walk) -> None:
    walk.view("Credit on tokens")
    walk.press("1 2", "see the list without filters", ".pages", "81 conversations")
    walk.press("j Enter", "open the first conversation", ".conversation h2", "Step 0, conversation 0")
    walk.press("t", "shade the tokens by one stream", ".toggle[aria-pressed=true]", "r_diag")
    walk.tab_to(
        ".token-turn[data-turn='1'] summary",
        "a reply",
        "Enter",
        "unfold its tokens",
        ".trained-in pre",
        "Problem alone",
    )
    walk.tab_to(
        ".token-line[data-turn='1']",
        "its tokens",
        "ArrowRight ArrowRight",
        "read a token's numbers",
        ".token-info",
        "training logprob",
    )
    walk.press("End", "go to the last token", ".token-info dd[data-name=id]", "13")
    walk.tab_to(
        ".token-turn[data-turn='1'] button",
        "the button",
        "Enter",
        "go to the turn in the conversation",
        ".turn.flash h3",
        "critique",
    )
    walk.press("u", "go back", ".pages", "81 conversations")
    walk.tab_to("[name=order]", "Order", "ArrowDown", "begin with the last step", ".list tbody tr", "20")
    walk.press("Escape j Enter", "open it", ".conversation h2", "Step 20, conversation 0")
    walk.tab_to(
        ".cut",
        "the button of a long reply",
        "",
        "see what is left out",
        ".cut",
        "characters left out: show all",
    )
    walk.press("Enter", "read all of it", ".part.solution pre:not(:has(.cut))", "12, 12, 12")


def _others(walk: Walk) -> None:
    walk.view("Judge, evaluations, options, summary")
    walk.press("3", "see the judge over all conversations", "#judge-flips", "33.3 % (81 of 243)")
    walk.press("]", "go to the next page of those with flips or cycles", ".pages", "page 2 of 2")
    walk.tab_to(".list tbody a", "a conversation", "Enter", "open it", ".conversation h2", "Step")
    walk.press("4", "see what viva eval measured", ".evaluation", "direct/avg@4")
    walk.press("5", "see the options; those that differ are marked", "td.differs", "1")
    walk.press("0", "see how the runs went", ".run-summary .card", "gain")
    walk.tab_to(
        "#views a",
        "the views",
        "Enter",
        "choose a view without its number",
        "#views [aria-current]",
        "Summary",
    )


def main() -> None:
    """Write the record to the standard output."""
    with tempfile.TemporaryDirectory() as name:
        runs = make_runs(Path(name))
        with served(*runs) as address, chromium(Path(name) / "profile") as page:
            sys.stdout.write(record_of(page, address))


if __name__ == "__main__":
    main()
