// What `viva eval` measured: figures with their intervals, and comparisons of two checkpoints or runs.

import { ask } from "./api.js";
import { h, number, replace, table } from "./dom.js";

const HEADS = { value: "value", against: "against", difference: "difference", low: "95 % from", high: "to", num_problems: "problems" };

function result(each) {
  const figures = Object.entries(each.figures);
  const columns = Object.keys(HEADS).filter((name) => figures.some(([, figure]) => name in figure));
  return h("section", { class: "evaluation", "data-name": each.name }, h("h3", {}, each.about || each.name),
    h("p", { class: "muted" }, `${each.kind} · ${each.name}.json`),
    table("figures", ["figure", ...columns.map((name) => HEADS[name])],
      figures.map(([name, figure]) => [name, ...columns.map((column) => number(figure[column]))]), each.name));
}

export class Evaluations {
  constructor(root) {
    this.root = root;
  }

  async build() {
    const runs = await ask("evaluations");
    replace(this.root, h("h2", {}, "Evaluations"), runs.some((run) => run.results.length)
      ? runs.map((run) => [runs.length > 1 ? h("h2", {}, run.name) : null, run.results.map(result)])
      : h("p", { class: "muted" }, "None in the run's folder yet; viva eval RUN writes them."));
  }

  refresh = this.build;
}
