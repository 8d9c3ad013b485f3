"""The rows of the table: who does which work, and what is aimed at."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from work import batch_title


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to do the work, in a process of its own."""

    script: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: str = "viva"
    """Whose interpreter runs it: ``viva``, ``peers`` (TRL, transformers), ``engines`` (vLLM, llama.cpp), ``skyrl``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Cost of one side by that of another, both of the same repeat."""

    over: str
    under: str
    name: str = "cost"
    """The figure that is compared."""
    aim: float | None = None
    at_most: bool = False
    """Whether the aim is an upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of one side by itself."""

    side: str
    name: str
    title: str
    aim: float | None = None
    at_most: bool = False
    largest: bool = False
    """Whether the largest of the repeats counts, not their median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Sides that take turns."""

    work: str
    unit: str = "s"
    """Of the sides' ``cost``."""
    sides: Mapping[str, Side]
    ratios: tuple[Ratio, ...] = ()
    figures: tuple[Figure, ...] = ()
    model: str = "42m"
    notes: tuple[str, ...] = ()


F32, BF16 = {"precision": "float32"}, {"precision": "bfloat16"}
OURS, OURS_FAST, OURS_BF16 = "viva, float32", "viva, fast", "viva, bfloat16"
VLLM, VLLM_BF16 = "vLLM, float32", "vLLM, bfloat16"
LLAMA, LLAMA_Q8 = "llama.cpp, float16", "llama.cpp, Q8_0"
_PEER_PAIRS = (
    (VLLM, OURS),
    (VLLM_BF16, OURS_BF16),
    (LLAMA, OURS),
    (LLAMA, OURS_BF16),
    (LLAMA_Q8, OURS_BF16),
)
TRL, TRL_BF16, SKYRL = "TRL, float32", "TRL, bfloat16", "SkyRL JAX, float32"
ALONE, BUSY = "alone", "beside a busy process"

Aims = tuple[float | None, float | None]
NONE: Aims = (None, None)


