"""How soon ``viva view`` shows something of a run of 10,000 conversations: medians over fresh servers and browsers.

    python benchmarks/view_paint.py [conversations=10000] [repeats=5]

Needs chromium on the PATH. Times count from the request of the page; memory is the server's, when all is indexed.
"""

import json
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


def memory_mb(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024


def measure(folder, playwright):
    command = [sys.executable, "-m", "viva.cli", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        address = server.stdout.readline().strip()
        started = time.perf_counter()
        page.goto(address)
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
        paint = page.evaluate(FIRST_PAINT) / 1000
        page.evaluate("location.hash = '#/conversations'")
        page.wait_for_selector(".list tbody tr")
        rows = time.perf_counter() - started
        page.wait_for_function("() => document.getElementById('status').textContent === ''")
        page.wait_for_function("() => Number(document.getElementById('total').textContent) > 0")
        indexed = time.perf_counter() - started
        started = time.perf_counter()
        page.evaluate("location.hash = '#/conversation/7/3'")
        page.wait_for_selector("table.rounds")
        found = (paint, rows, indexed, time.perf_counter() - started, memory_mb(server))
        browser.close()
        server.terminate()
    return found


def main():
    options = {"conversations": 10_000, "repeats": 5} | dict(argument.split("=") for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        size = make_run(Path(name), int(options["conversations"]))
        found = [measure(Path(name), playwright) for _ in range(int(options["repeats"]))]
    print(f"{options['conversations']} conversations, {size:.0f} MB, median of {len(found)}")
    titles = ("first paint, s", "first rows, s", "all indexed, s", "one conversation, s", "server memory, MB")
    for title, values in zip(titles, zip(*found, strict=True), strict=True):
        print(f"{title:>22}  {statistics.median(values):7.2f}  ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
