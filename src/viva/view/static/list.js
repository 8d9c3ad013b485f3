// The conversations of a run: filters and one page of rows, all of it in the address.

import { ask, has, isReport, link, remember } from "./api.js";
import { counted, h, number, replace, table } from "./dom.js";

const ANSWERS = [["", "any answers"], ["right", "all right"], ["mixed", "some right"], ["wrong", "all wrong"], ["mended", "revision mended"],
  ["spoiled", "revision spoiled"], ["unknown", "not known"]];
const STATES = [["", "any state"], ["sound", "sound"], ["failed", "an agent failed"], ["void", "void"], ["flips", "verdicts flip"],
  ["cycles", "rankings cycle"], ["disagrees", "judge is wrong"]];
const ORDERS = [["step", "first steps first"], ["-step", "last steps first"], ["reward", "lowest reward first"], ["-reward", "highest reward first"],
  ["-spread", "widest rewards first"]];
const FILTERS = ["run", "step_from", "step_to", "strategy", "reward_from", "reward_to", "answers", "state", "text", "order"];

export function filtersOf(parameters) {
  return Object.fromEntries(FILTERS.filter((name) => parameters[name]).map((name) => [name, parameters[name]]));
}

export function answersText(row) {
  return row.num_graded ? `${row.num_right}/${row.num_graded}` : "–";
}

function stateText(row) {
  return [row.is_void ? "void" : "", row.num_failures ? `${row.num_failures} failed` : "", row.num_mended > 0 ? `${row.num_mended} mended` : "",
    row.num_mended < 0 ? `${-row.num_mended} spoiled` : "", row.judged.flips ? counted(row.judged.flips, "flip") : "",
    row.judged.cycles ? counted(row.judged.cycles, "cycle") : "",
    row.has_tokens ? "tokens" : ""].filter(Boolean).join(", ");
}

function items(options, value) {
  return options.map(([option, text]) => h("option", { value: option, selected: option === (value || "") }, text));
}

function choice(name, label, options, value, onchange) {
  return h("label", {}, h("span", {}, label), h("select", { name, onchange }, items(options, value)));
}

function strategyItems(strategies) {
  return [["", "any strategy"], ...strategies.map(({ name, count }) => [name, `${name || "none"} (${count})`])];
}

// The strategies to choose from: more of them become known as the run goes on, or as its files are read.
function renewStrategies(bar, strategies, value) {
  const select = bar.elements.strategy;
  if (select && select !== document.activeElement) replace(select, items(strategyItems(strategies), value));
}

function field(name, label, type, value, oninput) {
  return h("label", {}, h("span", {}, label), h("input", { name, type, step: type === "number" ? "any" : null, value: value || "", oninput }));
}

function filterBar(parameters, strategies, runs, changed) {
  const timers = new Map(); // by field: what is typed into one must not drop what was typed into another
  const later = ({ target: { name, value } }) => {
    clearTimeout(timers.get(name));
    timers.set(name, setTimeout(() => changed(name, value), 200));
  };
  const now = (event) => changed(event.target.name, event.target.value);
  const runChoice = runs.length > 1 ? choice("run", "Run", runs.map((run, index) => [index ? String(index) : "", run.name]), parameters.run, now) : null;
  const tools = { class: "tools filters", role: "search", onsubmit: (event) => event.preventDefault() };
  if (isReport) return h("form", tools, runChoice);
  return h("form", tools, runChoice, field("text", "Question", "search", parameters.text, later),
    field("step_from", "From step", "number", parameters.step_from, later), field("step_to", "to step", "number", parameters.step_to, later),
    choice("strategy", "Strategy", strategyItems(strategies), parameters.strategy, now), choice("answers", "Answers", ANSWERS, parameters.answers, now),
    choice("state", "State", STATES, parameters.state, now),
    field("reward_from", "Reward from", "number", parameters.reward_from, later), field("reward_to", "to", "number", parameters.reward_to, later),
    choice("order", "Order", ORDERS, parameters.order || "step", now));
}

// The question of a row: a link to the conversation, where there is one to see.
export function questionOf(row, filters) {
  const text = row.question || "(no question recorded)";
  const where = { run: filters.run, step: row.step, group: row.group };
  return has("conversation", where) ? h("a", { href: link(["conversation", where.step, where.group], filters) }, text) : text;
}

