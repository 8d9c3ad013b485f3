// What a review was worth: V before and after with error bars, reward streams, who criticised whom, who ranks whom where.

import { h, mark, number, share, signed, svg, table } from "./dom.js";

const WIDTH = 460;
const LEFT = 80;
const ROW = 34;

// What the record has of each agent.
export function agentsOf(record) {
  const values = { reward: record.rewards, right_before: record.correct_initial, right: record.correct, before: record.scores.initial,
    before_error: record.scores.initial_error, after: record.scores.final, after_error: record.scores.final_error };
  return record.agent_ids.map((id) => ({ id, streams: record.streams[id] || {},
    ...Object.fromEntries(Object.entries(values).map(([name, found]) => [name, (found || {})[id] ?? null])) }));
}

const scoreX = (score) => LEFT + Math.min(1, Math.max(0, score)) * (WIDTH - LEFT - 20);

function bar(value, error, y, name) {
  return [
    error === null ? null : svg("line", { class: `whisker ${name}`, x1: scoreX(value - error), x2: scoreX(value + error), y1: y, y2: y }),
    svg("circle", { class: `score ${name}`, cx: scoreX(value), cy: y, r: 4.5 }),
  ];
}

export function scores(record) {
  const scored = record.agents.filter((agent) => agent.after !== null);
  if (!scored.length) return null;
  const height = 26 + ROW * scored.length;
  const label = scored.map((agent) => `agent ${agent.id}: ${number(agent.before)} before, ${number(agent.after)} after`).join("; ");
  return h("figure", { class: "scores" }, h("figcaption", {}, "V before and after review, with one standard error"),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label },
      [0, 0.25, 0.5, 0.75, 1].map((score) => [svg("line", { class: "grid", x1: scoreX(score), x2: scoreX(score), y1: 4, y2: height - 20 }),
        svg("text", { class: "tick", x: scoreX(score), y: height - 6, "text-anchor": "middle" }, score)]),
      scored.map((agent, index) => {
        const y = 16 + ROW * index;
        return [svg("text", { class: "tick", x: LEFT - 10, y: y + 8, "text-anchor": "end" }, `agent ${agent.id}`),
          agent.before === null ? null : bar(agent.before, agent.before_error, y, "before"),
          bar(agent.after, agent.after_error, y + 10, "after")];
      })),
    h("p", { class: "muted" }, h("i", { class: "dot before" }), " before ", h("i", { class: "dot after" }), " after"));
}

export function streams(record) {
  const names = [...new Set(record.agents.flatMap((agent) => Object.keys(agent.streams)))];
  const isScored = record.agents.some((agent) => agent.after !== null);
  if (!names.length && !isScored && record.agents.every((agent) => agent.reward === null)) return null;
  const withError = (value, error) => (value === null ? "–" : `${value.toFixed(3)}${error === null ? "" : ` ± ${error.toFixed(3)}`}`);
  return table("streams", ["agent", ...(isScored ? ["V before", "V after", "change"] : []), "right", ...names, "reward"],
    record.agents.map((agent) => [`agent ${agent.id}`,
      ...(isScored ? [withError(agent.before, agent.before_error), withError(agent.after, agent.after_error),
        agent.before !== null && agent.after !== null ? signed(agent.after - agent.before, 3) : "–"] : []),
      h("span", {}, mark(agent.right_before), agent.right_before === null ? null : " → ", mark(agent.right)),
      ...names.map((name) => agent.streams[name]?.toFixed(3) ?? "–"),
      agent.reward === null ? "–" : signed(agent.reward, 3)]), "Rewards");
}

