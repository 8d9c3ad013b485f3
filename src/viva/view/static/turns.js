// Rounds by agents: what each saw and what it said.

import { h, mark, signed } from "./dom.js";
import { sidesOf } from "./review.js";
import { headOf, text } from "./text.js";

const PARTS = ["reflection", "evaluation", "decision", "solution"];

const namesOf = (turn) => PARTS.filter((name) => name in turn.response && headOf(turn.response[name]).trim());

function partText(turn, part) {
  if (part.startsWith("critique of agent ")) {
    const target = Number(part.slice("critique of agent ".length));
    const found = (turn.response.critiques || []).find((critique) => critique.target === target);
    return found ? found.text : turn.text;
  }
  return part === "solution" && namesOf(turn).includes("solution") ? turn.response.solution : turn.text;
}

function earlier(record, { turn, part }) {
  const said = record.turns[turn];
  return `${part} by agent ${said.agent_id} (round ${said.round_index + 1}, ${said.segment})`;
}

function sights(record, turn, where) {
  const seen = turn.sightings.filter((each) => each.is_seen);
  const hidden = turn.sightings.filter((each) => !each.is_seen);
  return h("details", { class: "saw" }, h("summary", {}, "What it saw"),
    record.system_prompt ? [h("h4", {}, "System message"), text(record.system_prompt, where, "system"), h("h4", {}, "Prompt")] : null,
    text(turn.prompt, where, "prompt"),
    seen.length ? h("p", { class: "seen" }, h("b", {}, "In it: "), seen.map((each) => earlier(record, each)).join("; ")) : null,
    hidden.length ? h("div", { class: "hidden-parts" }, h("b", {}, `Hidden from it: ${hidden.length}`),
      hidden.map((each) => h("details", { class: "hidden-part" }, h("summary", {}, h("s", {}, earlier(record, each))),
        text(partText(record.turns[each.turn], each.part), where)))) : null);
}

function votes(turn) {
  const cast = turn.response.preferences;
  if (!cast) return null;
  if (!cast.length) return h("p", { class: "muted" }, "no vote that counts");
  return h("ul", { class: "votes" }, cast.map(sidesOf).map((vote) => h("li", {},
    `${vote.above} ${vote.tie ? "=" : ">"} ${vote.below}${vote.share ? ` (${(100 * vote.share).toFixed(1)} %)` : ""}`)));
}

function critiques(turn, where) {
  const given = turn.response.critiques;
  if (!given) return null;
  if (!given.length) return h("p", { class: "muted" }, "no critique that counts");
  return given.map((critique) => h("div", { class: "critique", id: `critique-${turn.agent_id}-${critique.target}-${turn.round_index}` },
    h("h4", {}, `→ agent ${critique.target}`), text(critique.text, where)));
}

function called(turn, where) {
  const { tool, arguments: given, output, failure } = turn.response;
  if (output === undefined) return null;
  return h("div", { class: "part aside call" }, h("h4", {}, `calls ${headOf(tool) || "a tool"}`), text(given, where),
    h("h4", {}, failure ? `failed, ${failure}` : "returned"), text(output, where));
}

function shown(record, turn, place, where, hasTokens) {
  const dropped = Object.entries(turn.response.dropped || {}).map(([cause, count]) => `${cause} ${count}`).join(", ");
  const names = namesOf(turn);
  return h("div", { class: "turn", id: `turn-${place}` },
    h("h3", {}, turn.segment === "turn" ? "reply" : turn.segment,
      turn.status === "ok" ? null : h("span", { class: "status" }, turn.status),
      hasTokens.has(place) ? h("button", { type: "button", class: "small", onclick: () => hasTokens.get(place)() }, "tokens") : null),
    names.map((name) => h("div", { class: `part ${name === "solution" ? "solution" : "aside"}` },
      name === "solution" && names.length === 1 ? null : h("h4", {}, name), text(turn.response[name], where))),
    called(turn, where), critiques(turn, where), votes(turn),
    dropped ? h("p", { class: "muted" }, `left out: ${dropped}`) : null,
    sights(record, turn, where),
    h("details", { class: "sampled" }, h("summary", {}, "Reply as sampled"), text(turn.text, where)));
}

function head(agent) {
  const arrow = agent.right_before !== null && agent.right !== null ? " → " : null;
  return h("th", { scope: "col" }, h("span", {}, `Agent ${agent.id} `), agent.reward === null ? null : h("span", { class: "reward" }, `reward ${signed(agent.reward)} `),
    h("span", { class: "marks" }, mark(agent.right_before), arrow, mark(agent.right)));
}

// hasTokens: place of a turn -> function that shows its tokens.
export function grid(record, where, hasTokens) {
  const rounds = [...new Set([...record.turns.map((turn) => turn.round_index), ...record.failures.map((failure) => failure.round_index)])].sort((a, b) => a - b);
  const cell = (round, agent) => h("td", {},
    record.turns.map((turn, place) => [turn, place]).filter(([turn]) => turn.round_index === round && turn.agent_id === agent.id)
      .sort(([a], [b]) => a.lane - b.lane).map(([turn, place]) => shown(record, turn, place, where, hasTokens)),
    record.failures.filter((failure) => failure.round_index === round && failure.agent_id === agent.id)
      .map((failure) => h("div", { class: "failure" }, h("h4", {}, "Failed"), text(failure.reason, where))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rounds by agents" },
    h("table", { class: "rounds" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Round"), record.agents.map(head))),
      h("tbody", {}, rounds.map((round) => h("tr", {}, h("th", { scope: "row" }, round + 1), record.agents.map((agent) => cell(round, agent)))))));
}
