// Credit on tokens: shaded by advantage, one stream at a time or all, with every number of the token under the cursor.

import { counted, h, number, replace } from "./dom.js";
import { reveal } from "./review.js";

const LEVELS = 5;
const ALL = "all streams";

function spanOf(turn, index) {
  return turn.spans.find((span) => span.start <= index && index < span.stop) || null;
}

function level(value, most) {
  if (!value || !most) return "a0";
  const size = Math.max(1, Math.ceil(LEVELS * Math.min(1, Math.abs(value) / most) - 1e-9));
  return `a${value > 0 ? "p" : "n"}${size}`;
}

const lineBreaks = (piece) => piece.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");

export class Tokens {
  constructor(data) {
    this.data = data;
    this.streams = [ALL, ...data.streams];
    this.stream = ALL;
    this.info = h("dl", { class: "token-info", "aria-live": "polite" });
    this.bar = h("div", { class: "tools", role: "group", "aria-label": "Stream" });
    this.boxes = data.turns.map((turn, index) => this.box(turn, index));
    this.node = h("section", { class: "tokens", id: "tokens" }, h("h2", {}, "Credit on tokens"),
      h("p", { class: "muted" }, "Green earned more than its baseline, red less; struck tokens are masked. Point at a token, or move with the arrow keys."),
      this.bar, this.info, this.boxes);
    this.describe(null);
    this.paint();
    if (this.boxes.length) this.boxes[0].open = true;
  }

  shows() {
    return new Map(this.data.turns.map((turn, index) => [turn.place, () => this.open(index)]).filter(([place]) => place !== null));
  }

  open(index) {
    this.boxes[index].open = true;
    this.boxes[index].scrollIntoView({ block: "center" });
  }

  box(turn, index) {
    const box = h("details", { class: "token-turn", "data-turn": index }, h("summary", {}, turn.title,
      h("span", { class: "muted" }, ` ${counted(turn.ids.length + (turn.left_out || 0), "token")}${turn.spans.length ? `, ${[...new Set(turn.spans.map((span) => span.stream))].join(", ")}` : ""}`)));
    box.addEventListener("toggle", () => {
      if (!box.open || box.dataset.filled) return;
      box.dataset.filled = "yes";
      box.append(this.contexts(turn), this.text(turn, index),
        turn.place === null ? "" : h("button", { type: "button", class: "small", onclick: () => reveal(`turn-${turn.place}`) }, "show the turn"));
      this.shade(index);
    });
    return box;
  }

  contexts(turn) {
    if (turn.sampled_in === null && turn.trained_in === null) return h("p", { class: "muted" }, "Trained in the context it was sampled in.");
    return h("div", { class: "contexts" },
      h("div", { class: "context sampled-in" }, h("h4", {}, "Sampled in"), h("pre", { tabindex: "0" }, turn.sampled_in ?? "–")),
      h("div", { class: "context trained-in" }, h("h4", {}, "Trained in"), h("pre", { tabindex: "0" }, turn.trained_in ?? "–")),
      h("h4", { class: "shared" }, "The completion they share"));
  }

  text(turn, index) {
    const line = h("p", { class: "token-line", tabindex: "0", "aria-label": `tokens of ${turn.title}`, "data-turn": index },
      turn.pieces.map((piece, place) => h("span", { class: "tok", "data-place": place }, lineBreaks(piece))),
      turn.left_out ? h("span", { class: "muted" }, ` [${turn.left_out.toLocaleString("en")} tokens left out]`) : null);
    const pick = (event) => {
      const token = event.target.closest ? event.target.closest(".tok") : null;
      if (token) this.choose(index, Number(token.dataset.place));
    };
    line.addEventListener("pointerover", pick);
    line.addEventListener("click", pick);
    line.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (!move) return;
      event.preventDefault();
      const now = this.at && this.at[0] === index ? this.at[1] : -1;
      this.choose(index, Math.min(turn.ids.length - 1, Math.max(0, now + move)));
    });
    return line;
  }

  choose(index, place) {
    if (this.chosen) this.chosen.classList.remove("chosen");
    this.chosen = this.boxes[index].querySelectorAll(".tok")[place];
    this.chosen.classList.add("chosen");
    this.at = [index, place];
    this.describe(this.data.turns[index], place);
  }

  describe(turn, place) {
    const row = (name, value) => [h("dt", {}, name), h("dd", { "data-name": name }, value)];
    if (turn === null) return void replace(this.info, row("token", "none chosen"));
    const span = spanOf(turn, place);
    const differs = turn.anchor[place] !== turn.sampling[place] && turn.anchor[place] !== null;
    replace(this.info, row("token", JSON.stringify(turn.pieces[place])), row("id", turn.ids[place]),
      row("advantage", number(turn.advantages[place])), row("stream", span ? span.stream : "none"), row("reward", span ? number(span.reward) : "–"),
      row("sampling logprob", number(turn.sampling[place])), row("training logprob", number(turn.training[place])),
      differs ? row("anchor logprob", number(turn.anchor[place])) : null,
      row("ratio", number(turn.ratios[place])), row("weight", number(turn.weights[place])), row("mask", number(turn.mask[place])));
  }

  paint() {
    replace(this.bar, this.streams.map((name) => h("button", { type: "button", class: "toggle", "aria-pressed": String(name === this.stream), "data-name": name,
      onclick: () => this.select(name) }, name)));
    for (const index of this.boxes.keys()) this.shade(index);
  }

  select(name) {
    this.stream = name;
    this.paint();
  }

  nextStream() {
    this.select(this.streams[(this.streams.indexOf(this.stream) + 1) % this.streams.length]);
  }

  advantage(turn, place) {
    if (this.stream !== ALL) {
      const span = spanOf(turn, place);
      if (!span || span.stream !== this.stream) return 0;
    }
    return turn.advantages[place] || 0;
  }

  shade(index) {
    if (!this.boxes[index].dataset.filled) return;
    let most = 0;
    for (const turn of this.data.turns) for (const place of turn.ids.keys()) most = Math.max(most, Math.abs(this.advantage(turn, place)));
    const turn = this.data.turns[index];
    for (const [place, token] of this.boxes[index].querySelectorAll(".tok").entries()) {
      const chosen = token === this.chosen ? " chosen" : "";
      token.className = `tok ${level(this.advantage(turn, place), most)}${turn.mask[place] === 0 ? " masked" : ""}${chosen}`;
    }
  }
}
