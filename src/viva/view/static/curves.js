// All metrics by name, in groups; a chart is fetched and drawn when it comes into sight.

import { ask, link, remember } from "./api.js";
import { chart } from "./chart.js";
import { h, number, replace, table } from "./dom.js";

const COLOURS = 6;

function matches(text, wanted) {
  return wanted.toLowerCase().split(/\s+/).every((part) => text.toLowerCase().includes(part));
}

// Fetches what charts ask for in one request per turn of the event loop.
class Points {
  constructor() { this.known = new Map(); this.wanted = new Set(); }

  async get(keys) {
    const missing = keys.filter((key) => !this.known.has(key));
    if (!missing.length) return;
    for (const key of missing) this.wanted.add(key);
    this.fetching ??= new Promise((resolve) => setTimeout(resolve, 0)).then(() => this.fetch());
    await this.fetching;
  }

  async fetch() {
    const keys = [...this.wanted];
    this.wanted.clear();
    this.fetching = null;
    for (let start = 0; start < keys.length; start += 60) {
      const some = keys.slice(start, start + 60);
      const runs = await ask("series", { key: some });
      for (const key of some) this.known.set(key, runs.map((run) => run[key]));
    }
  }

  lines(curves, runs) {
    return curves.flatMap((curve, index) => (this.known.get(curve.key) || []).map((points, run) => points && {
      ...points, run, colour: index % COLOURS, name: runs.length > 1 ? `${runs[run].name}: ${curve.name}` : curve.name,
    })).filter(Boolean);
  }
}

class Figure {
  constructor(view, section, entry, size) {
    Object.assign(this, { view, entry, size, isDrawn: false });
    this.title = `${section.title}: ${entry.title}`;
    this.plot = h("div", { class: "plot waiting" });
    const at = link(["curves", section.title, entry.title], view.parameters());
    this.node = h("figure", { "data-chart": this.title },
      h("figcaption", {}, h("a", { href: at, title: "this chart alone, as a link" }, size ? this.title : entry.title)), this.plot);
    this.node.figure = this;
  }

  // A chart that somebody reads just now stays as it is; it is drawn anew with the next news.
  get isInUse() {
    return this.node.contains(document.activeElement) || this.node.matches(":hover");
  }

  async draw() {
    const wasDrawn = this.isDrawn;
    this.isDrawn = true;
    const { view, entry } = this;
    await view.points.get(entry.curves.map((curve) => curve.key));
    if (wasDrawn && this.isInUse) return;
    const lines = view.points.lines(entry.curves, view.runs);
    const drawn = chart(this.title, lines, { smoothing: view.smoothing, ...(this.size ? { size: this.size } : {}) });
    this.plot.replaceWith(drawn);
    this.plot = drawn;
  }
}

export class Curves {
  constructor(root, { parts, parameters, runs }) {
    Object.assign(this, { root, parts, runs, points: new Points(), figures: [] });
    this.smoothing = Math.min(0.99, Math.max(0, Number(parameters.smooth) || 0));
    this.filter = parameters.filter || "";
    this.observer = new IntersectionObserver((seen) => {
      for (const entry of seen) if (entry.isIntersecting && !entry.target.figure.isDrawn) entry.target.figure.draw();
    }, { rootMargin: "300px" });
  }

  parameters() {
    return { filter: this.filter, smooth: this.smoothing || "" };
  }

