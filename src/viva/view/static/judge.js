// The judge over many conversations: flips, cycles and agreement with known answers, by step, and where to look.

import { ask, isReport, remember } from "./api.js";
import { chart } from "./chart.js";
import { h, replace, share, table } from "./dom.js";
import { answersText, filterBar, filtersOf, questionOf, renewStrategies } from "./list.js";

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

class Judge {
  constructor(root, { parameters, runs }) {
    Object.assign(this, { root, runs, page: Number(parameters.page) || 0, loading: 0 });
    this.filters = filtersOf(parameters);
  }

  parameters() {
    return { ...this.filters, page: this.page || "" };
  }

  async build() {
    if (!this.runs.length) this.runs = (await ask("runs")).runs;
    this.root.dataset.title = "judge";
    const [listed, answer] = await this.ask();
    this.body = h("div", {});
    this.bar = filterBar(this.filters, listed.facets, this.runs, (name, value) => this.changed(name, value));
    replace(this.root, h("h2", { class: "quiet" }, "Judge"), this.bar, this.body);
    this.fill(answer);
  }

  ask() {
    return Promise.all([ask("conversations", { run: this.filters.run, size: 1 }), ask("judge", this.parameters())]);
  }

  async changed(name, value) {
    if (value) this.filters[name] = value; else delete this.filters[name];
    this.page = 0;
    await this.load();
  }

  async load() {
    remember(["judge"], this.parameters());
    const loading = ++this.loading;
    try {
      const answer = await ask("judge", this.parameters());
      if (loading === this.loading) this.fill(answer);
    } catch (error) {
      replace(this.body, h("p", { class: "failure", role: "alert" }, error.message));
    }
  }

  turn(by) {
    if (this.page + by < 0 || this.page + by >= this.pages) return;
    this.page += by;
    this.load();
  }

  fill(answer) {
    const { totals, steps } = answer;
    const card = (title, id, value) => h("div", { class: "card" }, h("p", { class: "name" }, title), h("p", { class: "value", id }, value));
    const figure = (title, line) => h("figure", { "data-chart": title }, h("figcaption", {}, title), chart(title, [line]));
    const pages = this.pages = Math.max(1, Math.ceil(answer.total / answer.size));
    const by = (step, label) => h("button", { type: "button", disabled: answer.page + step < 0 || answer.page + step >= pages, onclick: () => this.turn(step) }, label);
    replace(this.body, h("div", { class: "cards" }, card("conversations", "judge-conversations", totals.conversations),
      card("verdicts that flip with the order", "judge-flips", share(totals.flips, totals.pairs)), card("cycles", "judge-cycles", totals.cycles),
      card("preferences that agree with known answers", "judge-agreement", share(totals.agreeing, totals.decidable))),
    totals.orders.some(Boolean) ? orders(totals.orders) : null,
    h("div", { class: "charts" }, figure("share of flips", rate(steps, "flips", "pairs", "flips")),
      figure("agreement with known answers", rate(steps, "agreeing", "decidable", "agreement"))),
    h("h3", {}, "Conversations with flips or cycles"),
    h("p", { class: "pages" }, isReport ? `${answer.total}${pages > 1 ? `; the first ${answer.size} of them` : ""}`
      : [`${answer.total} · page ${answer.page + 1} of ${pages} `, by(-1, "Previous page"), by(1, "Next page")]),
    answer.rows.length ? table("list", ["step", "group", "question", "right", "flips", "cycles", "agreeing"], answer.rows.map((row) => [
      row.step, row.group, questionOf(row, this.filters), answersText(row), `${row.num_flips}/${row.num_pairs}`, row.num_cycles, `${row.num_agreeing}/${row.num_decidable}`]), "Conversations with flips or cycles")
      : h("p", { class: "muted" }, "None."));
  }

  async refresh(runs) {
    this.runs = runs;
    const loading = this.loading;
    const [listed, answer] = await this.ask();
    if (loading !== this.loading) return; // a later question is under way
    renewStrategies(this.bar, listed.facets, this.filters.strategy);
    if (!this.body.contains(document.activeElement)) this.fill(answer);
  }

  key(event) {
    if (isReport) return false;
    if (event.key === "[" || event.key === "]") return this.turn(event.key === "[" ? -1 : 1), true;
    if (event.key === "/") return this.bar.elements.text.focus(), true;
    return false;
  }
}

export async function judgeView(root, context) {
  const view = new Judge(root, context);
  await view.build();
  return view;
}
