"""How many tokens need not be computed? Drafts copied from the context, and samples that change no weight.

    python benchmarks/drafts.py RUN [RUN ...]

Reads what was said in runs (``transcripts.jsonl``) and computes nothing. A table by segment has

- *drafts*: what speculative decoding would gain if the tokens behind the last place with the same two tokens as now, in
  what the agent has read and written, were tried as the next k (prompt lookup). Such a draft is accepted with the
  probability that the policy gives it (Leviathan et al. 2022, arXiv 2211.17192, where the draft's distribution is
  one-hot), which is how often a sample equals it: so the tokens a step are those that these samples would have had. A
  step of R rows then computes R (k + 1); `benchmarks/decode.py` tells what that takes.
- *equal rewards*: the share of sampled tokens in groups whose rewards are all equal: of plain samples, those without
  an advantage.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DRAFTS = (1, 3, 7)
"""Tokens that are tried at once."""
BEHIND = 2
"""Last tokens that an earlier place must have in common with the present one."""

Row = Mapping[str, Any]
Reply = tuple[str, list[int], list[int]]
"""Segment, ids of what was read and written before, ids of the reply."""


def tokens_a_step(context: Sequence[int], reply: Sequence[int], most: int) -> float:
    """Tokens of a reply by steps that decode it, with at most so many draft tokens in each."""
    known = list(context)
    places = {tuple(known[at - BEHIND : at]): at for at in range(BEHIND, len(known))}
    steps, done = 0, 0
    while done < len(reply):
        at = places.get(tuple(known[-BEHIND:]))
        draft = [] if at is None else known[at : at + most]
        right = next(
            (n for n, (own, got) in enumerate(zip(draft, reply[done:], strict=False)) if own != got), None
        )
        taken = min(len(reply) - done, (len(draft) if right is None else right) + 1)
        for token in reply[done : done + taken]:
            places[tuple(known[-BEHIND:])] = len(known)
            known.append(token)
        steps, done = steps + 1, done + taken
    return len(reply) / steps


def replies_of(row: Row, ids_of: Any) -> Iterator[Reply]:
    """The replies of a conversation or a group."""
    said: dict[int, list[int]] = defaultdict(list)
    for turn in row["record"]["turns"]:
        context = said[turn["agent_id"]]
        context += ids_of(turn["prompt"])
        reply = ids_of(turn["text"])
        if reply:
            yield turn["segment"], list(context), reply
        context += reply


def table(rows: Iterable[Row], ids_of: Any) -> str:
    """One line a segment, and one of all."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    equal = total = 0
    for row in rows:
        rewards = row["rewards"]
        for segment, context, reply in replies_of(row, ids_of):
            steps = [len(reply) / tokens_a_step(context, reply, most) for most in DRAFTS]
            for name in (segment, "all"):
                found[name].append([len(context), len(reply), *steps])
            total += len(reply)
            equal += len(reply) * (len(set(rewards)) <= 1)
    lines = ["| segment | replies | context | reply | " + " | ".join(f"k = {k}" for k in DRAFTS) + " |"]
    lines.append("|---" * (4 + len(DRAFTS)) + "|")
    for name, each in found.items():
        context, tokens, *steps = (sum(column) for column in zip(*each, strict=True))
        gains = " | ".join(f"{tokens / count:.2f}" for count in steps)
        lines.append(
            f"| {name} | {len(each)} | {context / len(each):.0f} | {tokens / len(each):.0f} | {gains} |"
        )
    return "\n".join([*lines, "", f"equal rewards: {100 * equal / total:.0f} % of {total:,} sampled tokens"])


def main(folders: Sequence[str]) -> None:
    from transformers import AutoTokenizer

    from viva.engine.gguf import gguf_folder

    if not folders:
        raise SystemExit("give folders of runs: python benchmarks/drafts.py RUN [RUN ...]")
    for folder in map(Path, folders):
        model = json.loads((folder / "config.json").read_text())["model_name"]
        tokenizer = AutoTokenizer.from_pretrained(
            gguf_folder(Path(model)) if model.endswith(".gguf") else model
        )
        rows = map(json.loads, (folder / "transcripts.jsonl").read_text().splitlines())
        print(f"{folder}, {model}\n\n{table(rows, partial(tokenizer.encode, add_special_tokens=False))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
