// What the runs were started with, side by side where there are two; differences are marked.

import { h, table } from "./dom.js";

export class Options {
  constructor(root, { runs }) {
    Object.assign(this, { root, runs });
    root.dataset.title = "Options";
  }

  build() {
    const names = [...new Set(this.runs.flatMap((run) => Object.keys(run.config)))].sort();
    this.root.append(h("h2", {}, "Options"));
    if (!names.length) return void this.root.append(h("p", { class: "muted" }, "This run recorded none."));
    this.root.append(table("options", ["option", ...this.runs.map((run) => run.name)], names.map((name) => {
      const values = this.runs.map((run) => run.config[name]);
      const differs = values.some((value) => value !== values[0]);
      return [name, ...values.map((value) => h("td", { class: differs ? "differs" : null }, h("pre", {}, value === undefined ? "–" : value)))];
    })));
  }
}
