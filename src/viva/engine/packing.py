"""Training data checked and flattened, and which examples are computed together: as a prefix tree or as padded rows.

The order of the examples decides nothing: they are put into an order of their own first, by their contents.

Shapes: ``B`` rows padded to ``T`` tokens (one row of ``T`` packed tokens for a tree), ``N`` tokens of an example
(inputs and targets correspond one to one), ``K`` candidates per target.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import tinker

from viva.engine.kernels import can_compile
from viva.engine.losses import Loss
from viva.engine.model import decoder_layers, output_layer
from viva.engine.trees import PackedTree, pack_tree, shared_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MASK = "mask"
"""Loss input of any loss that may be left out: not 0 where a target's logprob and loss are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumArrays:
    """The arrays of one `tinker.Datum`: an example, as the loop of an update calls it."""

    tokens: np.ndarray
    """``[N]`` int64 model input."""
    targets: np.ndarray
    """``[N]`` or ``[N, K]`` int64."""
    inputs: Mapping[str, np.ndarray]
    """Inputs of the loss, float32, each of the targets' shape."""
    active: np.ndarray
    """Targets whose loss can have a gradient, booleans of the targets' shape."""
    wanted: np.ndarray
    """Targets whose logprob is computed, all active ones among them; booleans of the targets' shape."""


def make_examples(
    data: Sequence[tinker.Datum], loss: Loss, name: str, vocab_size: int, context_length: int
) -> list[DatumArrays]:
    """Check the data of one ``forward_backward``; a `ValueError` says which datum is wrong, and in what."""
    if not data:
        raise ValueError("No data were given; forward and forward_backward need at least one datum.")
    return [
        _make_example(index, datum, loss, name, vocab_size, context_length)
        for index, datum in enumerate(data)
    ]


