"""What a run leaves with a remote engine: states that resume finds, with no end of life where there must be none."""

from concurrent.futures import Future
from types import SimpleNamespace

import httpx
import pytest
import tinker

from viva.run.checkpoints import Checkpoints
from viva.training import remote
from viva.training.remote import state_deleter

DAY = 24 * 3600


class Server:
    """Saves states by name; a lost answer looks like a name that is taken."""

    def __init__(self, lost=()):
        self.lost = set(lost)
        self.saved = {}

    async def save_state(self, name, **options):
        self.saved[name] = options
        if name in self.lost:
            request = httpx.Request("POST", "http://s/api/v1/save_weights")
            raise tinker.ConflictError("exists", response=httpx.Response(409, request=request), body=None)
        return SimpleNamespace(path=f"tinker://run/weights/{name}")


async def save(checkpoints, server, step, **marks):
    return await checkpoints.save(server, next_step=step, log_sizes={}, **marks)


async def test_without_a_limit_no_engine_hears_of_one(tmp_path):
    server = Server()
    await save(Checkpoints(tmp_path), server, 1)
    await save(Checkpoints(tmp_path), server, 2, final=True)
    assert server.saved == {"000001": {}, "000002": {}}


async def test_what_the_run_leaves_has_no_end_of_life(tmp_path):
    server, checkpoints = Server(), Checkpoints(tmp_path, ttl_seconds=DAY)
    await save(checkpoints, server, 1)
    await save(checkpoints, server, 2, best=True)
    await save(checkpoints, server, 3, final=True)
    assert server.saved == {"000001": {"ttl_seconds": DAY}, "000002": {}, "000003": {}}


@pytest.mark.parametrize("mark", ["final", "best"])
async def test_a_state_with_an_end_of_life_is_saved_again_when_it_becomes_what_is_left(tmp_path, mark):
    server, checkpoints = Server(), Checkpoints(tmp_path, ttl_seconds=DAY)
    await save(checkpoints, server, 20)
    await save(checkpoints, server, 20, **{mark: True})
    assert server.saved == {"000020": {"ttl_seconds": DAY}, "000020-kept": {}}
    (left,) = checkpoints.all()
    assert (left.state_path, left.ttl_seconds) == ("tinker://run/weights/000020-kept", None)
    assert checkpoints.resolve(left) == "tinker://run/weights/000020-kept"
    await save(checkpoints, server, 20, final=True)
    assert len(server.saved) == 2


@pytest.mark.parametrize(
    ("ttl_seconds", "deleted"), [(DAY, ["tinker://run/weights/000001"]), (None, [])], ids=["limit", "none"]
)
async def test_a_former_best_state_that_is_dropped_is_deleted_where_others_have_an_end_of_life(
    tmp_path, ttl_seconds, deleted
):
    gone = []

    async def delete(path):
        gone.append(path)

    server, checkpoints = Server(), Checkpoints(tmp_path, keep=2, ttl_seconds=ttl_seconds)
    checkpoints.delete_on_server = delete
    await save(checkpoints, server, 1, best=True)
    await save(checkpoints, server, 2)
    await save(checkpoints, server, 3, best=True)
    await save(checkpoints, server, 4)
    assert gone == deleted
    await save(checkpoints, server, 5)
    assert [checkpoint.next_step for checkpoint in checkpoints.all()] == [3, 4, 5]
    assert gone == deleted  # the others have one of their own


@pytest.mark.parametrize("problem", [None, "refused", "slow"])
async def test_a_state_that_cannot_be_deleted_stays(problem, monkeypatch):
    monkeypatch.setattr(remote, "_DELETION_S", 0.01)
    asked, future = [], Future()

    class Rest:
        def delete_checkpoint_from_tinker_path(self, path):
            asked.append(path)
            if problem is None:
                future.set_result(None)
            if problem == "refused":
                request = httpx.Request("DELETE", "http://s/api/v1")
                response = httpx.Response(405, request=request)
                future.set_exception(tinker.APIStatusError("no", response=response, body=None))
            return future

    await state_deleter(SimpleNamespace(create_rest_client=Rest))("tinker://run/weights/000001")
    assert asked == ["tinker://run/weights/000001"]


async def test_a_state_whose_answer_was_lost_is_saved_under_another_name(tmp_path):
    server = Server(lost={"000001"})
    checkpoint = await save(Checkpoints(tmp_path), server, 1)
    assert checkpoint.state_path == "tinker://run/weights/000001-again"
