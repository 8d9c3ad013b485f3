"""What a run leaves with a remote engine: states that resume finds, with no end of life where there must be none."""

from types import SimpleNamespace

import httpx
import pytest
import tinker

from viva.rl.checkpoints import Checkpoints

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


async def test_a_state_whose_answer_was_lost_is_saved_under_another_name(tmp_path):
    server = Server(lost={"000001"})
    checkpoint = await save(Checkpoints(tmp_path), server, 1)
    assert checkpoint.state_path == "tinker://run/weights/000001-again"
