// Asking the server, and the address of the page: "#/view/part?name=value", which is a permanent link.

export class Refused extends Error {}

export async function ask(name, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const each of [value].flat()) if (each !== undefined && each !== null && each !== "") query.append(key, each);
  }
  let response;
  try {
    response = await fetch(`/api/${name}?${query}`);
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
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) if (value !== "" && value !== undefined && value !== null) query.set(key, value);
  const text = query.toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export function go(parts, parameters = {}) {
  location.hash = link(parts, parameters);
}

// Changes the address without a new entry in the history and without drawing anew.
export function remember(parts, parameters = {}) {
  history.replaceState(null, "", link(parts, parameters));
}
