"""Reading beside the requests: nobody waits for it, and of a large run little is held in memory."""

import gc
import json
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from view_runs import transcript, write_lines

from viva.view.app import make_app
from viva.view.guard import cookie_name
from viva.view.reading import Reading

MakeRun = Callable[..., Path]

TOKEN, PORT = "secret-token", 4321
MEGABYTE = 1e6


class EndlessRun:
    """Has something new until it is told to stop."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.num_slices = 0

    def refresh(self, budget_s: float) -> bool:
        assert 0 < budget_s < 0.1
        self.num_slices += 1
        return self.is_over.is_set()


def test_a_request_is_answered_while_the_files_are_read() -> None:
    run: Any = EndlessRun()
    lock = threading.Lock()
    reading = Reading([run], lock)
    reading.go_on()
    for _ in range(20):
        assert lock.acquire(timeout=60)
        lock.release()
    assert not reading.is_complete(run)
    assert run.num_slices > 1
    run.is_over.set()
    while not reading.is_complete(run):
        reading.go_on()
    slices = run.num_slices
    reading.go_on()  # looks again
    assert (run.num_slices, reading.is_complete(run)) == (slices + 1, True)


async def test_reading_and_paging_through_a_large_run_holds_little_of_it_in_memory(make_run: MakeRun) -> None:
    folder = make_run(steps=1, transcripts=[], token_rows=[])
    for step in range(40):
        write_lines(
            folder / "transcripts.jsonl",
            [transcript(step, group, question="x" * 50_000) for group in range(10)],
        )
    size = (folder / "transcripts.jsonl").stat().st_size
    assert size > 20 * MEGABYTE
    transport = httpx.ASGITransport(app=make_app([folder], token=TOKEN))
    headers = {"Cookie": f"{cookie_name(TOKEN)}={TOKEN}"}
    async with httpx.AsyncClient(
        transport=transport, base_url=f"http://127.0.0.1:{PORT}", headers=headers
    ) as client:

        async def ask(path: str) -> dict[str, Any]:
            return json.loads((await client.get(path)).content)

        await ask("/api/runs")  # what is made once: threads, codecs
        gc.collect()
        tracemalloc.start()
        while not (await ask("/api/runs"))["runs"][0]["is_complete"]:
            pass
        seen: set[tuple[int, int]] = set()
        for page in range(8):
            rows = (await ask(f"/api/conversations?page={page}&order=-reward"))["rows"]
            seen |= {(row["step"], row["group"]) for row in rows}
            await ask(f"/api/conversation?step={rows[0]['step']}&group={rows[0]['group']}")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(seen) == 400
    assert peak < 0.15 * size


async def test_a_link_to_a_conversation_may_be_the_first_thing_that_is_asked_for(make_run: MakeRun) -> None:
    folder = make_run(steps=5)
    transport = httpx.ASGITransport(app=make_app([folder], token=TOKEN))
    headers = {"Cookie": f"{cookie_name(TOKEN)}={TOKEN}"}
    async with httpx.AsyncClient(
        transport=transport, base_url=f"http://127.0.0.1:{PORT}", headers=headers
    ) as client:
        found = await client.get("/api/conversation?step=4&group=0")
        assert found.json()["tokens"] is not None
        missing = await client.get("/api/conversation?step=9&group=0")
        assert (missing.status_code, missing.json()["error"]) == (
            404,
            "this run has no conversation 0 in step 9",
        )
