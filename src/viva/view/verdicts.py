"""What a judge said, as HTML: every pair of agents in both orders, and revised against initial solutions."""

from collections.abc import Callable, Sequence

from viva.view.judgement import agreement_of_comparisons, judge_pairs, pair_cycles
from viva.view.markup import data, escape, text_block
from viva.view.recorded import RecordedComparison, RecordedConversation

__all__ = ["verdicts_html"]

_Pair = tuple[int | None, int, int]
"""Agent whose solutions were compared (``None``: two agents'), what was shown first, what second."""

_STAGES = ("initial", "revised")


def verdicts_html(record: RecordedConversation) -> str:
    """All comparisons of a conversation as tables; nothing if there were none."""
    by_pair: dict[_Pair, list[RecordedComparison]] = {}
    for item in record.comparisons:
        by_pair.setdefault((item.agent_id, item.first, item.second), []).append(item)
    return (
        _between_agents(by_pair)
        + _of_revisions(by_pair)
        + _sum(record)
        + _written(record.comparisons)
        + _asked(record)
    )


def _sum(record: RecordedConversation) -> str:
    """Flips, cycles, and agreement with the known answers, where there are any."""
    if not record.comparisons:
        return ""
    said = [(item.agent_id, item.first, item.second, item.outcome) for item in record.comparisons]
    pairs = judge_pairs(said)
    both = [pair for pair in pairs if pair.in_both_orders]
    cycles = "; ".join(
        " &gt; ".join(_agent(int(str(item))) for item in (*cycle, cycle[0])) for cycle in pair_cycles(pairs)
    )
    agreement = agreement_of_comparisons(said, record.correct_initial or {}, record.correct or {})
    parts = [
        f"{sum(pair.is_flipped for pair in both)} of {len(both)} pairs flip with the order",
        f"cycles: {cycles or 'none'}",
    ]
    if agreement.num_pairs:
        parts.append(f"{agreement.num_right} of {agreement.num_pairs} verdicts agree with the known answers")
    return f'<p class="muted">{"; ".join(parts)}.</p>'


def _between_agents(by_pair: dict[_Pair, list[RecordedComparison]]) -> str:
    agents = sorted({agent for whose, *pair in by_pair if whose is None for agent in pair})
    if not agents:
        return ""
    heads = "".join(f'<th scope="col">second: agent {agent}</th>' for agent in agents)
    rows = "".join(
        f'<tr><th scope="row">first: agent {first}</th>'
        + "".join(_cell(by_pair, (None, first, second), _agent) for second in agents)
        + "</tr>"
        for first in agents
    )
    return (
        '<h4>Verdicts</h4><p class="muted">Who won, and the score from \u22121 (first wins) to +1 '
        "(second wins), for each order in which a pair was shown.</p>"
        f'<div class="scroll"><table class="verdicts"><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _of_revisions(by_pair: dict[_Pair, list[RecordedComparison]]) -> str:
    agents = sorted({whose for whose, _, _ in by_pair if whose is not None})
    if not agents:
        return ""
    heads = "".join(f'<th scope="col">{stage} shown first</th>' for stage in _STAGES)
    rows = "".join(
        f'<tr><th scope="row">agent {agent}</th>'
        f"{_cell(by_pair, (agent, 0, 1), _stage)}{_cell(by_pair, (agent, 1, 0), _stage)}</tr>"
        for agent in agents
    )
    return (
        '<h4>Revised against initial</h4><p class="muted">Which of an agent\'s two solutions won, and the score '
        "from \u22121 (the one shown first wins) to +1, for each order.</p>"
        f'<div class="scroll"><table class="verdicts"><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _written(comparisons: Sequence[RecordedComparison]) -> str:
    texts = "".join(
        f"<p>{_shown_order(item)}</p>{text_block(item.text)}" for item in comparisons if item.text.strip()
    )
    return f"<details><summary>What the judge wrote</summary>{texts}</details>" if texts else ""


def _asked(record: RecordedConversation) -> str:
    """The judge's prompts, word for word."""
    judge = record.judge
    prompts = "".join(
        f"<p>{_shown_order(item)}</p>{text_block(item.prompt)}" for item in record.comparisons if item.prompt
    )
    if judge is None or not prompts:
        return ""
    begins = f"<p>Its reply begins with</p>{text_block(judge.prefill)}" if judge.prefill else ""
    system = f"<p>System message</p>{text_block(judge.system_prompt)}"
    return f"<details><summary>What the judge read</summary>{system}{prompts}{begins}</details>"


def _shown_order(item: RecordedComparison) -> str:
    if item.agent_id is None:
        return f"Agent {item.first} first, agent {item.second} second"
    return f"Agent {item.agent_id}: {_stage(item.first)} first, {_stage(item.second)} second"


def _cell(by_pair: dict[_Pair, list[RecordedComparison]], where: _Pair, name: Callable[[int], str]) -> str:
    """The verdicts on one ordered pair; one that the other order contradicts is marked."""
    whose, first, second = where
    comparisons = by_pair.get(where)
    if not comparisons:
        return '<td class="none"></td>'
    mirrored = {_winner(item) for item in by_pair.get((whose, second, first), ())}
    lines: list[str] = []
    for item in comparisons:
        winner = _winner(item)
        text = escape(item.outcome) if winner is None else name(winner)
        score = "" if item.score is None else f" {data(item.score, f'{item.score:+.2f}')}"
        flip = "" if winner is None or not mirrored - {winner, None} else ' <span class="flip">flips</span>'
        lines.append(f"<p>{text}{score}{flip}{_probabilities(item)}</p>")
    return f"<td>{''.join(lines)}</td>"


def _agent(agent: int) -> str:
    return f"agent {agent}"


def _stage(item: int) -> str:
    return _STAGES[item] if item in (0, 1) else f"solution {item}"


def _winner(item: RecordedComparison) -> int | None:
    return {"A": item.first, "B": item.second}.get(item.outcome)


def _probabilities(item: RecordedComparison) -> str:
    if item.probabilities is None:
        return ""
    shown = ", ".join(
        f"{label} {data(probability, f'{probability:.2f}')}"
        for label, probability in zip(("A", "B", "tie"), item.probabilities, strict=True)
    )
    return f'<br><span class="muted">{shown}</span>'
