// What the runs were started with, side by side where there are two; differences are marked.

import { h, table } from "./dom.js";
import { ask } from "./api.js";

export async function optionsView(root, { runs }) {
  const known = runs.length ? runs : (await ask("runs")).runs;
  const names = [...new Set(known.flatMap((run) => Object.keys(run.config)))].sort();
  root.dataset.title = "Options";
  root.append(h("h2", {}, "Options"));
  if (!names.length) return void root.append(h("p", { class: "muted" }, "This run recorded none."));
  root.append(table("options", ["option", ...known.map((run) => run.name)], names.map((name) => {
    const values = known.map((run) => run.config[name]);
    const differs = values.some((value) => value !== values[0]);
    return [name, ...values.map((value) => h("td", { class: differs ? "differs" : null }, h("pre", {}, value === undefined ? "–" : value)))];
  })));
  return {};
}
