// One conversation, whole: rounds by agents (what each saw and what it said), what the review was worth, and the judge's verdicts.

import { ask, go, link } from "./api.js";
import { add, h, mark, share, signed, table } from "./dom.js";
import { filtersOf } from "./list.js";
import { agentsOf, arrows, cyclesText, rankings, scores, sidesOf, streams } from "./review.js";
import { headOf, text } from "./text.js";
import { Tokens } from "./tokens.js";

const PARTS = ["reflection", "evaluation", "decision", "solution"];

const namesOf = (turn) => PARTS.filter((name) => name in turn.response && headOf(turn.response[name]).trim());

function partText(turn, part) {
  if (part.startsWith("critique of agent ")) {
    const target = Number(part.slice("critique of agent ".length));
    const found = (turn.response.critiques || []).find((critique) => critique.target === target);
    return found ? found.text : turn.text;
  }
  return part === "solution" && namesOf(turn).includes("solution") ? turn.response.solution : turn.text;
}

function earlier(record, { turn, part }) {
  const said = record.turns[turn];
  return `${part} by agent ${said.agent_id} (round ${said.round_index + 1}, ${said.segment})`;
}

function sights(record, turn, where) {
  const seen = turn.sightings.filter((each) => each.is_seen);
  const hidden = turn.sightings.filter((each) => !each.is_seen);
  return h("details", { class: "saw" }, h("summary", {}, "What it saw"),
    record.system_prompt ? [h("h4", {}, "System message"), text(record.system_prompt, where, "system"), h("h4", {}, "Prompt")] : null,
    text(turn.prompt, where, "prompt"),
    seen.length ? h("p", { class: "seen" }, h("b", {}, "In it: "), seen.map((each) => earlier(record, each)).join("; ")) : null,
    hidden.length ? h("div", { class: "hidden-parts" }, h("b", {}, `Hidden from it: ${hidden.length}`),
      hidden.map((each) => h("details", { class: "hidden-part" }, h("summary", {}, h("s", {}, earlier(record, each))),
        text(partText(record.turns[each.turn], each.part), where)))) : null);
}

function votes(turn) {
  const cast = turn.response.preferences;
  if (!cast) return null;
  if (!cast.length) return h("p", { class: "muted" }, "no vote that counts");
  return h("ul", { class: "votes" }, cast.map(sidesOf).map((vote) => h("li", {},
    `${vote.above} ${vote.tie ? "=" : ">"} ${vote.below}${vote.share ? ` (${(100 * vote.share).toFixed(1)} %)` : ""}`)));
}

function critiques(turn, where) {
  const given = turn.response.critiques;
  if (!given) return null;
  if (!given.length) return h("p", { class: "muted" }, "no critique that counts");
  return given.map((critique) => h("div", { class: "critique", id: `critique-${turn.agent_id}-${critique.target}-${turn.round_index}` },
    h("h4", {}, `→ agent ${critique.target}`), text(critique.text, where)));
}

function called(turn, where) {
  const { tool, arguments: given, output, failure } = turn.response;
  if (output === undefined) return null;
  return h("div", { class: "part aside call" }, h("h4", {}, `calls ${headOf(tool) || "a tool"}`), text(given, where),
    h("h4", {}, failure ? `failed, ${failure}` : "returned"), text(output, where));
}

function shown(record, turn, place, where, hasTokens) {
  const dropped = Object.entries(turn.response.dropped || {}).map(([cause, count]) => `${cause} ${count}`).join(", ");
  const names = namesOf(turn);
  return h("div", { class: "turn", id: `turn-${place}` },
    h("h3", {}, turn.segment === "turn" ? "reply" : turn.segment,
      turn.status === "ok" ? null : h("span", { class: "status" }, turn.status),
      hasTokens.has(place) ? h("button", { type: "button", class: "small", onclick: () => hasTokens.get(place)() }, "tokens") : null),
    names.map((name) => h("div", { class: `part ${name === "solution" ? "solution" : "aside"}` },
      name === "solution" && names.length === 1 ? null : h("h4", {}, name), text(turn.response[name], where))),
    called(turn, where), critiques(turn, where), votes(turn),
    dropped ? h("p", { class: "muted" }, `left out: ${dropped}`) : null,
    sights(record, turn, where),
    h("details", { class: "sampled" }, h("summary", {}, "Reply as sampled"), text(turn.text, where)));
}

function head(agent) {
  const arrow = agent.right_before !== null && agent.right !== null ? " → " : null;
  return h("th", { scope: "col" }, h("span", {}, `Agent ${agent.id} `), agent.reward === null ? null : h("span", { class: "reward" }, `reward ${signed(agent.reward)} `),
    h("span", { class: "marks" }, mark(agent.right_before), arrow, mark(agent.right)));
}

