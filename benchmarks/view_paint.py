"""How soon ``viva view`` shows something of a run of 10,000 conversations: medians over fresh servers and browsers.

    python benchmarks/view_paint.py [conversations=10000] [repeats=5]

Needs Linux and chromium on the PATH. Times count from the request of the page. Cold: server, browser and profile are
new, and the run's files are not in the page cache. Warm: the same page again, when all is indexed. Beside the time by
the clock stands the processor time of server and browser together, which a busy machine does not stretch.
"""

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
]
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
PAGES = 40


def conversation(step, group):
    """Four agents in three rounds, about 9 KB."""
    solution = "Twelve pens, then two are lost, so ten are left. " * 6
    turns = [
        {
            "agent_id": agent,
            "round_index": round_index,
            "segment": "revision",
            "lane": 0,
            "prompt": solution * 2,
        }
        | {"text": solution, "response": {"solution": solution}, "status": "ok"}
        for round_index in range(2)
        for agent in range(4)
    ]
    comparisons = [
        {"agent_id": None, "first": one, "second": other, "outcome": "A", "score": -0.5, "text": ""}
        for one in range(4)
        for other in range(4)
        if one != other
    ]
    record = {
        "question": f"How many pens are in box {step}-{group}?",
        "turns": turns,
        "comparisons": comparisons,
    }
    record |= {"rewards": {"0": 0.5, "1": -0.5}, "correct": {"0": True, "1": group % 2 == 0}}
    return {"step": step, "group": group, "void": False, "tags": [], "record": record}


def make_run(folder, count):
    names = [
        f"{group}/metric_{index}" for group in ("reward", "judge", "optim", "time") for index in range(50)
    ]
    with (folder / "transcripts.jsonl").open("w") as file:
        file.writelines(json.dumps(conversation(*divmod(index, 10))) + "\n" for index in range(count))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(count // 10):
            file.write(json.dumps({"step": step, **dict.fromkeys(names, 1 / (step + 1))}) + "\n")
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e6


def evict(folder):
    """Drop the files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory_mb(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024


def processor_seconds():
    """Of all processes that this one has started, and that they have."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= new
    return sum(ticks[pid] for pid in ours - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """By the clock, and by the processor."""

    def __init__(self):
        self.found = {}
        self.start()

    def start(self):
        self.began = (time.perf_counter(), processor_seconds())

    def lap(self, title, seconds=None):
        """What has passed since the start; ``seconds`` where the page itself has taken the time."""
        clock, processor = self.began
        self.found[title] = (seconds or time.perf_counter() - clock, processor_seconds() - processor)


def look(page, address, watch, title):
    """Load the page anew up to its first chart, then the list of conversations."""
    page.goto("about:blank")
    watch.start()
    page.goto(address)
    page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
    watch.lap(f"{title}: first paint", page.evaluate(FIRST_PAINT) / 1000)
    page.wait_for_selector("figure svg")
    watch.lap(f"{title}: first chart")
    watch.start()
    page.evaluate("location.hash = '#/conversations'")
    page.wait_for_selector(".list tbody tr")
    watch.lap(f"{title}: list of conversations")


def measure(folder, playwright):
    evict(folder)
    command = [sys.executable, "-m", "viva.cli", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        address = server.stdout.readline().strip()
        watch = Stopwatch()
        look(page, address, watch, "cold")
        page.wait_for_function("() => Number(document.getElementById('total').textContent) > 0")
        page.wait_for_function("() => document.getElementById('status').textContent === ''")
        watch.lap("cold: all indexed")
        look(page, address, watch, "warm")
        watch.start()
        page.evaluate("location.hash = '#/conversation/7/3'")
        page.wait_for_selector("table.rounds")
        watch.lap("warm: one conversation")
        memory = memory_mb(server)
        page.evaluate("location.hash = '#/conversations'")
        for number in range(1, PAGES + 1):
            page.wait_for_function(
                f"() => document.querySelector('.pages')?.textContent.includes('page {number} of')"
            )
            page.keyboard.press("]")
        grown = memory_mb(server) - memory
        browser.close()
        server.terminate()
    return watch.found, memory, grown


def read_options(arguments):
    """Options with their defaults; what is not understood is refused."""
    options = {"conversations": 10_000, "repeats": 5}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in options or not value.isdecimal() or int(value) < 1:
            sys.exit(
                f"{argument!r} is no option; allowed: {', '.join(f'{each}=N' for each in options)}, N from 1"
            )
        options[name] = int(value)
    return options


def main():
    options = read_options(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        size = make_run(Path(name), options["conversations"])
        found = [measure(Path(name), playwright) for _ in range(options["repeats"])]
    print(f"{options['conversations']} conversations, {size:.0f} MB, median of {len(found)}")
    print(f"{'':>30}  seconds (least to most)  processor seconds")
    for title in found[0][0]:
        clock, processor = zip(*(laps[title] for laps, *_ in found), strict=True)
        spread = f"{statistics.median(clock):.2f} ({min(clock):.2f} to {max(clock):.2f})"
        print(f"{title:>30}  {spread:>23}  {statistics.median(processor):17.2f}")
    memory, grown = (statistics.median(each[place] for each in found) for place in (1, 2))
    print(f"server memory {memory:.0f} MB; {grown:+.1f} MB after {PAGES} pages of the list")


if __name__ == "__main__":
    main()
