// The judge over many conversations: flips, cycles and agreement with known answers, by step, and where to look.

import { isReport } from "./api.js";
import { chart } from "./chart.js";
import { cards, h, replace, share, table } from "./dom.js";
import { answersText, Filtered, questionOf } from "./list.js";

function rate(steps, part, whole, name) {
  const counted = steps.filter((step) => step[whole]);
  return { name, run: 0, colour: 0, steps: counted.map((step) => step.step), values: counted.map((step) => step[part] / step[whole]), band: null };
}

const LABELS = ["what is shown first wins", "what is shown second wins", "neither"];

// Every pair judged in both orders: what was said in one order, and in the other. Whoever wins by merit changes places.
function orders(counts) {
  const cell = (row, column) => h("td", { class: row === column && row < 2 ? "flipped" : null }, counts[3 * row + column],
    row === column && row < 2 ? h("span", { class: "flip" }, " flips") : null);
  return table("orders", ["one order ↓ · the other →", ...LABELS], LABELS.map((label, row) => [label, cell(row, 0), cell(row, 1), cell(row, 2)]),
    "Pairs by their verdicts in both orders");
}

export class Judge extends Filtered {
  name = "judge";
  title = "Judge";

  fill(answer) {
    const { totals, steps } = answer;
    const figure = (title, line) => h("figure", { "data-chart": title }, h("figcaption", {}, title), chart(title, [line]));
    const pager = this.pager(answer);
    replace(this.body, cards([{ title: "conversations", id: "judge-conversations", value: totals.conversations },
      { title: "verdicts that flip with the order", id: "judge-flips", value: share(totals.flips, totals.pairs) },
      { title: "cycles", id: "judge-cycles", value: totals.cycles },
      { title: "preferences that agree with known answers", id: "judge-agreement", value: share(totals.agreeing, totals.decidable) }]),
    totals.orders.some(Boolean) ? orders(totals.orders) : null,
    h("div", { class: "charts" }, figure("share of flips", rate(steps, "flips", "pairs", "flips")),
      figure("agreement with known answers", rate(steps, "agreeing", "decidable", "agreement"))),
    h("h3", {}, "Conversations with flips or cycles"),
    h("p", { class: "pages" }, answer.total, isReport ? this.pages > 1 && `; the first ${answer.size} of them` : pager),
    answer.rows.length ? table("list", ["step", "group", "question", "right", "flips", "cycles", "agreeing"], answer.rows.map((row) => [
      row.step, row.group, questionOf(row, this.filters), answersText(row), `${row.judged.flips}/${row.judged.pairs}`, row.judged.cycles, `${row.judged.agreeing}/${row.judged.decidable}`]), "Conversations with flips or cycles")
      : h("p", { class: "muted" }, "None."));
  }

  renew(answer) {
    if (!this.body.contains(document.activeElement)) this.fill(answer);
  }
}