// Agents side by side, an arc for every critique from its author to its target.
export function arrows(record) {
  const said = record.turns.flatMap((turn) => (turn.response.critiques || []).map((critique) => ({ from: turn.agent_id, to: critique.target, round: turn.round_index })));
  if (!said.length) return null;
  const ids = record.agents.map((agent) => agent.id);
  const x = (id) => 50 + ids.indexOf(id) * 90;
  const base = 40 + 22 * ids.length;
  const known = said.filter(({ from, to }) => ids.includes(from) && ids.includes(to));
  const arc = ({ from, to, round }) => {
    const shift = from < to ? -6 : 6;
    const top = base - 26 - Math.abs(x(to) - x(from)) * 0.28 - (from < to ? 0 : 14);
    return svg("g", { class: "arc", tabindex: "0", role: "link", "aria-label": `critique of agent ${to} by agent ${from}`,
      onclick: () => reveal(`critique-${from}-${to}-${round}`), onkeydown: (event) => { if (event.key === "Enter") reveal(`critique-${from}-${to}-${round}`); } },
    svg("path", { class: `c${ids.indexOf(from) % 6}`, d: `M${x(from) - shift} ${base - 14}C${x(from)} ${top} ${x(to)} ${top} ${x(to) + shift} ${base - 16}`, "marker-end": "url(#arrow)" }),
    svg("title", {}, `agent ${from} → agent ${to}`));
  };
  return h("figure", { class: "arrows" }, h("figcaption", {}, "Critiques, from author to target"),
    svg("svg", { viewBox: `0 0 ${100 + 90 * (ids.length - 1)} ${base + 20}`, role: "group", "aria-label": "critiques" },
      svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
        svg("path", { class: "head", d: "M0 0L8 4L0 8Z" }))),
      known.map(arc),
      ids.map((id) => [svg("circle", { class: "agent", cx: x(id), cy: base, r: 13 }), svg("text", { class: "name", x: x(id), y: base + 4, "text-anchor": "middle" }, id)])));
}

export function reveal(id) {
  const node = document.getElementById(id);
  if (!node) return;
  node.scrollIntoView({ block: "center", inline: "center" });
  node.classList.add("flash");
  setTimeout(() => node.classList.remove("flash"), 1500);
}

const itemName = (item) => (Array.isArray(item) ? item.join(" ") : `agent ${item}`);

// What a vote puts above what, or beside it.
export function sidesOf({ winner, loser, first, second, share }) {
  return { above: itemName(winner ?? first), below: itemName(loser ?? second), tie: winner === undefined, share };
}

function matrix(segment, votes) {
  const items = [...new Set(votes.flatMap((vote) => [vote.above, vote.below]))].sort();
  const cell = (above, below) => {
    if (above === below) return h("td", { class: "none" });
    const wins = votes.filter((vote) => !vote.tie && vote.above === above && vote.below === below).map((vote) => vote.voter);
    const ties = votes.filter((vote) => vote.tie && [vote.above, vote.below].includes(above) && [vote.above, vote.below].includes(below)).map((vote) => `=${vote.voter}`);
    return h("td", { class: `n${Math.min(4, wins.length)}` }, [...wins, ...ties].join(" "));
  };
  return table("matrix", ["", ...items], items.map((above) => [above, ...items.map((below) => cell(above, below))]), segment);
}

export function cyclesText(cycles) {
  return cycles.length ? cycles.map((cycle) => [...cycle, cycle[0]].map(itemName).join(" > ")).join("; ") : "none";
}

export function rankings(record) {
  const ranked = record.verdicts.slice(1); // those behind the judge's own
  if (!ranked.length) return null;
  const votes = (segment) => record.turns.filter((turn) => turn.segment === segment)
    .flatMap((turn) => (turn.response.preferences || []).map((vote) => ({ voter: turn.agent_id, ...sidesOf(vote) })));
  return h("section", { class: "rankings" }, h("h2", {}, "Who ranks whom where"),
    h("p", { class: "muted" }, "In each cell, the agents that rank the row above the column; = those that call it a tie."),
    h("div", { class: "matrices" }, ranked.map(({ segment, cycles, agreement }) => h("div", { "data-segment": segment }, matrix(segment, votes(segment)),
      h("p", {}, "Cycles: ", h("b", { class: "cycles" }, cyclesText(cycles))),
      h("p", {}, "Agrees with the known answers: ", h("b", { class: "agreement" }, share(...agreement)))))));
}
