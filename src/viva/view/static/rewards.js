// The pay of other rewards for a run's conversations; a server works it out when somebody looks.

import { ask, has, Refused } from "./api.js";
import { counted, h, number, replace, signed, table } from "./dom.js";

const HEADS = ["reward", "conversations", "mean", "spread", "with paid", "with truth"];

function shown({ used, all, rows, unpaid, left_out }) {
  if (!used) return h("p", { class: "muted" }, "No conversation has earned anything yet.");
  const some = used < all ? `the last ${used} of ${counted(all, "conversation")}` : `all ${counted(used, "conversation")}`;
  return [h("p", { class: "muted" }, `From ${some}, without asking anybody; viva rescore RUN reward=all takes the whole run, and asks a judge that is named. Correlations are within conversations; the truth is whether the final solution is right.`),
    table("rewards", HEADS, rows.map((row) => [row.reward, row.conversations, number(row.mean), number(row.spread), signed(row.with_paid, 3), signed(row.with_truth, 3)]), "Rewards side by side"),
    left_out.length ? h("p", { class: "failure" }, `${counted(left_out.length, "conversation")} left out; the first: ${left_out[0]}`) : null,
    unpaid.length ? [h("p", { class: "muted" }, "Not computed for every conversation:"), h("ul", { class: "muted" }, unpaid.map(({ rewards, why }) => h("li", {}, h("b", {}, rewards), `: ${why}`)))] : null];
}

// The section of one run; null where there is nothing to show.
export function otherRewards(run, { kind, conversations }) {
  if (kind !== "run" || !conversations || !has("rewards", { run })) return null;
  const body = h("div", {}, h("p", { class: "muted" }, "computing"));
  const box = h("details", { "data-section": "other rewards" }, h("summary", {}, "What other rewards would have paid"), body);
  box.addEventListener("toggle", async () => {
    if (!box.open) return;
    try {
      replace(body, shown(await ask("rewards", { run })));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      replace(body, h("p", { class: "failure" }, error.message));
    }
  });
  return box;
}
