"""Clients of older SDKs are awaited like those of newer ones, and never called where they would block the loop."""

import inspect

import pytest
import tinker

import viva.engine
from viva.sdk import settled
from viva.tiny import model_path
from viva.training.service import EngineConfig, awaitable_service, end_session, make_service


class Trainer(tinker.TrainingClient):
    """Has the methods of older SDKs."""

    def __init__(self):
        self.model_id = "m"

    def save_weights_and_get_sampling_client(self):
        raise AssertionError("called where it blocks")

    async def save_weights_and_get_sampling_client_async(self):
        return "sampler"


class OldService:
    def create_lora_training_client(self, *args, **options):
        raise AssertionError("called where it blocks")

    async def create_lora_training_client_async(self, base_model, rank=32, seed=None):
        self.asked = (base_model, rank, seed)
        return Trainer()


class NewService(OldService):
    """Its twins are deprecated; its methods return futures."""

    async def create_lora_training_client_async(self, *args, **options):
        raise AssertionError("deprecated")

    create_lora_training_client_async.__deprecated__ = "use the other one"

    async def create_lora_training_client(self, base_model, rank=32, seed=None):
        return Trainer()


async def test_older_clients_are_awaited_by_their_twins():
    old = OldService()
    trainer = await settled(awaitable_service(old).create_lora_training_client("m", rank=4, seed=1))
    assert old.asked == ("m", 4, 1)
    assert trainer.model_id == "m"
    assert await settled(trainer.save_weights_and_get_sampling_client()) == "sampler"


class Holder:
    is_closed = False

    def close(self):
        self.is_closed = True


async def test_a_session_that_cannot_be_closed_is_no_longer_kept_alive():
    old = OldService()
    old.holder = Holder()
    await end_session(awaitable_service(old), "success")
    assert old.holder.is_closed


async def test_a_session_is_closed_where_the_sdk_can():
    class ClosingService(OldService):
        async def close(self, status):
            self.status = status

    old = ClosingService()
    await end_session(awaitable_service(old), "errored")
    assert old.status == "errored"


async def test_newer_clients_stay_as_they_are():
    new = NewService()
    assert awaitable_service(new) is new
    assert isinstance(await settled(new.create_lora_training_client("m")), Trainer)


async def test_where_the_local_engine_is_installed_a_remote_one_is_it(tmp_path):
    with viva.engine.install(device="cpu"):
        service = make_service(EngineConfig(engine="remote"), state_dir=tmp_path)
        client = await settled(service.create_lora_training_client(str(model_path()), rank=2, seed=0))
    assert isinstance(client, viva.engine.LocalTrainingClient)


@pytest.mark.parametrize("client", [tinker.ServiceClient, tinker.TrainingClient])
def test_the_installed_sdk_has_the_twins_or_has_deprecated_them(client):
    twins = [
        method
        for name, method in inspect.getmembers(client, inspect.isfunction)
        if name.removesuffix("_async")
        in ("create_lora_training_client", "save_weights_and_get_sampling_client")
        and name.endswith("_async")
    ]
    assert twins
