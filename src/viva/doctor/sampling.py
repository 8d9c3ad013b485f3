"""Probes of sampling: whether it does what was asked, with the logprobs that the trainer has.

Legend: ``_T`` tokens of a sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import tinker

from viva.doctor.bench import Array, Bench, Probe, WrongAnswerError
from viva.doctor.training import aim
from viva.judging.judge import SamplingClient, accepts, sample

_TOP_K = 5
_NUM_SAMPLES = 4
_UNREADABLE = "\ufffd"
_ONE_TOKEN = tinker.SamplingParams(max_tokens=1, temperature=1.0, seed=1)


def _logprobs(sequence: tinker.SampledSequence) -> Array:
    if sequence.logprobs is None:
        raise WrongAnswerError("samples come without logprobs")
    return np.asarray(sequence.logprobs, dtype=np.float64)


async def _samples(bench: Bench) -> str:
    sequences = await bench.draw(_NUM_SAMPLES, max_tokens=6, stop=[])
    if len(sequences) != _NUM_SAMPLES:
        raise WrongAnswerError(f"asked for {_NUM_SAMPLES} samples, got {len(sequences)}")
    for sequence in sequences:
        count, reason = len(sequence.tokens), sequence.stop_reason
        if len(_logprobs(sequence)) != count:
            raise WrongAnswerError(f"{count} tokens were sampled with {len(_logprobs(sequence))} logprobs")
        if not 0 < count <= 6 or (count < 6 and reason != "stop"):
            raise WrongAnswerError(f"with max_tokens=6 a sample has {count} tokens and stop_reason={reason}")
    return f"{_NUM_SAMPLES} samples of at most 6 tokens with their logprobs"


async def _agreement(bench: Bench) -> str:
    sequences = await bench.draw(_NUM_SAMPLES)
    reported = [_logprobs(sequence) for sequence in sequences]
    trained = await bench.score_completions(*(sequence.tokens for sequence in sequences))
    what = "the sampler's logprobs of its own tokens differ from the trainer's"
    gap = bench.check_gap(np.concatenate(reported), np.concatenate(trained), what)
    return f"logprobs differ by {gap:.2g} on average"


async def _after_three_steps(bench: Bench) -> tuple[float, float, float]:
    """Changes of a logprob in three steps: for the trainer, a sampler made before them, one made after them."""
    target = await aim(bench)
    old = await bench.sampler()
    before_T = await _prompt_logprobs(bench, old)
    for _ in range(3):
        await bench.step([target.push(-1.0)], "importance_sampling")
    new_T = await _prompt_logprobs(bench, await bench.sampler())
    same_T = await _prompt_logprobs(bench, old)
    stayed, followed = (float((now_T - before_T)[target.place]) for now_T in (same_T, new_T))
    return await target.change(), stayed, followed


async def _followers(bench: Bench) -> str:
    trained, _, followed = await _after_three_steps(bench)
    if abs(followed - trained) > abs(trained) / 3:
        raise WrongAnswerError(
            f"three steps changed a logprob by {trained:+.2g}, for a new sampler by {followed:+.2g}: samplers do not "
            "follow the trainer"
        )
    return f"three steps change a logprob by {trained:+.2g}, for a new sampler by {followed:+.2g}"


async def _snapshots(bench: Bench) -> str:
    trained, stayed, _ = await _after_three_steps(bench)
    if abs(stayed) > abs(trained) / 3:
        raise WrongAnswerError(
            f"three steps changed a logprob by {trained:+.2g}, for a sampler made before them by {stayed:+.2g}"
        )
    return f"three steps change a logprob by {trained:+.2g}, for a sampler made before them by {stayed:+.2g}"


async def _prompt_logprobs(bench: Bench, client: SamplingClient) -> Array:
    """Logprobs of the prompt's tokens but the first, also from an engine that leaves the first one's place out."""
    reported = await _reported_of_prompt(client, bench.prompt)
    if len(reported) < len(bench.tokens) - 1:
        raise WrongAnswerError(f"a prompt of {len(bench.tokens)} tokens has {len(reported)} logprobs")
    return np.array(reported[-len(bench.tokens) + 1 :], dtype=np.float64)  # an empty place is no number


async def _reported_of_prompt(client: SamplingClient, prompt: tinker.ModelInput) -> list[float | None]:
    response = await sample(client, prompt, _ONE_TOKEN, include_prompt_logprobs=True)
    return list(response.prompt_logprobs or [])


async def _prompts(bench: Bench) -> str:
    reported = await _reported_of_prompt(await bench.sampler(), bench.prompt)
    if len(reported) != len(bench.tokens):
        raise WrongAnswerError(
            f"a prompt of {len(bench.tokens)} tokens has {len(reported)} logprobs; the first one has a place, too, an "
            "empty one"
        )
    (trained_T,) = await bench.score(bench.tokens)
    what = "logprobs of the prompt differ from the trainer's"
    gap = bench.check_gap(np.array(reported[1:], dtype=np.float64), trained_T, what)
    return f"they differ from the trainer's by {gap:.2g} on average"


async def _prompt_end(bench: Bench) -> str:
    """A judge without alternatives asks for this: the logprob of a token that is put behind the prompt."""
    client = await bench.sampler()
    rows = [await _reported_of_prompt(client, bench.prompt.append_int(token)) for token in bench.tokens[:2]]
    reported = [row[-1] if row else None for row in rows]
    if None in reported:
        raise WrongAnswerError(f"the last tokens of two prompts have the logprobs {reported}")
    trained = np.concatenate(await bench.score_completions(*([token] for token in bench.tokens[:2])))
    what = "the logprob of a prompt's last token differs from the trainer's"
    gap = bench.check_gap(np.array(reported, dtype=np.float64), trained, what)
    return f"it differs from the trainer's by {gap:.2g} on average"


async def _check_row(bench: Bench, row: Sequence[tuple[int, float]] | None) -> str:
    """The most probable tokens after the prompt."""
    if not row or len({token for token, _ in row}) != _TOP_K:
        raise WrongAnswerError(f"asked for {_TOP_K} different tokens, got {row}")
    reported = np.array([logprob for _, logprob in row])
    trained = np.concatenate(await bench.score_completions(*([token] for token, _ in row)))
    gap = float(np.abs(np.sort(reported) - np.sort(trained)).mean())
    if not gap <= bench.tolerance or np.exp(reported).sum() > 1 + bench.tolerance:
        raise WrongAnswerError(
            f"logprobs {np.round(reported, 3).tolist()} are {np.round(trained, 3).tolist()} for the trainer"
        )
    return f"they differ from the trainer's by {gap:.2g} on average"


async def _topk_samples(bench: Bench) -> str:
    client = await bench.sampler()
    if not accepts(client.sample, "topk_sample_logprobs"):
        raise ValueError(f"tinker {tinker.__version__} cannot ask for them")
    response = await sample(client, bench.prompt, _ONE_TOKEN, topk_sample_logprobs=_TOP_K)
    rows = cast(Any, response.sequences[0]).topk_logprobs
    return await _check_row(bench, rows[0] if rows else None)


async def _topk_prompts(bench: Bench) -> str:
    # what could stand in the place of a token that is added to the prompt
    longer = bench.prompt.append_int(bench.tokens[0])
    response = await sample(
        await bench.sampler(), longer, _ONE_TOKEN, include_prompt_logprobs=True, topk_prompt_logprobs=_TOP_K
    )
    rows = response.topk_prompt_logprobs
    return await _check_row(bench, rows[-1] if rows else None)


async def _seeds(bench: Bench) -> str:
    drawn = [
        [list(sequence.tokens) for sequence in await bench.draw(_NUM_SAMPLES, seed=seed)]
        for seed in (1, 1, 2)
    ]
    if drawn[0] != drawn[1]:
        raise WrongAnswerError("the same seed gives other samples")
    if drawn[0] == drawn[2]:
        raise WrongAnswerError("another seed gives the same samples")
    if all(tokens == drawn[0][0] for tokens in drawn[0] + drawn[2]):
        raise WrongAnswerError("the samples of one request are all the same")
    return "the same seed gives the same samples, another one others"


async def _greedy(bench: Bench) -> str:
    first, second = [(await bench.draw(temperature=0.0, max_tokens=4, seed=seed))[0] for seed in (1, 2)]
    if list(first.tokens) != list(second.tokens):
        raise WrongAnswerError("temperature 0 gives different samples")
    others = await bench.draw(8, max_tokens=1)
    candidates = [[first.tokens[0]], *([sequence.tokens[0]] for sequence in others)]
    best, *rest = (float(scored[0]) for scored in await bench.score_completions(*candidates))
    if best < max(rest) - bench.tolerance:
        raise WrongAnswerError(
            f"temperature 0 gives a token of logprob {best:.3f} where {max(rest):.3f} can be had"
        )
    return "temperature 0 gives the most probable token"


async def _temperature(bench: Bench) -> str:
    temperature = 2.0
    sequences = await bench.draw(16, max_tokens=1, temperature=temperature)
    reported = {sequence.tokens[0]: float(_logprobs(sequence)[0]) for sequence in sequences}
    if len(reported) < 2:
        raise WrongAnswerError(f"16 samples at temperature {temperature} are all the same token")
    trained = np.concatenate(await bench.score_completions(*([token] for token in reported)))
    gap = bench.check_tempered(np.array(list(reported.values())), trained, temperature)
    return f"logprobs are those of the tempered distribution, to {gap:.2g}"


async def _stop_tokens(bench: Bench) -> str:
    base = list((await bench.draw(temperature=0.0, stop=[]))[0].tokens)
    place = max(index for index, token in enumerate(base) if token not in base[:index])
    (stopped,) = await bench.draw(temperature=0.0, stop=[base[place]])
    if list(stopped.tokens) != base[: place + 1] or stopped.stop_reason != "stop":
        raise WrongAnswerError(
            f"the model says {base}; with stop=[{base[place]}] it says {list(stopped.tokens)} "
            f"with stop_reason={stopped.stop_reason}"
        )
    return f"a sample ends with its stop token, here after {place + 1} tokens"


async def _stop_strings(bench: Bench) -> str:
    settings, base = await _readable(bench)
    texts = [str(bench.tokenizer.decode(base[: count + 1])) for count in range(len(base))]
    pieces = [str(bench.tokenizer.decode([token])) for token in base]
    stop = next(piece for piece in reversed(pieces) if piece and _UNREADABLE not in piece)
    place = next(index for index, text in enumerate(texts) if stop in text)
    (stopped,) = await bench.draw(**settings, stop=[stop])
    if list(stopped.tokens) != base[: place + 1] or stopped.stop_reason != "stop":
        raise WrongAnswerError(
            f"the model says {texts[-1]!r}; with stop=[{stop!r}] it says "
            f"{bench.tokenizer.decode(list(stopped.tokens))!r} with stop_reason={stopped.stop_reason}"
        )
    return f"a sample ends with the token that completes {stop!r}"


async def _readable(bench: Bench) -> tuple[dict[str, Any], list[int]]:
    """Settings with which the model says the same again, and some of it is text.

    It ends at the end of text: that may end a sample beside stop strings.
    """
    for seed in range(9):
        settings: dict[str, Any] = {"temperature": 0.0 if seed == 0 else 1.0, "seed": seed}
        tokens = list((await bench.draw(**settings))[0].tokens)
        pieces = [str(bench.tokenizer.decode([token])) for token in tokens]
        if any(piece and _UNREADABLE not in piece for piece in pieces):
            return settings, tokens
    raise ValueError("the model says nothing that is text, so there is nothing to stop at")


SAMPLING: Mapping[str, Probe] = {
    "samples": _samples,
    "sampler and trainer agree": _agreement,
    "new samplers follow": _followers,
    "old samplers stay": _snapshots,
    "prompt logprobs": _prompts,
    "last logprob of prompts": _prompt_end,
    "top-k of samples": _topk_samples,
    "top-k of prompts": _topk_prompts,
    "seeds": _seeds,
    "greedy samples": _greedy,
    "temperature in logprobs": _temperature,
    "stop tokens": _stop_tokens,
    "stop strings": _stop_strings,
}
"""By name, in the order in which they are asked."""
