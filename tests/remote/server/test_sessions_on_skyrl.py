"""SkyRL hears nothing of the end of a session, and nothing of the session after it."""

import time

from sdk_heartbeats import heartbeats

from viva.sdk import settled
from viva.training.service import EngineConfig, Engines


async def test_a_session_that_is_over_sends_no_sign_of_life(server, tmp_path):
    before = heartbeats()
    engine = EngineConfig(engine="remote", base_url=server.address)
    async with Engines(tmp_path) as engines:
        await settled(engines.service(engine).create_sampling_client(base_model=str(server.model)))
        assert len(heartbeats() - before) == 1
    deadline = time.monotonic() + 10
    while not heartbeats() <= before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
