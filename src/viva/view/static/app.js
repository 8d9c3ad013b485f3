// The frame: which view is shown, the keyboard, and what is new in the run.

import { ask, go, isReport, link, place, Refused } from "./api.js";
import { Conversation } from "./conversation.js";
import { Curves } from "./curves.js";
import { counted, h, replace } from "./dom.js";
import { Evaluations } from "./evaluations.js";
import { Judge } from "./judge.js";
import { List } from "./list.js";
import { Options } from "./options.js";
import { Summary } from "./summary.js";

// A view builds itself into its root; it may have a refresh for what is new, a key handler, and a leave.
const VIEWS = { curves: Curves, conversations: List, conversation: Conversation, judge: Judge, evaluations: Evaluations, options: Options, summary: Summary };
const TABS = [["summary", "Summary", "0"], ["curves", "Curves", "1"], ["conversations", "Conversations", "2"], ["judge", "Judge", "3"], ["evaluations", "Evaluations", "4"],
  ["options", "Options", "5"]];
const KEYS = [
  ["0 1 2 3 4 5", "summary, curves, conversations, judge, evaluations, options"],
  ["j k", "next and previous: conversation in the list, or the one that is shown"],
  ["Enter", "open the chosen conversation"],
  ["u", "back to the list"],
  ["[ ]", "previous and next page of the list"],
  ["/", "search"],
  ["t", "tokens: next stream"],
  ["e", "unfold or fold everything that the agents saw"],
  ["?", "this help"],
];
const LIVE_MS = 2000;
const READING_MS = 200; // between looks while the server still reads the files
const REDRAW_MS = 600; // shortest time between two redrawings of what is new

const state = { runs: [], view: null, drawing: 0, versions: "", redrawn: 0 };

function status(text) {
  const node = document.getElementById("status");
  if (node.textContent !== text) node.textContent = text;
}

function showRuns() {
  replace(document.getElementById("runs"), state.runs.map((run, index) => h("span", { class: `run run${index}` },
    h("b", {}, run.name), ` ${[run.model, run.kind === "run" ? counted(run.steps, "step") : "", run.kind === "results" ? "" : counted(run.conversations, "conversation")]
      .filter(Boolean).join(" · ")}`)));
  const reading = state.runs.filter((run) => !run.is_complete).map((run) => `${Math.floor(100 * run.progress)} %`);
  const damaged = state.runs.flatMap((run) => Object.entries(run.damaged).map(([file, count]) => `${counted(count, "damaged line")} in ${file}`));
  const problems = state.runs.flatMap((run) => run.problems);
  const banner = document.getElementById("damage");
  if (banner.dataset.problems !== JSON.stringify(problems)) { // an alert is read out when it changes
    banner.dataset.problems = JSON.stringify(problems);
    replace(banner, problems.map((problem) => h("p", { class: "failure" }, problem)));
  }
  status([reading.length ? `reading conversations: ${reading.join(", ")}` : "", ...damaged].filter(Boolean).join(" · "));
}

function showTabs(current) {
  const shown = current === "conversation" ? "conversations" : current;
  replace(document.getElementById("views"), TABS.map(([name, title, key]) =>
    h("a", { href: link([name]), "aria-current": name === shown ? "page" : null, title: `key ${key}` }, title)));
}

async function draw() {
  const { parts, parameters } = place();
  const name = Object.hasOwn(VIEWS, parts[0]) ? parts[0] : "curves";
  const drawing = ++state.drawing;
  const main = document.getElementById("main");
  state.view?.leave?.();
  state.view = null;
  showTabs(name);
  const root = h("div", { class: `view ${name}` });
  try {
    if (!state.runs.length) state.runs = (await ask("runs")).runs;
    const view = new VIEWS[name](root, { parts: parts.slice(1), parameters, runs: state.runs });
    await view.build();
    if (drawing !== state.drawing) return void view.leave?.();
    state.view = view;
    replace(main, root);
    const path = parts.join("/");
    if (state.path !== undefined && state.path !== path) scrollTo(0, 0); // another view begins at its top
    state.path = path;
    document.title = `${root.dataset.title || name} · Viva`;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (drawing === state.drawing) replace(main, h("p", { class: "failure", role: "alert" }, error.message));
  }
  if (drawing === state.drawing) main.dataset.ready = parts.join("/");
}

async function look() {
  let wait = LIVE_MS;
  try {
    if (!document.hidden) {
      const answer = await ask("runs");
      state.runs = answer.runs;
      if (!location.hash && answer.runs.every((run) => run.kind !== "run")) go(["evaluations"]); // results have no curves
      else if (!location.hash && isReport) go(["summary"]);
      const versions = JSON.stringify(answer.runs.map((run) => run.version));
      showRuns();
      const isComplete = answer.runs.every((run) => run.is_complete);
      if (versions !== state.versions && (isComplete || performance.now() - state.redrawn > REDRAW_MS)) {
        state.versions = versions;
        await state.view?.refresh?.(state.runs);
        state.redrawn = performance.now();
        document.body.dataset.version = versions;
      }
      if (!isComplete) wait = READING_MS;
    }
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    status(error.message);
  }
  if (!isReport) setTimeout(look, wait);
}

function help() {
  const dialog = document.getElementById("help");
  replace(dialog, h("h2", { id: "help-title" }, "Keys"),
    h("dl", {}, KEYS.map(([keys, text]) => [h("dt", {}, keys.split(" ").map((key) => h("kbd", {}, key))), h("dd", {}, text)])),
    h("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  if (!dialog.open) dialog.showModal();
}

function onKey(event) {
  const isTyping = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
  if (event.key === "Escape" && isTyping) return event.target.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  const tab = TABS.find(([, , key]) => key === event.key);
  if (tab) return go([tab[0]]);
  if (event.key === "?") return help();
  if (state.view?.key?.(event)) event.preventDefault();
}

addEventListener("hashchange", draw);
addEventListener("keydown", onKey);
await draw();
look();
