// Long texts: their head and tail, and the rest when it is asked for.

import { ask } from "./api.js";
import { h } from "./dom.js";

// where: {run, step, group} of the conversation that the text belongs to.
export function text(value, where, className) {
  const block = h("pre", { class: className, tabindex: value.left_out ? "0" : null }, value.head);
  if (!value.left_out) return block;
  const button = h("button", { type: "button", class: "cut", onclick: async () => {
    button.disabled = true;
    const whole = await ask("text", { ...where, ref: value.ref });
    block.textContent = whole.text;
  } }, `${value.left_out.toLocaleString("en")} characters left out: show all`);
  block.append(button, document.createTextNode(value.tail));
  return block;
}