// hasTokens: place of a turn -> function that shows its tokens.
function grid(record, where, hasTokens) {
  const rounds = [...new Set([...record.turns.map((turn) => turn.round_index), ...record.failures.map((failure) => failure.round_index)])].sort((a, b) => a - b);
  const cell = (round, agent) => h("td", {},
    record.turns.map((turn, place) => [turn, place]).filter(([turn]) => turn.round_index === round && turn.agent_id === agent.id)
      .sort(([a], [b]) => a.lane - b.lane).map(([turn, place]) => shown(record, turn, place, where, hasTokens)),
    record.failures.filter((failure) => failure.round_index === round && failure.agent_id === agent.id)
      .map((failure) => h("div", { class: "failure" }, h("h4", {}, "Failed"), text(failure.reason, where))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rounds by agents" },
    h("table", { class: "rounds" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Round"), record.agents.map(head))),
      h("tbody", {}, rounds.map((round) => h("tr", {}, h("th", { scope: "row" }, round + 1), record.agents.map((agent) => cell(round, agent)))))));
}

const STAGES = ["initial", "revised"];
const agentName = (id) => `agent ${id}`;
const stageName = (id) => STAGES[id] || `solution ${id}`;

function winner(item) {
  return { A: item.first, B: item.second }[item.outcome] ?? null;
}

const titleOf = (item) => h("p", {}, item.agent_id === null ? `agent ${item.first} first, agent ${item.second} second`
  : `agent ${item.agent_id}: ${stageName(item.first)} first`);

function cell(record, agent, first, second, name) {
  const said = record.comparisons.filter((item) => item.agent_id === agent && item.first === first && item.second === second);
  if (!said.length) return h("td", { class: "none" });
  const pair = record.pairs.find((each) => each.agent_id === agent && each.items.includes(first) && each.items.includes(second));
  return h("td", { class: pair && pair.is_flipped ? "flipped" : null }, said.map((item) => {
    const won = winner(item);
    const labels = ["A", "B", "tie"];
    return h("p", {}, won === null ? item.outcome : name(won), item.score === null ? null : ` ${signed(item.score)}`,
      pair && pair.is_flipped ? h("span", { class: "flip" }, " flips") : null,
      item.probabilities ? h("span", { class: "muted" }, ` ${item.probabilities.map((value, index) => `${labels[index]} ${value.toFixed(2)}`).join(", ")}`) : null);
  }));
}

function between(record) {
  const ids = [...new Set(record.comparisons.filter((item) => item.agent_id === null).flatMap((item) => [item.first, item.second]))].sort((a, b) => a - b);
  if (!ids.length) return null;
  return table("verdicts", ["", ...ids.map((id) => `second: agent ${id}`)],
    ids.map((first) => [`first: agent ${first}`, ...ids.map((second) => cell(record, null, first, second, agentName))]), "Verdicts, in both orders");
}

function ofRevisions(record) {
  const ids = [...new Set(record.comparisons.filter((item) => item.agent_id !== null).map((item) => item.agent_id))].sort((a, b) => a - b);
  if (!ids.length) return null;
  return table("verdicts", ["", "initial shown first", "revised shown first"],
    ids.map((id) => [`agent ${id}`, cell(record, id, 0, 1, stageName), cell(record, id, 1, 0, stageName)]), "Revised against initial, in both orders");
}

function asked(record, where) {
  const prompts = record.comparisons.filter((item) => headOf(item.prompt).trim());
  if (!record.judge || !prompts.length) return null;
  return h("details", { class: "asked" }, h("summary", {}, "What the judge saw"), h("h4", {}, "System message"), text(record.judge.system_prompt, where, "prompt"),
    prompts.map((item) => [titleOf(item), text(item.prompt, where, "prompt")]),
    record.judge.prefill ? [h("p", {}, "Its reply begins with"), h("pre", { class: "prompt" }, record.judge.prefill)] : null);
}

function scored(record, where) {
  if (!record.rubric || !record.criteria.length) return null;
  const weight = (item) => h("span", { class: "muted" }, ` weight ${item.weight}`);
  return h("section", { class: "judge-panel" }, h("h2", {}, "Rubric"),
    h("p", { class: "muted" }, "How far each solution fulfils a criterion by the judge, from 0 to 1."),
    table("rubric", ["", ...Object.keys(record.rubric).map((id) => agentName(id))],
      record.criteria.map((item, place) => [[item.text, record.criteria.length > 1 ? weight(item) : null],
        ...Object.values(record.rubric).map((scores) => (scores[place] === null ? "unreadable" : scores[place].toFixed(2)))]), "Scores by criterion"),
    record.judge ? h("details", { class: "asked" }, h("summary", {}, "What the judge was told"), text(record.judge.system_prompt, where, "prompt")) : null);
}

function verdicts(record, where) {
  if (!record.comparisons.length) return scored(record, where);
  const [{ cycles, agreement }] = record.verdicts;
  const flips = record.pairs.filter((pair) => pair.is_flipped).length;
  const both = record.pairs.filter((pair) => pair.in_both_orders).length;
  const written = record.comparisons.filter((item) => item.failure || headOf(item.text).trim());
  return h("section", { class: "judge-panel" }, h("h2", {}, "Verdicts"),
    h("p", { class: "muted" }, "Who won, and the score from −1 (first wins) to +1 (second wins). A verdict flips if the winner changes with the order."),
    between(record), ofRevisions(record),
    h("p", {}, "Flips: ", h("b", { class: "flips" }, share(flips, both)), " · Cycles: ",
      h("b", { class: "cycles" }, cyclesText(cycles)), " · Agrees with the known answers: ",
      h("b", { class: "agreement" }, share(...agreement))),
    written.length ? h("details", {}, h("summary", {}, "What the judge wrote"), written.map((item) => [titleOf(item), item.failure ? h("p", { class: "muted" }, "No reply: ", headOf(item.failure)) : text(item.text, where)])) : null, asked(record, where));
}

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
