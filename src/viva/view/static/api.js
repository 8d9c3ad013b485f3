// Asking the server, or the answers inside of a report, and the address of the page: "#/view/part?name=value", a permanent link.

export class Refused extends Error {}

const INSIDE = document.getElementById("answers");
const answers = INSIDE && JSON.parse(INSIDE.textContent);
export const isReport = answers !== null;

// Where a report has an answer about one run, or one of its conversations.
function placeOf(name, { run, step, group }) {
  if (name === "conversation") return [name, run || "0", step, group].join("/");
  return ["conversations", "judge", "rewards"].includes(name) ? `${name}/${run || "0"}` : name;
}

export function has(name, parameters) {
  return !isReport || Object.hasOwn(answers, placeOf(name, parameters));
}

function answerInside(name, parameters) {
  if (!has(name, parameters)) throw new Refused("the report does not hold this; 'viva view' shows it from the run's folder");
  const answer = answers[placeOf(name, parameters)];
  if (answer.error) throw new Refused(answer.error);
  return answer;
}

// Parameters as text, one with several values several times; empty ones are left out.
function queryOf(parameters) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const each of [value].flat()) if (each !== undefined && each !== null && each !== "") query.append(key, each);
  }
  return query.toString();
}

export async function ask(name, parameters = {}) {
  if (isReport) return answerInside(name, parameters);
  let response;
  try {
    response = await fetch(`/api/${name}?${queryOf(parameters)}`);
  } catch {
    throw new Refused("the server does not answer; 'viva view' has ended?");
  }
  const value = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Refused(value.error || `the server answered ${response.status}`);
  return value;
}

export function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  return { parts: parts.length ? parts : ["curves"], parameters: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function link(parts, parameters = {}) {
  const query = queryOf(parameters);
  return `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

export function go(parts, parameters = {}) {
  location.hash = link(parts, parameters);
}

// Changes the address without a new entry in the history and without drawing anew.
export function remember(parts, parameters = {}) {
  history.replaceState(null, "", link(parts, parameters));
}