  async build() {
    this.layout = await ask("curves");
    this.search = h("input", { type: "search", id: "filter", value: this.filter, placeholder: "part of a name", oninput: () => {
      this.filter = this.search.value;
      this.changed();
    } });
    const slider = h("input", { type: "range", id: "smooth", min: "0", max: "0.99", step: "0.01", value: String(this.smoothing), oninput: () => {
      this.smoothing = Number(slider.value);
      this.changed();
    } });
    this.shownSmoothing = h("output", { for: "smooth" });
    this.body = h("div", { class: "groups" });
    const alone = this.parts.length === 2;
    this.root.dataset.title = alone ? this.parts.join(": ") : "curves";
    replace(this.root, h("div", { class: "tools", role: "search" },
      alone ? h("a", { href: link(["curves"], this.parameters()) }, "all curves") : [h("label", { for: "filter" }, "Find"), this.search],
      h("label", { for: "smooth" }, "Smoothing"), slider, this.shownSmoothing,
      this.runs.map((run, index) => h("span", { class: `key run${index}` }, h("i", {}), run.name))), this.body);
    this.fill();
  }

  changed() {
    remember(["curves", ...this.parts], this.parameters());
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.fill(), 60);
  }

  fill() {
    this.observer.disconnect();
    this.shownSmoothing.value = this.smoothing.toFixed(2);
    this.figures = [];
    const wasOpen = new Map([...this.body.querySelectorAll("details")].map((node) => [node.dataset.section, node.open]));
    replace(this.body, this.layout.map((group) => {
      const sections = group.sections.map((section) => this.section(section, wasOpen)).filter(Boolean);
      return sections.length ? h("section", { "data-group": group.name, "aria-label": group.name }, h("h2", {}, group.name), sections) : null;
    }));
    if (!this.figures.length) replace(this.body, h("p", { class: "muted" }, this.layout.length ? "No metric has that name." : "No metrics yet."));
    for (const figure of this.figures) this.observer.observe(figure.node);
  }

  section(section, wasOpen) {
    const [only, title] = this.parts.length === 2 ? this.parts : [];
    const found = section.charts.filter((entry) => (only === undefined || (section.title === only && entry.title === title))
      && (only !== undefined || !this.filter || matches(`${section.title}/${entry.title} ${entry.curves.map((curve) => curve.key).join(" ")}`, this.filter)));
    if (!found.length) return null;
    const figures = found.map((entry) => new Figure(this, section, entry, only === undefined ? null : [900, 420]));
    this.figures.push(...figures);
    if (only !== undefined) return h("div", { class: "alone" }, figures.map((figure) => figure.node));
    const isOpen = this.filter ? true : wasOpen.get(section.title) ?? section.open;
    return h("details", { open: isOpen, "data-section": section.title },
      h("summary", {}, section.title, h("span", { class: "muted" }, ` ${found.length}`)),
      h("div", { class: "charts" }, figures.map((figure) => figure.node)), this.numbers(found));
  }

  // First, last, lowest and highest value of every curve of a section, worked out when somebody looks.
  numbers(found) {
    const box = h("details", { class: "numbers" }, h("summary", {}, "Numbers"));
    const keys = found.flatMap((entry) => entry.curves.map((curve) => curve.key));
    box.addEventListener("toggle", async () => {
      if (!box.open || box.dataset.filled) return;
      box.dataset.filled = "yes";
      await this.points.get(keys);
      const rows = keys.flatMap((key) => (this.points.known.get(key) || []).map((points, run) => points && [
        this.runs.length > 1 ? `${this.runs[run].name}: ${key}` : key, points.count, ...[points.values[0], points.values.at(-1),
          Math.min(...points.values), Math.max(...points.values)].map(number)]).filter(Boolean));
      box.append(table("numbers", ["metric", "points", "first", "last", "lowest", "highest"], rows, "Numbers"));
    });
    return box;
  }

  async refresh(runs) {
    this.runs = runs;
    const layout = await ask("curves");
    this.points.known.clear();
    const isNew = JSON.stringify(layout) !== JSON.stringify(this.layout);
    this.layout = layout;
    if (isNew) return this.fill();
    await Promise.all(this.figures.filter((figure) => figure.isDrawn).map((figure) => figure.draw()));
  }

  key(event) {
    if (event.key !== "/" || this.parts.length === 2) return false;
    this.search.focus();
    return true;
  }

  leave() {
    this.observer.disconnect();
  }
}
