"""The k-th file operation of a run fails, for every k, in every way: nothing is lost, and the user is told what to do.

After SQLite's tests: the operations are those of a whole run with its checkpoints, logs and journal (see
`faulty_disk`), and k goes on until a run passes.
"""

import random

import pytest
from disk_cases import last_good, outcome, server
from faulty_disk import FAULTS

SEED = 20261122


@pytest.fixture(scope="module")
def run():
    return server()


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """What an undisturbed run leaves, and how many operations it takes, by fault."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder)["error"] == ""
    left = outcome(folder)
    counts = {}
    for fault in ("ENOSPC", "full", "short"):  # to the others, each operation counts as to the first
        counted = tmp_path_factory.mktemp("counted") / "run"
        counts[fault] = len(run(counted, k=0, fault=fault)["operations"])
    return left, {fault: counts.get(fault, counts["ENOSPC"]) for fault in FAULTS}


def check(run, folder, whole, **disturbance):
    """One disturbed run: it ends well or is told to the user, and the next one ends as if nothing had been."""
    result = run(folder, **disturbance)
    context = f"{disturbance} {result.get('struck')}: {result.get('error')} {result.get('told')}"
    if result.get("killed"):
        result = {"error": "", "saved": []}
    elif result["error"]:
        assert result["kind"] in ("OSError", "InterruptedError"), context
        assert str(folder) in result["error"], context
        assert "Make room there, or see to the disk." in result["error"], context
    assert last_good(folder) >= max(result["saved"], default=0), context
    again = run(folder)
    assert again["error"] == "", f"{context}, then {again['error']} {again['told']}"
    assert not again["told"], f"{context}, then {again['error']} {again['told']}"
    assert outcome(folder) == whole, context


def cases(counts, number):
    """Every operation and fault, or so many of them."""
    every = [
        (k, fault) for fault in FAULTS for k in range(1, counts[fault] + 3)
    ]  # the last ones strike nothing
    return every if number >= len(every) else random.Random(SEED).sample(every, number)


def test_whichever_file_operation_fails_the_run_is_whole_when_it_goes_on(
    run, whole, tmp_path, trials, ledger
):
    expected, counts = whole
    chosen = cases(counts, trials(short=15, full=10**9))
    for k, fault in chosen:
        check(run, tmp_path / f"{fault}-{k}" / "run", expected, k=k, fault=fault)
    figures = f"{counts['ENOSPC']} operations of a run (and of those {counts['short']} writes)"
    ledger(
        "2 disks and torn files",
        f"The k-th file operation fails ({', '.join(FAULTS)}): an error names the file, the last checkpoint loads, "
        "nothing is left over, and the resumed run is equal to the bit",
        trials=len(chosen),
        seed=SEED,
        figures=figures,
    )


def test_a_disk_on_which_no_file_may_grow_further_is_told(run, whole, tmp_path, trials, ledger):
    """The system itself refuses, also to the compiled code that writes tensors."""
    expected, _ = whole
    limits = [0, 1, 150, 400, 700, 1000, 2000, 4000] if trials(short=0, full=1) else [150, 400]
    for limit in limits:
        check(run, tmp_path / f"limit-{limit}" / "run", expected, limit=limit)
    ledger(
        "2 disks and torn files",
        "The system refuses to let files grow (RLIMIT_FSIZE), also to compiled code: the same holds",
        trials=len(limits),
    )


def test_the_check_sees_an_index_that_is_not_replaced_in_one_step(run, whole, tmp_path):
    expected, _ = whole
    operations = run(tmp_path / "counted" / "run", broken=True)["operations"]
    places = [k for k, name in enumerate(operations, 1) if name == "write checkpoints.jsonl"]
    assert len(places) == 4  # the first one before the first step
    for k in places:
        with pytest.raises((AssertionError, ValueError)):
            check(run, tmp_path / f"{k}" / "run", expected, k=k, fault="killed", broken=True)
