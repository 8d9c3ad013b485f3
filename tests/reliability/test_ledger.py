"""The ledger keeps nothing of a test that failed when it was tried again, or that now claims something else."""

from pathlib import Path


def test_a_test_that_was_begun_again_keeps_only_what_held_now(pytestconfig):
    page = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))

    def entry(claim, test):
        return page.Entry(recipe="1", claim=claim, trials=1, seed=None, figures="", seconds=0.0, test=test)

    known = page.merged([], [entry("old words", "a"), entry("fails", "b"), entry("other", "c")], set("abc"))
    rows = page.merged(known, [entry("new words", "a")], {"a", "b"})
    assert [(row["claim"], row["test"]) for row in rows] == [("other", "c"), ("new words", "a")]
