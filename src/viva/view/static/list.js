// The conversations of a run: filters and one page of rows, all of it in the address.

import { ask, has, isReport, link, remember } from "./api.js";
import { h, number, replace, table } from "./dom.js";

const ANSWERS = [["", "any answers"], ["right", "all right"], ["mixed", "some right"], ["wrong", "all wrong"], ["mended", "revision mended"],
  ["spoiled", "revision spoiled"], ["unknown", "not known"]];
const STATES = [["", "any state"], ["sound", "sound"], ["failed", "an agent failed"], ["void", "void"], ["flips", "verdicts flip"],
  ["cycles", "rankings cycle"], ["disagrees", "judge is wrong"]];
const ORDERS = [["step", "first steps first"], ["-step", "last steps first"], ["reward", "lowest reward first"], ["-reward", "highest reward first"],
  ["-spread", "widest rewards first"]];
export const FILTERS = ["run", "step_from", "step_to", "strategy", "reward_from", "reward_to", "answers", "state", "text", "order"];

export function filtersOf(parameters) {
  return Object.fromEntries(FILTERS.filter((name) => parameters[name]).map((name) => [name, parameters[name]]));
}

export function answersText(row) {
  return row.num_graded ? `${row.num_right}/${row.num_graded}` : "–";
}

const counted = (count, noun) => (count ? `${count} ${noun}${count > 1 ? "s" : ""}` : "");

export function stateText(row) {
  return [row.is_void ? "void" : "", row.num_failures ? `${row.num_failures} failed` : "", row.num_mended > 0 ? `${row.num_mended} mended` : "",
    row.num_mended < 0 ? `${-row.num_mended} spoiled` : "", counted(row.num_flips, "flip"), counted(row.num_cycles, "cycle"),
    row.has_tokens ? "tokens" : ""].filter(Boolean).join(", ");
}

function items(options, value) {
  return options.map(([option, text]) => h("option", { value: option, selected: option === (value || "") }, text));
}

function choice(name, label, options, value, onchange) {
  return h("label", {}, h("span", {}, label), h("select", { name, onchange }, items(options, value)));
}

function strategies(facets) {
  return [["", "any strategy"], ...facets.strategies.map(({ name, count }) => [name, `${name || "none"} (${count})`])];
}

// The strategies to choose from: more of them become known as the run goes on, or as its files are read.
export function renewStrategies(bar, facets, value) {
  const select = bar.elements.strategy;
  if (select && select !== document.activeElement) replace(select, items(strategies(facets), value));
}

function field(name, label, type, value, oninput) {
  return h("label", {}, h("span", {}, label), h("input", { name, type, step: type === "number" ? "any" : null, value: value || "", oninput }));
}

export function filterBar(parameters, facets, runs, changed) {
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
    choice("strategy", "Strategy", strategies(facets), parameters.strategy, now), choice("answers", "Answers", ANSWERS, parameters.answers, now),
    choice("state", "State", STATES, parameters.state, now),
    field("reward_from", "Reward from", "number", parameters.reward_from, later), field("reward_to", "to", "number", parameters.reward_to, later),
    choice("order", "Order", ORDERS, parameters.order || "step", now));
}

// The question of a row: a link to the conversation, where there is one to see.
export function questionOf(row, filters) {
  const text = row.question || "(no question recorded)";
  const where = { run: filters.run, step: String(row.step), group: String(row.group) };
  return has("conversation", where) ? h("a", { href: link(["conversation", where.step, where.group], filters) }, text) : text;
}

class List {
  constructor(root, { parameters, runs }) {
    Object.assign(this, { root, runs, chosen: 0, loading: 0 });
    this.filters = filtersOf(parameters);
    this.page = Number(parameters.page) || 0;
  }

  parameters() {
    return { ...this.filters, page: this.page || "" };
  }

