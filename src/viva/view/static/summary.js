// What a reader wants to know of a run first: held-out answers before and after, whether the run was healthy, and what kept it from learning.

import { ask } from "./api.js";
import { chart } from "./chart.js";
import { cards, h, replace, table } from "./dom.js";
import { otherRewards } from "./rewards.js";

const ACCURACY = "test/direct_accuracy";
const GREEDY = "test/direct_accuracy_greedy";
const WON = "test/judged/win_rate";

function accuracy(run) {
  if (!run.has_accuracy) return run.judged.length ? null : h("p", { class: "muted" }, "Held-out accuracy was not measured: the run had no test set with answers.");
  const asked = run.questions === null ? "" : ` (${run.questions} questions)`;
  return [h("p", { class: "muted" }, `Held-out direct accuracy: share of test questions answered right on the bare question, without any conversation${asked}.`),
    cards(run.accuracy)];
}

function judged(run) {
  if (!run.judged.length) return null;
  return [h("p", { class: "muted" }, "Answers to test prompts against those before training: share of a judge's verdicts that they win, ties half; 50 % is no difference."),
    cards(run.judged)];
}

function one(run, { name, kind }, rewards) {
  return h("section", { class: "run-summary", "data-run": name }, h("h2", {}, name),
    run.causes.length ? [h("h3", {}, "What keeps it from learning"), h("ul", {}, run.causes.map((cause) => h("li", {}, `Step ${cause.step}: ${cause.text}`)))] : null,
    kind === "run" ? accuracy(run) : null, judged(run), cards(run.health),
    run.void.length ? table("void", ["void", "reason"], run.void.map((each) => [each.count, h("pre", {}, each.reason)]), "Why conversations were void") : null,
    run.torn.map((file) => h("p", { class: "muted" }, `The last line of ${file} is torn (the run was stopped while it wrote) and left out.`)), rewards);
}

export class Summary {
  constructor(root) {
    this.root = root;
    this.rewards = []; // by run: drawn once, so that an open table stays open
  }

  async build() {
    const [{ viva, runs }, summaries, series] = await Promise.all([ask("runs"), ask("summary"), ask("series", { key: [ACCURACY, GREEDY, WON] })]);
    const lines = series.flatMap((found, run) => [[ACCURACY, runs[run].name], [GREEDY, `${runs[run].name}, at temperature 0`], [WON, `${runs[run].name}, judged better than before`]].map(([key, name], colour) =>
      found[key] && { ...found[key], run, colour, name })).filter(Boolean);
    replace(this.root, summaries.map((run, index) => one(run, runs[index], this.rewards[index] ??= otherRewards(index, runs[index]))),
      lines.length ? h("figure", { class: "alone", "data-chart": "held-out direct accuracy" }, chart(summaries.some((run) => run.judged.length) ? "held-out answers" : "held-out direct accuracy", lines, { size: [860, 240] })) : null,
      h("p", { class: "muted" }, `Viva ${viva}`));
  }

  refresh = this.build;
}
