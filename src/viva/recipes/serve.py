"""``viva serve``: the options, and the policy that is served."""

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import chz

from viva.loopback import LOOPBACK, check_packages, listen
from viva.recipes.evaluation.target import OpenPolicy, Target, find_target, open_policy
from viva.sdk import ServiceClient
from viva.training.service import EngineConfig, make_service


@chz.chz
class ServeOptions:
    """Options of ``viva serve``."""

    port: int = chz.field(default=8080, doc="0 takes a free one")
    address: str = chz.field(
        default=LOOPBACK, doc="IP address to listen at; any but the default can be reached by other machines"
    )
    token: str | None = chz.field(
        default=None,
        doc="what clients give as their API key; default: that of VIVA_SERVE_TOKEN, else a new one",
    )
    name: str | None = chz.field(
        default=None, doc="the model's name for clients; default: MODEL as it was given"
    )
    checkpoint: str | None = chz.field(default=None, doc="of a run: its name, or base; default: the last")
    model_name: str | None = chz.field(default=None, doc="base model of an adapter that does not name it")
    renderer_name: str | None = chz.field(
        default=None, doc="default: that of the run, else derived from the model"
    )
    device: str | None = chz.field(default=None, doc="cpu or cuda; a GPU if there is one")
    precision: Literal["float32", "fast", "bfloat16"] = "float32"
    queue: int = chz.field(
        default=256, doc="requests that are answered or wait at once; further ones get 429"
    )
    timeout_s: float = chz.field(default=600.0, doc="longest time for an answer")
    state_dir: str | None = chz.field(
        default=None, doc="folder for weights that clients save; default: a temporary one, gone at the end"
    )


def serve_model(target: str, options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve a run's checkpoint, a model or an adapter until the process is interrupted.

    The target is as for ``viva eval``; `say` gets the address and the token.

    Raises:
        ValueError: If a package is missing, an option makes no sense, or the policy cannot be opened.
    """
    check_packages("viva serve")
    if importlib.util.find_spec("tinker.proto") is None:
        raise ValueError(
            "viva serve speaks the protocol of tinker 0.38, and an older one is installed: pip install tinker==0.38.0"
        )
    from viva.engine import LocalSamplingClient, LocalServiceClient
    from viva.serve.app import ServerLimits, choose_token, serve
    from viva.serve.sampling import ServedPolicy
    from viva.serve.tinker_engine import TinkerEngine
    from viva.serve.tinker_store import ServedWeights
    from viva.serve.transport import EngineThread

    token = choose_token(options.token)
    limits = ServerLimits(queue=options.queue, timeout_s=options.timeout_s)
    found = find_target(target, checkpoint=options.checkpoint, model_name=options.model_name)
    config = EngineConfig(device=options.device, precision=options.precision)
    with listen(options.port, options.address) as listener, tempfile.TemporaryDirectory() as temporary:
        states = Path(options.state_dir or temporary).expanduser().absolute()
        engine = EngineThread()
        try:
            opened, service = engine.do(_open(found, config, states, options.renderer_name))
            assert isinstance(opened.client, LocalSamplingClient)  # of the local engine
            assert isinstance(service, LocalServiceClient)
            name = options.name or target
            serve(
                engine,
                ServedPolicy(name, opened.client, opened.renderer),
                listener=listener,
                token=token,
                limits=limits,
                tinker=TinkerEngine(
                    ServedWeights(service=service, model=opened.model, names=(name, target), state_dir=states)
                ),
                say=say,
            )
        finally:
            engine.close()


async def _open(
    target: Target, config: EngineConfig, states: Path, renderer_name: str | None
) -> tuple[OpenPolicy, ServiceClient]:
    # clients may open adapters beside what is served
    service = make_service(config, state_dir=states, num_policies=2)
    renderer_name = renderer_name or target.config.get("renderer_name")
    return await open_policy(target, config, renderer_name=renderer_name, service=service), service
