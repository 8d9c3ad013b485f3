// Rounds by agents: what each saw and what it said.

import { h, mark, signed } from "./dom.js";
import { text } from "./text.js";

function partText(turn, part) {
  if (part.startsWith("critique of agent ")) {
    const target = Number(part.slice("critique of agent ".length));
    const found = (turn.critiques || []).find((critique) => critique.target === target);
    return found ? found.text : turn.said;
  }
  const solution = turn.parts.find((each) => each.name === "solution");
  return part === "solution" && solution ? solution.text : turn.said;
}

function earlier(record, { turn, part }) {
  const said = record.turns[turn];
  return `${part} by agent ${said.agent} (round ${said.round + 1}, ${said.segment})`;
}

function sights(record, turn, where) {
  return h("details", { class: "saw" }, h("summary", {}, "What it saw"),
    record.system.head ? [h("h4", {}, "System message"), text(record.system, where, "system"), h("h4", {}, "Prompt")] : null,
    text(turn.saw, where, "prompt"),
    turn.seen.length ? h("p", { class: "seen" }, h("b", {}, "In it: "), turn.seen.map((each) => earlier(record, each)).join("; ")) : null,
    turn.hidden.length ? h("div", { class: "hidden-parts" }, h("b", {}, `Hidden from it: ${turn.hidden.length}`),
      turn.hidden.map((each) => h("details", { class: "hidden-part" }, h("summary", {}, h("s", {}, earlier(record, each))),
        text(partText(record.turns[each.turn], each.part), where)))) : null);
}

function votes(turn) {
  if (!turn.votes) return null;
  if (!turn.votes.length) return h("p", { class: "muted" }, "no vote that counts");
  return h("ul", { class: "votes" }, turn.votes.map((vote) => h("li", {}, `${vote.above} ${vote.tie ? "=" : ">"} ${vote.below}`)));
}

function critiques(turn, where) {
  if (!turn.critiques) return null;
  if (!turn.critiques.length) return h("p", { class: "muted" }, "no critique that counts");
  return turn.critiques.map((critique) => h("div", { class: "critique", id: `critique-${turn.agent}-${critique.target}-${turn.round}` },
    h("h4", {}, `→ agent ${critique.target}`), text(critique.text, where)));
}

function shown(record, turn, place, where, hasTokens) {
  const dropped = Object.entries(turn.dropped).map(([cause, count]) => `${cause} ${count}`).join(", ");
  return h("div", { class: "turn", id: `turn-${place}` },
    h("h3", {}, turn.segment === "turn" ? "reply" : turn.segment,
      turn.status === "ok" ? null : h("span", { class: "status" }, turn.status),
      hasTokens.has(place) ? h("button", { type: "button", class: "small", onclick: () => hasTokens.get(place)() }, "tokens") : null),
    turn.parts.map((part) => h("div", { class: `part ${part.name === "solution" ? "solution" : "aside"}` },
      part.name === "solution" && turn.parts.length === 1 ? null : h("h4", {}, part.name), text(part.text, where))),
    critiques(turn, where), votes(turn),
    dropped ? h("p", { class: "muted" }, `left out: ${dropped}`) : null,
    sights(record, turn, where),
    h("details", { class: "sampled" }, h("summary", {}, "Reply as sampled"), text(turn.said, where)));
}

function head(agent) {
  const arrow = agent.right_before !== null && agent.right !== null ? " → " : null;
  return h("th", { scope: "col" }, h("span", {}, `Agent ${agent.id} `), agent.reward === null ? null : h("span", { class: "reward" }, `reward ${signed(agent.reward)} `),
    h("span", { class: "marks" }, mark(agent.right_before), arrow, mark(agent.right)));
}

// hasTokens: place of a turn -> function that shows its tokens.
export function grid(record, where, hasTokens) {
  const rounds = [...new Set([...record.turns.map((turn) => turn.round), ...record.failures.map((failure) => failure.round)])].sort((a, b) => a - b);
  const cell = (round, agent) => h("td", {},
    record.turns.map((turn, place) => [turn, place]).filter(([turn]) => turn.round === round && turn.agent === agent.id)
      .sort(([a], [b]) => a.lane - b.lane).map(([turn, place]) => shown(record, turn, place, where, hasTokens)),
    record.failures.filter((failure) => failure.round === round && failure.agent === agent.id)
      .map((failure) => h("div", { class: "failure" }, h("h4", {}, "Failed"), text(failure.reason, where))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rounds by agents" },
    h("table", { class: "rounds" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Round"), record.agents.map(head))),
      h("tbody", {}, rounds.map((round) => h("tr", {}, h("th", { scope: "row" }, round + 1), record.agents.map((agent) => cell(round, agent)))))));
}
