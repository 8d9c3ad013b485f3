"""The engine that the clients of one service share: the pump, training operations, loaded and merged models."""

import hashlib
import itertools
import os
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet, finalize

import torch

from viva.engine.adapters import Adapter, AdapterRows, adaptable
from viva.engine.checkpoint import State, check_base_of, read_state
from viva.engine.decoder import Decoder
from viva.engine.gguf import gguf_folder, is_gguf
from viva.engine.layers import fuse_layers
from viva.engine.linear import join_linears, pack_linears
from viva.engine.model import BaseModel, cast_weights, load_base_model
from viva.engine.policy import Snapshot
from viva.engine.replay import Recorder, check_replays
from viva.engine.scheduler import EngineLimits, OperationQueue, Pump
from viva.model_files import is_inside

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CLIENT_FOLDER = re.compile(r"client-([0-9]{6,12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The decoder that serves a snapshot, and the adapter that it adds there."""

    decoder: Decoder
    adapter: Adapter | None
    """``None`` where the decoder's weights are the snapshot's own."""


@dataclass(kw_only=True, eq=False)
class Core:
    """One engine: a device, one pump, and everything that is shared between clients. See `LocalServiceClient`."""

    device: torch.device
    dtype: torch.dtype
    """Precision of weights and updates."""
    decode_dtype: torch.dtype
    """Precision in which the copy that samples computes."""
    matrix_dtype: torch.dtype
    """Precision in which it keeps its matrices."""
    state_dir: Path | None
    one_run: bool
    seed: int
    limits: EngineLimits
    shared_batch: bool = False

    def __post_init__(self) -> None:
        self.pump = Pump()
        self.operations = OperationQueue(self.pump, self._forget_prefixes)
        self._decoders: WeakSet[Decoder] = WeakSet()
        self._shared: dict[int, Decoder] | None = {} if self.shared_batch else None
        """By the id of their base, decoders of all its adapters."""
        self._counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._owners: dict[Path, str] = {}
        """Training clients by the checkpoints that they saved."""
        self._models: dict[str, BaseModel] = {}
        self._copies: OrderedDict[int, PreTrainedModel] = OrderedDict()
        self._recorder = Recorder(self.device) if self.device.type == "cuda" else None

    @property
    def precision(self) -> str:
        """The compute dtype, for instance ``float32``."""
        kinds = self.dtype, self.decode_dtype, self.matrix_dtype
        base, decoded, matrices = (str(dtype).removeprefix("torch.") for dtype in kinds)
        if matrices != decoded:
            return f"{base}, sampled with matrices in {matrices}"
        return base if base == decoded else f"{base}, sampled in {decoded}"

    @property
    def model_names(self) -> list[str]:
        """Base models loaded so far."""
        return list(self._models)

    def base_model(self, name: str) -> BaseModel:
        """A base model, loaded on first use; a GGUF file is unpacked first (`viva.engine.gguf`)."""
        name = str(gguf_folder(name)) if is_gguf(name) else name
        # one local folder may be named in several ways
        key = os.path.realpath(name) if os.path.isdir(name) else name
        if key not in self._models:
            self._models[key] = load_base_model(name, self.device, self.dtype)
            if self._recorder is not None:
                check_replays(self._models[key], self._recorder)
        return self._models[key]

    def open_state(self, path: str, base_model: str | None) -> tuple[State, BaseModel]:
        """A checkpoint and its base model, which is now at ``base_model`` if it has moved.

        Raises:
            ValueError: The checkpoint cannot be read, or belongs to another model.
        """
        state = read_state(path)
        base = self.base_model(base_model or state.base_model)
        check_base_of(state, base.name, base.digests)
        return state, base

    def claim_folder(self) -> Path:
        """A folder for the checkpoints of one training client, which no other has, of this process or another.

        The clients of one run share theirs, see `claim_name`.

        Raises:
            ValueError: The service was made without ``state_dir``.
        """
        if self.state_dir is None:
            raise ValueError("There is nowhere to save to. Give LocalServiceClient a state_dir.")
        if self.one_run:
            return self.state_dir
        self.state_dir.mkdir(parents=True, exist_ok=True)
        found = [_CLIENT_FOLDER.fullmatch(path.name) for path in self.state_dir.iterdir()]
        free = itertools.count(1 + max((int(match[1]) for match in found if match), default=-1))
        while True:
            folder = self.state_dir / f"client-{next(free):06d}"
            with suppress(FileExistsError):  # another process took it meanwhile
                folder.mkdir()
                return folder

    def claim_name(self, path: Path, model_id: str) -> None:
        """Refuse the place of a checkpoint that another client of the service saved to, by a `ValueError`."""
        owner = self._owners.setdefault(path, model_id)
        if owner != model_id:
            raise ValueError(
                f"another training client of this service has saved {path.name!r} in {str(path.parent)!r}, the "
                "state_dir of one run (one_run=True). Give its clients other names, or make a service without one_run."
            )

    def check_own(self, path: Path) -> None:
        """Refuse a path that is not in the service's ``state_dir``, all links followed, by a `ValueError`."""
        if self.state_dir is None or not is_inside(path, self.state_dir):
            raise ValueError(
                f"{str(path)!r} is not in this service's state_dir, {str(self.state_dir)!r}, all links followed. What "
                "lies elsewhere is neither written nor deleted: give the state_dir it belongs to."
            )

    def count(self, key: str) -> int:
        """Count a key; returns how often it was counted before."""
        return next(self._counts[key])

    def derived_seed(self, *key: str | int) -> int:
        """A seed that depends on the service's seed and the key alone, in ``[0, 2**63)``."""
        text = "/".join(map(str, (self.seed, *key)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def new_source(self, snapshot: Snapshot) -> Source:
        """A decoder for a snapshot: of its own, which merges it when it is first asked, or that of its base."""
        join = partial(join_linears, keep_as=self.matrix_dtype)
        if self._shared is None or snapshot.scale is None:
            decoder = self._new_decoder(
                lambda: pack_linears(
                    fuse_layers(cast_weights(snapshot.merged(), self.decode_dtype), join), join
                )
            )
            return Source(decoder=decoder, adapter=None)
        base = snapshot.base
        if id(base) not in self._shared:
            rows = AdapterRows()
            self._shared[id(base)] = self._new_decoder(
                lambda: adaptable(cast_weights(base.decode_copy(), self.decode_dtype), rows, join), rows
            )
        adapter = Adapter(snapshot.weights, snapshot.scale, self.decode_dtype)
        return Source(decoder=self._shared[id(base)], adapter=adapter)

    def _new_decoder(
        self, build: "Callable[[], PreTrainedModel]", rows: AdapterRows | None = None
    ) -> Decoder:
        version = self.count("weights")
        recorder = self._recorder if rows is None else None  # what is recorded would fix the adapters
        decoder = Decoder(lambda: self._decode_copy(version, build), self.device, self.limits, recorder, rows)
        finalize(decoder, self._copies.pop, version, None)  # once no client can ask for it, in any thread
        self._decoders.add(decoder)
        return decoder

    def _forget_prefixes(self) -> None:
        """Start every decoder afresh.

        Reused keys equal computed ones only up to rounding. Forgetting them at every training operation (saving and
        loading are operations too) makes what follows a checkpoint independent of what came before it, to the bit.
        """
        for decoder in self._decoders:
            decoder.forget()

    def _decode_copy(self, version: int, build: "Callable[[], PreTrainedModel]") -> "PreTrainedModel":
        if version not in self._copies:
            surplus = len(self._copies) + 1 - self.limits.merged_models
            for oldest in [*self._copies][: max(surplus, 0)]:
                self._copies.pop(oldest, None)
            self._copies[version] = build()
        self._copies.move_to_end(version)
        return self._copies[version]