def _step(shape: str, model: str, aims: Aims = NONE, aims_bf16: Aims = NONE) -> Row:
    """A full policy-gradient step against TRL and, with random weights, SkyRL; aims are against these two."""
    common = {"shape": shape}
    training = {"micro_batch": _MICRO_BATCH[shape] // (2 if model in ("85m", "smollm2") else 1)}
    sides = {
        OURS: Side(script="side_viva.py", settings={"work": "step"} | common | F32),
        OURS_BF16: Side(script="side_viva.py", settings={"work": "step"} | common | BF16),
        TRL: Side(script="side_trl.py", settings=common | training | F32, environment="peers"),
        TRL_BF16: Side(script="side_trl.py", settings=common | training | BF16, environment="peers"),
    }
    notes = ["TRL trains without gradient checkpointing (its default is with it, which is slower)."]
    if model != "smollm2":
        sides[SKYRL] = Side(script="side_skyrl.py", settings=common | training, environment="skyrl")
        notes.insert(
            0,
            "SkyRL's backend runs in process: no server, no database, no checkpoint between update and sampling.",
        )
    if model == "42m":
        notes.append(_CAUSES)
    ratios = (
        Ratio(over=TRL, under=OURS, aim=aims[0]),
        Ratio(over=SKYRL, under=OURS, aim=aims[1]),
        Ratio(over=TRL, under=OURS_BF16, aim=aims_bf16[0]),
        Ratio(over=TRL_BF16, under=OURS_BF16),
        Ratio(over=SKYRL, under=OURS_BF16, aim=aims_bf16[1]),
    )
    return Row(
        work=f"GRPO step {_STEPS[shape]}",
        model=model,
        sides=sides,
        ratios=tuple(ratio for ratio in ratios if ratio.over in sides),
        notes=tuple(notes),
    )


def _ragged() -> Row:
    work = {
        "work": "ragged",
        "prompts": [random.Random(index).randrange(32, 161) for index in range(32)],
        "group": 8,
        "max_tokens": 192,
        "stop_every": 48,
    }
    static, continuous = "transformers generate", "transformers generate_batch"
    return Row(
        work="rollouts with ragged lengths, 32 prompts x 8",
        unit="ms by token",
        sides={
            OURS: Side(script="side_viva.py", settings=work | F32),
            OURS_BF16: Side(script="side_viva.py", settings=work | BF16),
            static: Side(
                script="side_transformers.py",
                settings=work | F32 | {"continuous": False},
                environment="peers",
            ),
            continuous: Side(
                script="side_transformers.py", settings=work | F32 | {"continuous": True}, environment="peers"
            ),
        },
        ratios=(
            Ratio(over=static, under=OURS, aim=3),
            Ratio(over=continuous, under=OURS, aim=5),
            Ratio(over=static, under=OURS_BF16, aim=3),
            Ratio(over=continuous, under=OURS_BF16, aim=5),
        ),
        notes=(
            "Prompts have 32 to 160 tokens, replies 47 on average and 192 at most.",
            "The adapter is left out on the peers' side.",
        ),
    )


def _batches(
    batches: Sequence[tuple[int, int, int, int]],
    aims: Mapping[str, Mapping[str, float]],
    work: str,
    pairs: Sequence[tuple[str, str]] = _PEER_PAIRS,
) -> Row:
    """Samples of SmolLM2 right after an update; aims by peer and batch. Sides are those of the pairs."""

    def side(script: str, precision: str, environment: str = "engines") -> Side:
        settings = {"work": "batches", "precision": precision, "batches": batches}
        return Side(script=script, settings=settings, environment=environment)

    sides = {
        OURS: side("side_viva.py", "float32", "viva"),
        OURS_FAST: side("side_viva.py", "fast", "viva"),
        OURS_BF16: side("side_viva.py", "bfloat16", "viva"),
        VLLM: side("side_vllm.py", "float32"),
        VLLM_BF16: side("side_vllm.py", "bfloat16"),
        LLAMA: side("side_llama.py", "float16"),
        LLAMA_Q8: side("side_llama.py", "q8_0"),
    }
    named = {name for pair in pairs for name in pair}
    titles = [batch_title(distinct, samples) for distinct, samples, *_ in batches]
    return Row(
        work=work,
        unit="ms by token",
        model="smollm2",
        sides={name: each for name, each in sides.items() if name in named},
        ratios=tuple(
            Ratio(over=over, under=under, name=title, aim=aims.get(f"{over} / {under}", {}).get(title))
            for over, under in pairs
            for title in titles
        ),
        notes=(
            "'8 x 1' is eight prompts with one sample of each. A batch begins with fresh weights; reading or packing "
            "them is in its time. Nothing is known of its prompts before.",
            "vLLM reads its weights anew, llama.cpp loads its file anew, both from the page cache; merging an adapter "
            "into them and writing them is not counted. Viva's refresh begins with the trained adapter.",
            "llama.cpp draws with its own sampler and gives no log-probabilities; the others give those of each token.",
        ),
    )


def _real_conversation(
    system: str, conversations: int, micro_batch: int, work: str, precision: Mapping[str, str]
) -> Row:
    """A step on SmolLM2, beside rollouts by vLLM with a plain update of as many rows at once as memory holds.

    A row has one precision: memory does not hold the sides of both.
    """

    def side(engine: str) -> Side:
        settings = {
            "engine": engine,
            "system": system,
            "agents": 4,
            "rounds": 3,
            "max_tokens": 64,
            "verdict": 1,
            "conversations": conversations,
            "micro_batch": micro_batch,
        }
        return Side(script="side_conversation.py", settings=settings | precision)

    ours, vllm = (f"{engine}, {precision['precision']}" for engine in ("viva", "vLLM and a plain update"))
    return Row(
        work=work,
        model="smollm2",
        unit="s by conversation",
        sides={ours: side("viva"), vllm: side("vllm")},
        ratios=(Ratio(over=vllm, under=ours, aim=6),),
        notes=(
            f"Both run the same conversations, {conversations} at once, with turns of exactly 64 tokens; judge and "
            "votes are label probabilities. vLLM answers all requests that wait in one batch, with its prefix cache.",
            f"The plain update: padded rows, {micro_batch} at once, an unmerged adapter, no gradient checkpointing.",
        ),
    )


def _conversation(agents: int, rounds: int) -> Row:
    def side(conversations: int, precision: Mapping[str, str], *, engine: str = "viva") -> Side:
        settings = {
            "system": "round_robin",
            "agents": agents,
            "rounds": rounds,
            "max_tokens": 64,
            "verdict": 64,
            "micro_batch": 4,
        }
        return Side(
            script="side_conversation.py",
            settings=settings | {"engine": engine, "conversations": conversations} | precision,
        )

    several, one, several_bf16 = "viva, 8 at once", "viva, 1 alone", "viva, 8 at once, bfloat16"
    return Row(
        work=f"full conversation step: {agents} agents x {rounds} rounds, {agents * (agents - 1)} judge calls, update",
        unit="s by conversation",
        sides={
            several: side(8, F32),
            one: side(1, F32),
            several_bf16: side(8, BF16),
            "plainly": side(1, F32, engine="plain"),
        },
        ratios=(
            Ratio(over="plainly", under=several, aim=15),
            Ratio(over="plainly", under=one),
            Ratio(over="plainly", under=several_bf16, aim=15),
        ),
        notes=(
            "Plainly: one reply after another, each from its whole prompt; generated verdicts of 64 tokens; padded "
            "rows, all logits. Conversations follow one another, so one of them is timed.",
            "Rollouts and update are those of all conversations of the step.",
            "What is missing: turns follow one another, so rollouts are a thousand decode steps of as many rows as "
            "there are conversations, each behind a context of its own, which is a third of such a step. Products take "
            "more than half of the update, at the machine's rate (benchmarks/log.md).",
        ),
    )


def _judge() -> Row:
    work = {"work": "judge", "transcript": 768, "suffix": 24, "pairs": 12, "verdict": 64}
    warm, cold, verdicts = (
        "viva, transcript sampled from before",
        "viva, transcript new",
        "generated verdicts",
    )
    return Row(
        work="12 judge pairs behind a transcript of 768 tokens",
        sides={
            warm: Side(script="side_viva.py", settings=work | F32 | {"warm": True}),
            cold: Side(script="side_viva.py", settings=work | F32 | {"warm": False}),
            verdicts: Side(script="side_transformers.py", settings=work | F32, environment="peers"),
        },
        ratios=(Ratio(over=verdicts, under=warm, aim=25), Ratio(over=verdicts, under=cold)),
        notes=("A generated verdict has 64 tokens; all twelve are one batch.",),
    )


def _limit(model: str, training: float, prefill: float, decode: float) -> Row:
    """Aims are per cent."""

    def figures(side: str) -> tuple[Figure, ...]:
        def of(name: str, title: str, aim: float | None = None) -> Figure:
            return Figure(side=side, name=name, title=title, aim=aim)

        return (
            of("training_distinct", "training, 12 distinct rows: % of the limit", training),
            of("training_long", "training, 768/48/12: % of the limit", training),
            of("prefill", "prefill, 12 distinct prompts of 768: % of the limit", prefill),
            of("decode_1", "decode, 1 row: % of the limit", decode),
            of("decode_12", "decode, 12 rows: % of the limit", decode),
            of("decode_32", "decode, 32 rows: % of the limit", decode),
            *(
                of(f"products_{rows}", f"decode, {rows} rows, products alone: % of the limit")
                for rows in (1, 12, 32)
            ),
            of("gflops", "the machine: products, GFLOP/s"),
            of("gb_per_s", "the machine: reading, GB/s"),
        )

    sides = {
        OURS: Side(script="side_limit.py", settings=F32),
        OURS_BF16: Side(script="side_limit.py", settings=BF16),
    }
    return Row(
        work="distance to the limit",
        model=model,
        sides=sides,
        figures=(*figures(OURS), *figures(OURS_BF16)),
        notes=(
            "The limit of training and prefill: the products of the frozen weights alone, measured at the same shapes; "
            "of decode: reading weights, keys and values once, or the products, whichever takes longer. 'Products "
            "alone' is a decode step's products one after another, with nothing between them: what is missing "
            "there is the product's, what lies between it and the step is ours.",
        ),
    )


def _orchestration() -> Row:
    def side(conversations: int) -> Side:
        settings = {"conversations": conversations, "agents": 3, "rounds": 4}
        return Side(script="side_orchestration.py", settings=settings)

    small, large = "1,000 at once", "10,000 at once"
    return Row(
        work="orchestration alone: scripted policy, 3 agents x 4 rounds, 6 verdicts",
        unit="processor ms by turn",
        sides={small: side(1000), large: side(10_000)},
        figures=(
            Figure(
                side=small,
                name="cost",
                title="processor ms by turn",
                aim=0.5,
                at_most=True,
            ),
            Figure(side=large, name="cost", title="processor ms by turn"),
            Figure(side=small, name="kb", title="KB by conversation", largest=True),
            Figure(side=large, name="kb", title="KB by conversation", largest=True),
        ),
        ratios=(Ratio(over=large, under=small, aim=1.2, at_most=True),),
        notes=(
            "Linear growth is a ratio of 1. A turn's cost has its share of the verdicts in it. Memory is the growth of "
            "the process's peak.",
        ),
    )


def _busy() -> Row:
    work = {"work": "step", "shape": "balanced"} | F32
    return Row(
        work="128/128/12 step beside a process that multiplies matrices on as many threads",
        sides={
            ALONE: Side(script="side_viva.py", settings=work),
            BUSY: Side(script="side_viva.py", settings=work | {"busy": True}),
        },
        ratios=(Ratio(over=BUSY, under=ALONE, aim=2.2, at_most=True),),
    )


def _view() -> Row:
    side, titles = (
        "viva view",
        ("cold: first paint", "cold: first chart", "warm: first paint", "warm: one conversation"),
    )
    return Row(
        work="viva view of a run of 10,000 conversations",
        sides={side: Side(script="side_view.py", settings={"conversations": 10_000})},
        figures=(
            *(Figure(side=side, name=title, title=f"{title}, s") for title in titles),
            Figure(side=side, name="server memory, MB", title="server memory, MB"),
        ),
    )


_STEPS = {
    "long": "768/48/12, long prefix",
    "balanced": "128/128/12, balanced",
    "distinct": "12 x 128/128/1, no sharing",
}
_STEP_AIMS: dict[str, tuple[Aims, Aims]] = {
    "long": ((14, 10), (20, 15)),
    "balanced": ((3, 1.7), (5, 2.7)),
    "distinct": ((2.8, 1.5), (3.5, 2)),
}
"""Against TRL and SkyRL: ours in float32, ours in bfloat16. They are for 42 M parameters."""
_CAUSES = (
    "What is missing is what `rows=limit` shows. Its percentages are the share of an update that products with frozen"
    " weights would take at the machine's own rate; a decode step's percentage by that of its products alone is the "
    "share these take. The rest is attention, norms, rotary embeddings and the calls of all of these. Tried (the log)"
    " and in use: weights packed for oneDNN, oneDNN's products in training, layers of one input as one product, "
    "layers and products of our own in decoding, compiled kernels between the products and for attention in decoding,"
    " of prompts, of trees and of shared beginnings, a last layer that computes what is read, threads that spin, "
    "memory kept between steps. Tried and not in use: huge pages, norms in other forms, torch.compile between the "
    "products, our own products by the matrix instructions of AMX."
)
"""Why aims are missed, and what was tried."""
_MICRO_BATCH = {"long": 4, "balanced": 12, "distinct": 12}
"""Rows that peers train at once: all twelve are slower where they are long. Larger models have half, for memory."""


ROWS: dict[str, Row] = {
    **{shape: _step(shape, "42m", *_STEP_AIMS[shape]) for shape in _STEPS},
    "ragged": _ragged(),
    "conversation": _conversation(4, 4),
    "conversation-3x5": _conversation(3, 5),
    "judge": _judge(),
    "limit": _limit("42m", 60, 60, 50),
    "orchestration": _orchestration(),
    "busy": _busy(),
    "view": _view(),
    **{f"{shape}-{model}": _step(shape, model) for model in ("1m", "85m") for shape in _STEPS},
    "batches-smollm2": _batches(
        (
            (8, 1, 128, 64),
            (1, 8, 128, 64),
            (1, 1, 128, 64),
            (64, 1, 128, 64),
            (1, 64, 128, 64),
            (8, 8, 128, 64),
        ),
        {
            "vLLM, float32 / viva, float32": dict.fromkeys(("64 x 1", "1 x 64", "8 x 8"), 2.0),
            "vLLM, bfloat16 / viva, bfloat16": dict.fromkeys(("64 x 1", "1 x 64", "8 x 8"), 2.0),
            **dict.fromkeys(
                ("llama.cpp, float16 / viva, float32", "llama.cpp, float16 / viva, bfloat16"),
                dict.fromkeys(("64 x 1", "1 x 64", "8 x 8"), 1.5) | {"1 x 1": 1.0},
            ),
        },
        "samples of 64 tokens behind prompts of 128, right after an update",
    ),
    "batches-fast-smollm2": _batches(
        ((8, 1, 128, 64), (1, 8, 128, 64), (1, 1, 128, 64), (64, 1, 128, 64)),
        {f"{LLAMA} / {OURS_FAST}": {"1 x 1": 1.0, "64 x 1": 1.5}},
        "the same, matrices of the copy that samples in bfloat16",
        ((OURS, OURS_FAST), (LLAMA, OURS_FAST)),
    ),
    "batches-256-smollm2": _batches(
        ((8, 1, 128, 32), (256, 1, 128, 32), (8, 32, 128, 32)),
        {},
        "256 samples of 32 tokens behind prompts of 128, right after an update",
    ),
    **{
        f"{name}{suffix}-smollm2": _real_conversation(*sizes, work, precision)
        for name, sizes, work in (
            (
                "conversation",
                ("round_robin", 4, 1),
                "full step of conversation preference RL: 4 agents x 3 rounds, 12 judge calls, update",
            ),
            (
                "critique",
                ("critique", 2, 2),
                "full step of critique self-play: 4 agents, votes by labels, update",
            ),
        )
        for suffix, precision in (("", F32), ("-bf16", BF16))
    },
    **{f"{shape}-smollm2": _step(shape, "smollm2", (8, None), (8, None)) for shape in ("long", "balanced")},
    "limit-smollm2": _limit("smollm2", 65, 75, 60),
}
"""By the name that ``rows=`` takes, in the order of the table."""
