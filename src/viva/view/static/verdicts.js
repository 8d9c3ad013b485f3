// What the judge said of one conversation: a matrix in both orders, flips marked, cycles, agreement with known answers.

import { h, share, signed, table } from "./dom.js";
import { cyclesText } from "./review.js";
import { text } from "./text.js";

const STAGES = ["initial", "revised"];
const agentName = (id) => `agent ${id}`;
const stageName = (id) => STAGES[id] || `solution ${id}`;

function winner(item) {
  return { A: item.first, B: item.second }[item.outcome] ?? null;
}

function cell(record, agent, first, second, name) {
  const said = record.comparisons.filter((item) => item.agent === agent && item.first === first && item.second === second);
  if (!said.length) return h("td", { class: "none" });
  const pair = record.pairs.find((each) => each.agent === agent && each.items.includes(first) && each.items.includes(second));
  return h("td", { class: pair && pair.flipped ? "flipped" : null }, said.map((item) => {
    const won = winner(item);
    const labels = ["A", "B", "tie"];
    return h("p", {}, won === null ? item.outcome : name(won), item.score === null ? null : ` ${signed(item.score)}`,
      pair && pair.flipped ? h("span", { class: "flip" }, " flips") : null,
      item.probabilities ? h("span", { class: "muted" }, ` ${item.probabilities.map((value, index) => `${labels[index]} ${value.toFixed(2)}`).join(", ")}`) : null);
  }));
}

function between(record) {
  const ids = [...new Set(record.comparisons.filter((item) => item.agent === null).flatMap((item) => [item.first, item.second]))].sort((a, b) => a - b);
  if (!ids.length) return null;
  return table("verdicts", ["", ...ids.map((id) => `second: agent ${id}`)],
    ids.map((first) => [`first: agent ${first}`, ...ids.map((second) => cell(record, null, first, second, agentName))]), "Verdicts, in both orders");
}

function ofRevisions(record) {
  const ids = [...new Set(record.comparisons.filter((item) => item.agent !== null).map((item) => item.agent))].sort((a, b) => a - b);
  if (!ids.length) return null;
  return table("verdicts", ["", "initial shown first", "revised shown first"],
    ids.map((id) => [`agent ${id}`, cell(record, id, 0, 1, stageName), cell(record, id, 1, 0, stageName)]), "Revised against initial, in both orders");
}

function asked(record, where) {
  const prompts = record.comparisons.filter((item) => item.prompt.head.trim());
  if (!record.judge || !prompts.length) return null;
  return h("details", { class: "asked" }, h("summary", {}, "What the judge saw"), h("h4", {}, "System message"), text(record.judge.system, where, "prompt"),
    prompts.map((item) => [
      h("p", {}, item.agent === null ? `agent ${item.first} first, agent ${item.second} second` : `agent ${item.agent}: ${stageName(item.first)} first`),
      text(item.prompt, where, "prompt")]),
    record.judge.prefill ? [h("p", {}, "Its reply begins with"), h("pre", { class: "prompt" }, record.judge.prefill)] : null);
}

export function verdicts(record, where) {
  if (!record.comparisons.length) return null;
  const flips = record.pairs.filter((pair) => pair.flipped).length;
  const both = record.pairs.filter((pair) => pair.both_orders).length;
  const written = record.comparisons.filter((item) => item.text.head.trim());
  return h("section", { class: "judge-panel" }, h("h2", {}, "Verdicts"),
    h("p", { class: "muted" }, "Who won, and the score from −1 (first wins) to +1 (second wins). A verdict flips if the winner changes with the order."),
    between(record), ofRevisions(record),
    h("p", {}, "Flips: ", h("b", { class: "flips" }, share(flips, both)), " · Cycles: ",
      h("b", { class: "cycles" }, cyclesText(record.cycles, agentName)), " · Agrees with the known answers: ",
      h("b", { class: "agreement" }, share(record.agreement.right, record.agreement.of))),
    written.length ? h("details", {}, h("summary", {}, "What the judge wrote"), written.map((item) => [
      h("p", {}, item.agent === null ? `agent ${item.first} first, agent ${item.second} second` : `agent ${item.agent}: ${stageName(item.first)} first`),
      text(item.text, where)])) : null, asked(record, where));
}
