// What the judge said of one conversation: a matrix in both orders, flips marked, cycles, agreement with known answers.

import { h, share, signed, table } from "./dom.js";
import { cyclesText } from "./review.js";
import { headOf, text } from "./text.js";

const STAGES = ["initial", "revised"];
const agentName = (id) => `agent ${id}`;
const stageName = (id) => STAGES[id] || `solution ${id}`;

function winner(item) {
  return { A: item.first, B: item.second }[item.outcome] ?? null;
}

const titleOf = (item) => h("p", {}, item.agent_id === null ? `agent ${item.first} first, agent ${item.second} second`
  : `agent ${item.agent_id}: ${stageName(item.first)} first`);

function cell(record, agent, first, second, name) {
  const said = record.comparisons.filter((item) => item.agent_id === agent && item.first === first && item.second === second);
  if (!said.length) return h("td", { class: "none" });
  const pair = record.pairs.find((each) => each.agent_id === agent && each.items.includes(first) && each.items.includes(second));
  return h("td", { class: pair && pair.is_flipped ? "flipped" : null }, said.map((item) => {
    const won = winner(item);
    const labels = ["A", "B", "tie"];
    return h("p", {}, won === null ? item.outcome : name(won), item.score === null ? null : ` ${signed(item.score)}`,
      pair && pair.is_flipped ? h("span", { class: "flip" }, " flips") : null,
      item.probabilities ? h("span", { class: "muted" }, ` ${item.probabilities.map((value, index) => `${labels[index]} ${value.toFixed(2)}`).join(", ")}`) : null);
  }));
}

function between(record) {
  const ids = [...new Set(record.comparisons.filter((item) => item.agent_id === null).flatMap((item) => [item.first, item.second]))].sort((a, b) => a - b);
  if (!ids.length) return null;
  return table("verdicts", ["", ...ids.map((id) => `second: agent ${id}`)],
    ids.map((first) => [`first: agent ${first}`, ...ids.map((second) => cell(record, null, first, second, agentName))]), "Verdicts, in both orders");
}

function ofRevisions(record) {
  const ids = [...new Set(record.comparisons.filter((item) => item.agent_id !== null).map((item) => item.agent_id))].sort((a, b) => a - b);
  if (!ids.length) return null;
  return table("verdicts", ["", "initial shown first", "revised shown first"],
    ids.map((id) => [`agent ${id}`, cell(record, id, 0, 1, stageName), cell(record, id, 1, 0, stageName)]), "Revised against initial, in both orders");
}

function asked(record, where) {
  const prompts = record.comparisons.filter((item) => headOf(item.prompt).trim());
  if (!record.judge || !prompts.length) return null;
  return h("details", { class: "asked" }, h("summary", {}, "What the judge saw"), h("h4", {}, "System message"), text(record.judge.system_prompt, where, "prompt"),
    prompts.map((item) => [titleOf(item), text(item.prompt, where, "prompt")]),
    record.judge.prefill ? [h("p", {}, "Its reply begins with"), h("pre", { class: "prompt" }, record.judge.prefill)] : null);
}

function scored(record, where) {
  if (!record.rubric || !record.criteria.length) return null;
  const weight = (item) => h("span", { class: "muted" }, ` weight ${item.weight}`);
  return h("section", { class: "judge-panel" }, h("h2", {}, "Rubric"),
    h("p", { class: "muted" }, "How far each solution fulfils a criterion by the judge, from 0 to 1."),
    table("rubric", ["", ...Object.keys(record.rubric).map((id) => agentName(id))],
      record.criteria.map((item, place) => [[item.text, record.criteria.length > 1 ? weight(item) : null],
        ...Object.values(record.rubric).map((scores) => (scores[place] === null ? "unreadable" : scores[place].toFixed(2)))]), "Scores by criterion"),
    record.judge ? h("details", { class: "asked" }, h("summary", {}, "What the judge was told"), text(record.judge.system_prompt, where, "prompt")) : null);
}

export function verdicts(record, where) {
  if (!record.comparisons.length) return scored(record, where);
  const [{ cycles, agreement }] = record.verdicts;
  const flips = record.pairs.filter((pair) => pair.is_flipped).length;
  const both = record.pairs.filter((pair) => pair.in_both_orders).length;
  const written = record.comparisons.filter((item) => item.failure || headOf(item.text).trim());
  return h("section", { class: "judge-panel" }, h("h2", {}, "Verdicts"),
    h("p", { class: "muted" }, "Who won, and the score from −1 (first wins) to +1 (second wins). A verdict flips if the winner changes with the order."),
    between(record), ofRevisions(record),
    h("p", {}, "Flips: ", h("b", { class: "flips" }, share(flips, both)), " · Cycles: ",
      h("b", { class: "cycles" }, cyclesText(cycles)), " · Agrees with the known answers: ",
      h("b", { class: "agreement" }, share(...agreement))),
    written.length ? h("details", {}, h("summary", {}, "What the judge wrote"), written.map((item) => [titleOf(item), item.failure ? h("p", { class: "muted" }, "No reply: ", headOf(item.failure)) : text(item.text, where)])) : null, asked(record, where));
}
