// The judge over many conversations: flips, cycles and agreement with known answers, by step, and where to look.

import { ask, isReport } from "./api.js";
import { chart } from "./chart.js";
import { h, replace, share, table } from "./dom.js";
import { answersText, Filtered, questionOf, renewStrategies } from "./list.js";

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

  async build() {
    const [listed, answer] = await this.ask();
    this.frame("Judge", h("div", {}), listed.facets);
    this.fill(answer);
  }

  ask() {
    return Promise.all([ask("conversations", { run: this.filters.run, size: 1 }), ask("judge", this.parameters())]);
  }

  fill(answer) {
    const { totals, steps } = answer;
    const card = (title, id, value) => h("div", { class: "card" }, h("p", { class: "name" }, title), h("p", { class: "value", id }, value));
    const figure = (title, line) => h("figure", { "data-chart": title }, h("figcaption", {}, title), chart(title, [line]));
    const pager = this.pager(answer);
    replace(this.body, h("div", { class: "cards" }, card("conversations", "judge-conversations", totals.conversations),
      card("verdicts that flip with the order", "judge-flips", share(totals.flips, totals.pairs)), card("cycles", "judge-cycles", totals.cycles),
      card("preferences that agree with known answers", "judge-agreement", share(totals.agreeing, totals.decidable))),
    totals.orders.some(Boolean) ? orders(totals.orders) : null,
    h("div", { class: "charts" }, figure("share of flips", rate(steps, "flips", "pairs", "flips")),
      figure("agreement with known answers", rate(steps, "agreeing", "decidable", "agreement"))),
    h("h3", {}, "Conversations with flips or cycles"),
    h("p", { class: "pages" }, answer.total, isReport ? this.pages > 1 && `; the first ${answer.size} of them` : pager),
    answer.rows.length ? table("list", ["step", "group", "question", "right", "flips", "cycles", "agreeing"], answer.rows.map((row) => [
      row.step, row.group, questionOf(row, this.filters), answersText(row), `${row.judged.flips}/${row.judged.pairs}`, row.judged.cycles, `${row.judged.agreeing}/${row.judged.decidable}`]), "Conversations with flips or cycles")
      : h("p", { class: "muted" }, "None."));
  }

  async refresh(runs) {
    this.runs = runs;
    const loading = this.loading;
    const [listed, answer] = await this.ask();
    if (loading !== this.loading) return;
    renewStrategies(this.bar, listed.facets, this.filters.strategy);
    if (!this.body.contains(document.activeElement)) this.fill(answer);
  }
}
