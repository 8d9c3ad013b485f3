// Long texts: their head and tail, and the rest when it is asked for.

import { ask, isReport, Refused } from "./api.js";
import { h } from "./dom.js";

// A short text stands whole, a long one as {head, left_out, tail, ref}.
export const headOf = (value) => value.head ?? value;

// where: {run, step, group} of the conversation that the text belongs to.
export function text(value, where, className) {
  const block = h("pre", { class: className, tabindex: value.left_out ? "0" : null }, headOf(value));
  if (!value.left_out) return block;
  const count = `${value.left_out.toLocaleString("en")} characters left out`;
  if (isReport) {
    block.append(h("span", { class: "cut" }, `[${count}]`), document.createTextNode(value.tail));
    return block;
  }
  const title = `${count}: show all`;
  const button = h("button", { type: "button", class: "cut", onclick: async () => {
    button.disabled = true;
    try {
      const whole = await ask("text", { ...where, ref: value.ref });
      block.textContent = whole.text;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      button.disabled = false; // the server may be there again later
      button.textContent = `${title} (not now: ${error.message})`;
    }
  } }, title);
  block.append(button, document.createTextNode(value.tail));
  return block;
}
