"""Updates on a SkyRL server."""

import httpx
import numpy as np
import tinker

from viva.training import update

SEED = 5


CONFIG = update.UpdateConfig(learning_rate=1e-3)


def random_datum(rng, low, high, length):
    """Random targets of ids from `low` to below `high`."""
    tokens = rng.integers(low, high, length + 1)
    values = {
        "target_tokens": tokens[1:].astype(np.int64),
        "logprobs": np.full(length, -2.0, np.float32),
        "advantages": rng.normal(size=length).astype(np.float32),
        "mask": np.ones(length, np.float32),
    }
    inputs = {name: tinker.TensorData.from_numpy(value) for name, value in values.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def datums(step, count=8, length=12):
    """Random data, of one batch size and length so that nothing is compiled twice."""
    rng = np.random.default_rng([SEED, step])
    return [random_datum(rng, 10, 200, length) for _ in range(count)]


def leave(address, client):
    """Give the adapter's place back, which otherwise stays taken for minutes."""
    request = {"model_id": client.model_id, "type": "unload_model"}
    httpx.post(f"{address}/api/v1/unload_model", json=request).raise_for_status()
