// One conversation, whole.

import { ask, go, link } from "./api.js";
import { add, h } from "./dom.js";
import { filtersOf } from "./list.js";
import { agentsOf, arrows, rankings, scores, streams } from "./review.js";
import { text } from "./text.js";
import { Tokens } from "./tokens.js";
import { grid } from "./turns.js";
import { verdicts } from "./verdicts.js";

export class Conversation {
  constructor(root, { parts, parameters }) {
    this.root = root;
    this.filters = filtersOf(parameters);
    this.where = { run: this.filters.run || "0", step: parts[0], group: parts[1] };
  }

  async build() {
    const answer = await ask("conversation", { ...this.filters, ...this.where });
    this.answer = answer;
    if (answer.record) answer.record.agents = agentsOf(answer.record);
    this.root.dataset.title = `step ${answer.step}, conversation ${answer.group}`;
    this.tokens = answer.tokens ? new Tokens(answer.tokens) : null;
    add(this.root, [this.top(answer), answer.record ? this.body(answer.record) : h("p", { class: "muted" }, "No record of what was said was kept."),
      this.tokens ? this.tokens.node : h("p", { class: "muted no-tokens" }, "The tokens of this conversation were not kept; the run keeps those of a sample (option tokens_every).")]);
  }

  at(place) {
    return link(["conversation", ...place], this.filters);
  }

  top(answer) {
    return [h("p", { class: "crumbs" }, h("a", { href: link(["conversations"], this.filters) }, "↑ list"),
      answer.previous ? h("a", { href: this.at(answer.previous) }, "← previous") : h("span", { class: "muted" }, "← previous"),
      answer.next ? h("a", { href: this.at(answer.next) }, "next →") : h("span", { class: "muted" }, "next →")),
    h("h2", {}, `Step ${answer.step}, conversation ${answer.group}`), answer.reason ? h("p", { class: "muted" }, `Shown: ${answer.reason}.`) : null,
    h("p", { class: "muted" }, [...answer.tags, answer.tokens ? answer.tokens.strategy : ""].filter(Boolean).join(" · ")),
    answer.void ? h("p", { class: "failure" }, `Void, it trained nothing${answer.void_reason ? `: ${answer.void_reason}` : ""}`) : null];
  }

  body(record) {
    const rules = Object.entries(record.rules).map(([name, value]) => `${name}=${value}`).join(", ");
    const hasTokens = this.tokens ? this.tokens.shows() : new Map();
    return [h("div", { class: "question" }, h("h4", {}, "Question"), text(record.question, this.where),
      record.answer ? [h("h4", {}, "Right answer"), text(record.answer, this.where)] : null,
      record.judge_answer ? [h("h4", {}, "The judge's own answer"), text(record.judge_answer, this.where)] : null),
    record.control ? h("p", { class: "muted control" }, `Control: ${record.control.name}`, record.control.question ? [", critiques of ", text(record.control.question, this.where)] : null) : null,
    grid(record, this.where, hasTokens),
    h("div", { class: "worth" }, scores(record), arrows(record)), streams(record), rules ? h("p", { class: "muted" }, `Rules: ${rules}`) : null,
    rankings(record), verdicts(record, this.where)];
  }

  key(event) {
    const { previous, next } = this.answer;
    if (event.key === "j" && next) location.hash = this.at(next);
    else if (event.key === "k" && previous) location.hash = this.at(previous);
    else if (event.key === "u") go(["conversations"], this.filters);
    else if (event.key === "t" && this.tokens) this.tokens.nextStream();
    else if (event.key === "e") this.unfold();
    else return false;
    return true;
  }

  unfold() {
    const all = [...this.root.querySelectorAll("details.saw")];
    const isOpen = all.every((node) => node.open);
    for (const node of all) node.open = !isOpen;
  }
}