  async build() {
    if (!this.runs.length) this.runs = (await ask("runs")).runs;
    this.root.dataset.title = "conversations";
    this.answer = await ask("conversations", this.parameters());
    this.body = h("div", { class: "rows" });
    this.bar = filterBar(this.filters, this.answer.facets, this.runs, (name, value) => this.changed(name, value));
    replace(this.root, h("h2", { class: "quiet" }, "Conversations"), this.bar, this.body);
    this.fill();
  }

  async changed(name, value) {
    if (value) this.filters[name] = value; else delete this.filters[name];
    this.page = 0;
    await this.load();
  }

  async load() {
    remember(["conversations"], this.parameters());
    const loading = ++this.loading;
    try {
      const answer = await ask("conversations", this.parameters());
      if (loading !== this.loading) return; // a later question is under way
      this.answer = answer;
      this.chosen = 0;
      this.fill();
    } catch (error) {
      replace(this.body, h("p", { class: "failure", role: "alert" }, error.message));
    }
  }

  fill() {
    const { rows, total, page, size } = this.answer;
    const pages = Math.max(1, Math.ceil(total / size));
    const turn = (by, label) => h("button", { type: "button", disabled: page + by < 0 || page + by >= pages, onclick: () => this.turn(by) }, label);
    const list = table("list", ["step", "group", "question", "strategy", "right", "reward", "lowest", "highest", "remarks", ...(isReport ? ["shown for"] : [])],
      rows.map((row) => [row.step, row.group, questionOf(row, this.filters), row.strategy, answersText(row), number(row.reward_mean),
        number(row.reward_min), number(row.reward_max), stateText(row), ...(isReport ? [row.reason] : [])]), "Conversations");
    const pager = [` conversations · page ${page + 1} of ${pages} `, turn(-1, "Previous page"), turn(1, "Next page")];
    replace(this.body, h("p", { class: "pages" }, h("b", { id: "total" }, total),
      isReport ? ` of ${counted(this.answer.all, "conversation")}: a sample; viva view shows all of them.` : pager), rows.length ? list : h("p", { class: "muted" }, "No conversation matches."));
    this.choose(this.chosen, false);
  }

  choose(index, isFocused = true) {
    const links = [...this.body.querySelectorAll("tbody a")];
    if (!links.length) return;
    this.chosen = Math.min(links.length - 1, Math.max(0, index));
    for (const [place, node] of links.entries()) node.closest("tr").setAttribute("aria-selected", String(place === this.chosen));
    if (isFocused) links[this.chosen].focus();
  }

  turn(by) {
    const pages = Math.ceil(this.answer.total / this.answer.size);
    if (this.page + by < 0 || this.page + by >= pages) return;
    this.page += by;
    this.load();
  }

  async refresh(runs) {
    this.runs = runs;
    const chosen = this.chosen;
    const isFocused = this.body.contains(document.activeElement) && document.activeElement.tagName === "A";
    const loading = this.loading;
    const answer = await ask("conversations", this.parameters());
    if (loading !== this.loading) return;
    this.answer = answer;
    renewStrategies(this.bar, answer.facets, this.filters.strategy);
    this.fill();
    this.choose(chosen, isFocused);
  }

  key(event) {
    const links = this.body.querySelectorAll("tbody a");
    const isIn = this.body.contains(document.activeElement) && document.activeElement.tagName === "A";
    if (event.key === "j") return this.choose(isIn ? this.chosen + 1 : this.chosen), true;
    if (event.key === "k") return this.choose(this.chosen - 1), true;
    if (event.key === "[" || event.key === "]") return this.turn(event.key === "[" ? -1 : 1), true;
    if (event.key === "/" && !isReport) return this.bar.elements.text.focus(), true;
    if (event.key === "Enter" && !isIn && document.activeElement === document.body && links[this.chosen]) return links[this.chosen].click(), true;
    return false;
  }
}

export async function listView(root, context) {
  const view = new List(root, context);
  await view.build();
  return view;
}