def _make_example(
    index: int, datum: tinker.Datum, loss: Loss, name: str, vocab_size: int, context_length: int
) -> DatumArrays:
    tokens = np.asarray(datum.model_input.to_ints(), dtype=np.int64)
    given = datum.loss_fn_inputs
    allowed = {"target_tokens", *loss.inputs, _MASK}
    optional = {*loss.optional, _MASK}
    unknown, missing = sorted(set(given) - allowed), sorted(allowed - optional - set(given))
    if unknown or missing:
        raise ValueError(
            f"Datum {index}: loss {name!r} takes the inputs {sorted(allowed)}; missing {missing}, unknown {unknown}."
        )
    arrays = {key: given[key].to_numpy() for key in given}
    targets = arrays.pop("target_tokens").astype(np.int64)
    shape = targets.shape
    if not 1 <= targets.ndim <= 1 + loss.dense or len(targets) != len(tokens) or len(tokens) == 0:
        wanted = "[N] or [N, K]" if loss.dense else "[N]"
        raise ValueError(
            f"Datum {index}: target_tokens must have shape {wanted} with N = {len(tokens)}, the length of model_input "
            f"(at least 1), not {list(shape)}."
        )
    if len(tokens) > context_length:
        raise ValueError(f"Datum {index} has {len(tokens)} tokens; the model holds {context_length}.")
    for key, ids in (("model_input", tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                f"Datum {index}: {key} has ids from {ids.min()} to {ids.max()}; the model's are 0 to {vocab_size - 1}."
            )
    inputs: dict[str, np.ndarray] = {}
    for key in (*loss.inputs, _MASK):
        value = np.asarray(arrays.get(key, np.ones(shape)), dtype=np.float32)
        if value.shape != shape or not np.isfinite(value).all():
            raise ValueError(
                f"Datum {index}: {key} must be finite numbers of shape {list(shape)} like target_tokens; it has shape "
                f"{list(value.shape)} and {int((~np.isfinite(value)).sum())} values that are not finite."
            )
        inputs[key] = value
    wanted = inputs.pop(_MASK) != 0
    active = loss.active(inputs) & wanted
    return DatumArrays(tokens=tokens, targets=targets, inputs=inputs, active=active, wanted=wanted)


def micro_batches(examples: Sequence[DatumArrays], max_tokens: int) -> list[list[int]]:
    """Indices of examples computed together: of similar length, within a budget of padded tokens.

    Examples without any gradient are apart. The longest come first, so that what does not fit in memory fails at once.
    """

    def idle(example: DatumArrays) -> bool:
        return not example.active.any()

    order = sorted(
        range(len(examples)), key=lambda index: (idle(examples[index]), -len(examples[index].tokens))
    )
    batches: list[list[int]] = []
    for index in order:
        head = examples[batches[-1][0]] if batches else None
        if (
            head is not None
            and idle(head) == idle(examples[index])
            and (len(batches[-1]) + 1) * len(head.tokens) <= max_tokens
        ):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


_KERNEL_ENTRY, _TREE_ENTRY = 0.5, 2.0
"""Cost of an attention entry of a tree, with and without kernels for it, relative to one of rows."""
_CALL = {"cpu": 2e6, "cuda": 1e9}
"""Cost of a cell in each layer beside its products, in multiplications."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs of a forward pass, in multiplications."""

    token: float
    """A token in all linear layers, the output layer included."""
    entry: float
    """A query and a key that may see one another, in all layers and heads, of rows."""
    tree_entry: float
    """The same, of a tree."""
    call: float
    """A product of attention, in all layers, beside its entries."""

    @classmethod
    def of(cls, module: "PreTrainedModel") -> "CostModel":
        """The costs of a causal language model on the device it is on. Experts count as if all were used."""
        config = module.config
        heads = int(config.num_attention_heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        layers = int(config.num_hidden_layers)
        output = output_layer(module).weight
        has_kernels = can_compile(output) and getattr(config, "attn_logit_softcapping", None) is None
        entry = 2.0 * layers * heads * size
        matrices = {id(p): p.numel() for p in decoder_layers(module).parameters() if p.ndim > 1}
        return cls(
            token=float(sum(matrices.values()) + output.numel()),
            entry=entry,
            tree_entry=entry * (_KERNEL_ENTRY if has_kernels else _TREE_ENTRY),
            call=layers * _CALL.get(output.device.type, _CALL["cuda"]),
        )

    def tree(self, tree: PackedTree) -> float:
        """Cost of a packed tree."""
        entries = sum(cell.visible.size for cell in tree.cells)
        return self.token * len(tree.tokens) + self.tree_entry * entries + self.call * len(tree.cells)

    def rows(self, num_rows: int, length: int) -> float:
        """Cost of rows padded to a length."""
        entries = num_rows * length * (length + 1) / 2
        return self.token * num_rows * length + self.entry * entries + self.call


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Examples computed together."""

    indices: tuple[int, ...]
    """The examples' indices, in an order that depends on their contents alone."""
    tokens: np.ndarray
    """``[B, T]`` int64, padded on the right, where causal attention does not look."""
    places: tuple[np.ndarray, ...]
    """Per example ``[N]`` places of its tokens in the flattened ``B * T``."""
    tree: PackedTree | None
    """The tree by which the one row attends, or ``None`` for ordinary rows."""


def plan_batches(
    examples: Sequence[DatumArrays],
    costs: CostModel,
    max_tokens: int,
    *,
    trees: bool,
    enough_tokens: int | None = None,
) -> list[MicroBatch]:
    """Batches within a budget of tokens, padding included, that hold every example once.

    Examples without any gradient are apart. The others' neighbours in ascending order become trees, if the model takes
    them, which need no padding; one beyond the budget is cut into several, each with the shared prefix again. What is
    cheaper as padded rows becomes padded rows, and an example longer than the budget a batch of its own. The longest
    come first, so that what does not fit in memory fails at once.

    What is above `enough_tokens` is divided further, but a tree only where hardly anything is computed twice.
    """
    enough = max_tokens if enough_tokens is None else max(1, min(enough_tokens, max_tokens))
    order = sorted(range(len(examples)), key=lambda index: _content(examples[index]))
    batches: list[MicroBatch] = []
    alone = [] if trees else order
    for run in _runs(examples, order, max_tokens) if trees else []:
        for part in _parts(examples, run, enough):
            tree = _tree_batch(examples, part, costs, enough)
            if tree is None:
                alone += part
            else:
                batches.append(tree)
    rows = [examples[index] for index in alone]
    batches += [
        _row_batch(examples, [alone[place] for place in places]) for places in micro_batches(rows, enough)
    ]
    return sorted(
        batches, key=lambda batch: (not examples[batch.indices[0]].active.any(), -batch.tokens.size)
    )


def _content(example: DatumArrays) -> tuple[object, ...]:
    """Sorts examples without a gradient last, then by tokens in ascending order, then by all else."""
    # big-endian bytes of non-negative integers are in the order of the integers
    rest = [example.targets, example.wanted, *(example.inputs[key] for key in sorted(example.inputs))]
    return (
        not example.active.any(),
        example.tokens.astype(">i8").tobytes(),
        example.targets.shape,
        b"".join(array.tobytes() for array in rest),
    )


def _runs(examples: Sequence[DatumArrays], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut the sorted examples so that each part, as a tree, fits the budget and is of one kind.

    Of all such cuts one that computes the fewest tokens in all, and of these one into the fewest parts: a cut within
    a conversation computes again what its sides share.
    """
    shared = shared_lengths([examples[index].tokens for index in order])
    lengths = [len(examples[index].tokens) for index in order]
    kinds = [bool(examples[index].active.any()) for index in order]
    ends = [0, *accumulate(length - known for length, known in zip(lengths, shared, strict=True))]

    def fits(first: int, stop: int) -> bool:
        size = lengths[first] + ends[stop] - ends[first + 1]
        return first == stop - 1 or (size <= max_tokens and kinds[first] == kinds[stop - 1])

    # of the first examples: tokens and parts of the best cut, and where its last part begins
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    # beginnings of the last part, the best first; one that is worse than a later one is never needed again
    window: deque[tuple[int, int, int]] = deque()
    for stop in range(1, len(order) + 1):
        tokens, parts, _ = best[stop - 1]
        newest = (tokens + lengths[stop - 1] - ends[stop], parts + 1, stop - 1)
        while window and window[-1] > newest:
            window.pop()
        window.append(newest)
        while not fits(window[0][2], stop):
            window.popleft()
        tokens, parts, first = window[0]
        best.append((tokens + ends[stop], parts, first))
    runs: list[list[int]] = []
    stop = len(order)
    while stop:
        first = best[stop][2]
        runs.append(list(order[first:stop]))
        stop = first
    return runs[::-1]


_REPEATED = 1 / 16
"""Share of a part that may be computed again."""


def _parts(examples: Sequence[DatumArrays], run: Sequence[int], enough_tokens: int) -> list[list[int]]:
    """Divide a run between examples that share little, such as those of two prompts, so that each part is enough."""
    shared = shared_lengths([examples[index].tokens for index in run])
    firsts = [place for place, known in enumerate(shared) if not place or known <= _REPEATED * enough_tokens]
    parts, total = list[list[int]](), 0
    for first, stop in pairwise([*firsts, len(run)]):
        new = sum(len(examples[index].tokens) for index in run[first:stop]) - sum(shared[first:stop])
        if parts and total + new <= enough_tokens:
            parts[-1] += run[first:stop]
            total += new
        else:
            parts.append(list(run[first:stop]))
            total = shared[first] + new
    return parts


def _tree_batch(
    examples: Sequence[DatumArrays], run: Sequence[int], costs: CostModel, max_tokens: int
) -> MicroBatch | None:
    """The run as one tree, or ``None`` if padded rows are cheaper."""
    rows = [examples[index] for index in run]
    if len(rows) == 1:
        return None
    tree = pack_tree([row.tokens for row in rows], costs.call / costs.tree_entry)
    apart = sum(
        costs.rows(len(batch), max(len(rows[place].tokens) for place in batch))
        for batch in micro_batches(rows, max_tokens)
    )
    if costs.tree(tree) >= apart:
        return None
    return MicroBatch(indices=tuple(run), tokens=tree.tokens[None], places=tree.paths, tree=tree)


def _row_batch(examples: Sequence[DatumArrays], indices: Sequence[int]) -> MicroBatch:
    rows = [examples[index].tokens for index in indices]
    tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    places = tuple(number * tokens.shape[1] + np.arange(len(row)) for number, row in enumerate(rows))
    return MicroBatch(indices=tuple(indices), tokens=tokens, places=places, tree=None)
