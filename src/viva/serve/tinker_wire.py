"""The binary form in which the SDK of Tinker sends gradients' requests and takes tensors."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import tinker
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as wire
from tinker.types.topk_logprobs import TopkLogprobs

from viva.serve.bodies import RequestError

_MOST_DATUMS = 2**16
_MOST_CELLS = 2**26
_KINDS: Mapping[int, tuple[type[np.generic], Literal["float32", "int64"]]] = {
    wire.DTYPE_FLOAT32: (np.float32, "float32"),
    wire.DTYPE_INT64: (np.int64, "int64"),
}


def read_gradients(raw: bytes) -> wire.ForwardBackwardRequest:
    """A request to compute losses, and their gradients unless it is for the losses alone, from a body.

    Raises:
        RequestError: If it is no such request.
    """
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise RequestError(f"the body is no request for gradients: {error}") from error
    return message


def loss_config(message: wire.ForwardBackwardRequest) -> dict[str, float | str] | None:
    """Settings of a request's loss, if there are any."""
    newer: dict[str, float | str] = {
        name: value.text if value.HasField("text") else value.number
        for name, value in message.loss_fn_config_v2.items()
    }
    return newer or dict(message.loss_fn_config) or None


def read_data(message: wire.ForwardBackwardRequest) -> list[tinker.Datum]:
    """A request's datums.

    Raises:
        ValueError: If they hold what the engine does not compute (images, audio), or are damaged.
    """
    if len(message.data) > _MOST_DATUMS:
        raise RequestError(f"{len(message.data)} datums are too many; send {_MOST_DATUMS} at most at once")
    return [_read_datum(each) for each in message.data]


def _read_datum(message: wire.Datum) -> tinker.Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise RequestError("the local engine takes text alone, no images and no audio")
        tokens += np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
    inputs = {name: _read_tensor(tensor) for name, tensor in message.loss_fn_inputs.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def _read_tensor(message: wire.Tensor) -> tinker.TensorData:
    if message.dtype not in _KINDS:
        raise RequestError(f"tensors must hold float32 or int64; got kind {message.dtype}")
    kind, name = _KINDS[message.dtype]
    shape = list(message.shape)
    if message.HasField("sparse_csr"):
        if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > _MOST_CELLS:
            raise RequestError(f"a sparse tensor must have two sides and {_MOST_CELLS} cells; got {shape}")
        sparse = message.sparse_csr
        return tinker.TensorData(
            data=np.frombuffer(sparse.values, dtype=kind).copy(),
            dtype=name,
            shape=shape,
            sparse_crow_indices=np.frombuffer(sparse.crow_indices, dtype=np.int64).tolist(),
            sparse_col_indices=np.frombuffer(sparse.col_indices, dtype=np.int64).tolist(),
        )
    values = np.frombuffer(message.dense, dtype=kind).copy()
    if shape and (min(shape) < 0 or int(np.prod(shape)) != values.size):
        raise RequestError(f"a tensor of shape {shape} has {values.size} values")
    return tinker.TensorData(data=values, dtype=name, shape=shape or None)


def write_losses(output: tinker.ForwardBackwardOutput) -> bytes:
    """The answer to a request for gradients; one record per datum, since their lengths differ."""
    message = wire.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type)
    for name, value in output.metrics.items():
        # the SDK puts the metrics of several answers together as their names say
        message.metrics[name if ":" in name else f"{name}:mean"] = value
    for fields in output.loss_fn_outputs:
        record = message.loss_fn_outputs.add(num_datums=1)
        for name, tensor in fields.items():
            array = np.ascontiguousarray(tensor.to_numpy())
            is_float = np.issubdtype(array.dtype, np.floating)
            raw = array.astype(np.float32 if is_float else np.int64).tobytes()
            field = record.fields[name]
            field.dtype = wire.DTYPE_FLOAT32 if is_float else wire.DTYPE_INT64
            field.data = raw
            field.offsets = np.array([0, len(raw)], dtype=np.int64).tobytes()
            field.trailing_shape.extend(array.shape[1:])
    return message.SerializeToString()


def write_samples(response: tinker.SampleResponse) -> bytes:
    """The answer to a request for samples."""
    message = wire.SampleResponse()
    for sequence in response.sequences:
        each = message.sequences.add()
        is_stopped = sequence.stop_reason == "stop"
        each.stop_reason = wire.STOP_REASON_STOP if is_stopped else wire.STOP_REASON_LENGTH
        each.tokens = np.asarray(sequence.tokens_np, dtype=np.int32).tobytes()
        if sequence.logprobs_np is not None:
            each.logprobs = np.asarray(sequence.logprobs_np, dtype=np.float32).tobytes()
        if sequence.topk_logprobs_np is not None:
            each.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk_logprobs_np))
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = np.asarray(response.prompt_logprobs_np, dtype=np.float32).tobytes()
    if response.topk_prompt_logprobs_np is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(response.topk_prompt_logprobs_np))
    if response.target_prompt_logprobs is not None:
        array = response.target_prompt_logprobs.to_numpy().astype(np.float32)
        message.target_prompt_logprobs.CopyFrom(
            wire.Tensor(dense=array.tobytes(), dtype=wire.DTYPE_FLOAT32, shape=array.shape)
        )
    return message.SerializeToString()


def _topk(matrices: TopkLogprobs) -> wire.TopkLogprobs:
    length, k = matrices.token_ids.shape
    return wire.TopkLogprobs(
        token_ids=matrices.token_ids.astype(np.int32).tobytes(),
        logprobs=matrices.logprobs.astype(np.float32).tobytes(),
        k=k,
        length=length,
    )