// Rows that match the filters, by pages. A view of them has a name, a title, and fill and renew for an answer.
export class Filtered {
  constructor(root, { parameters, runs }) {
    Object.assign(this, { root, runs, filters: filtersOf(parameters), page: Number(parameters.page) || 0, loading: 0 });
  }

  parameters() {
    return { ...this.filters, page: this.page || "" };
  }

  async build() {
    const answer = await ask(this.name, this.parameters());
    this.body = h("div", { class: "rows" });
    this.bar = filterBar(this.filters, answer.strategies, this.runs, (name, value) => this.changed(name, value));
    replace(this.root, h("h2", { class: "quiet" }, this.title), this.bar, this.body);
    this.fill(answer);
  }

  async refresh(runs) {
    this.runs = runs;
    const loading = this.loading;
    const answer = await ask(this.name, this.parameters());
    if (loading !== this.loading) return;
    renewStrategies(this.bar, answer.strategies, this.filters.strategy);
    this.renew(answer);
  }

  async changed(name, value) {
    if (value) this.filters[name] = value; else delete this.filters[name];
    this.page = 0;
    await this.load();
  }

  async load() {
    remember([this.name], this.parameters());
    const loading = ++this.loading;
    try {
      const answer = await ask(this.name, this.parameters());
      if (loading === this.loading) this.fill(answer); // not a later question's
    } catch (error) {
      replace(this.body, h("p", { class: "failure", role: "alert" }, error.message));
    }
  }

  pager({ total, page, size }) {
    const pages = this.pages = Math.max(1, Math.ceil(total / size));
    const by = (step, label) => h("button", { type: "button", disabled: page + step < 0 || page + step >= pages, onclick: () => this.turn(step) }, label);
    return [` · page ${page + 1} of ${pages} `, by(-1, "Previous page"), by(1, "Next page")];
  }

  turn(by) {
    if (isReport || this.page + by < 0 || this.page + by >= this.pages) return;
    this.page += by;
    this.load();
  }

  key(event) {
    if (event.key === "[" || event.key === "]") return this.turn(event.key === "[" ? -1 : 1), true;
    if (event.key === "/" && !isReport) return this.bar.elements.text.focus(), true;
    return false;
  }
}

export class List extends Filtered {
  name = "conversations";
  title = "Conversations";
  chosen = 0;

  fill(answer, chosen = 0) {
    const list = table("list", ["step", "group", "question", "strategy", "right", "reward", "lowest", "highest", "remarks", ...(isReport ? ["shown for"] : [])],
      answer.rows.map((row) => [row.step, row.group, questionOf(row, this.filters), row.strategy, answersText(row), number(row.reward_mean),
        number(row.reward_min), number(row.reward_max), stateText(row), ...(isReport ? [row.reason] : [])]), "Conversations");
    replace(this.body, h("p", { class: "pages" }, h("b", { id: "total" }, answer.total),
      isReport ? ` of ${counted(answer.all, "conversation")}: a sample; viva view shows all of them.` : [" conversations", this.pager(answer)]), answer.rows.length ? list : h("p", { class: "muted" }, "No conversation matches."));
    this.choose(chosen, false);
  }

  choose(index, isFocused = true) {
    const links = [...this.body.querySelectorAll("tbody a")];
    if (!links.length) return;
    this.chosen = Math.min(links.length - 1, Math.max(0, index));
    for (const [place, node] of links.entries()) node.closest("tr").setAttribute("aria-selected", String(place === this.chosen));
    if (isFocused) links[this.chosen].focus();
  }

  isFocused() {
    return this.body.contains(document.activeElement) && document.activeElement.tagName === "A";
  }

  renew(answer) {
    const { chosen } = this;
    const wasFocused = this.isFocused();
    this.fill(answer, chosen);
    if (wasFocused) this.choose(chosen);
  }

  key(event) {
    const links = this.body.querySelectorAll("tbody a");
    const isIn = this.isFocused();
    if (event.key === "j") return this.choose(isIn ? this.chosen + 1 : this.chosen), true;
    if (event.key === "k") return this.choose(this.chosen - 1), true;
    if (event.key === "Enter" && !isIn && document.activeElement === document.body && links[this.chosen]) return links[this.chosen].click(), true;
    return super.key(event);
  }
}
