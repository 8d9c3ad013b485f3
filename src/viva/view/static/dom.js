// Making elements. Text of a run only ever becomes a text node or an attribute value that is no address and no code.

const SVG = "http://www.w3.org/2000/svg";

const SAFE_ATTRIBUTE = /^(aria-[a-z]+|class|data-[a-z-]+|for|href|id|open|role|scope|tabindex|title|type|value|name|placeholder|step|min|max|selected|disabled|x|y|x1|x2|y1|y2|cx|cy|r|d|viewBox|text-anchor|marker-end|refX|refY|markerWidth|markerHeight|orient)$/;

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      if (typeof value !== "function") throw new Error(`${name} must be a function`);
      node.addEventListener(name.slice(2), value);
      continue;
    }
    if (!SAFE_ATTRIBUTE.test(name)) throw new Error(`attribute ${name} is not allowed`);
    if (name === "href" && !/^#/.test(value)) throw new Error("links stay on the page");
    node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

// An element with attributes (on... are listeners) and children: nodes, texts, numbers, arrays of these; null is nothing.
export function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

export function add(node, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function replace(node, ...children) {
  node.replaceChildren();
  return add(node, children);
}

export function table(className, heads, rows, caption) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption || "table" },
    h("table", { class: className },
      caption ? h("caption", {}, caption) : null,
      h("thead", {}, h("tr", {}, heads.map((head) => (head === "" ? h("td", {}) : h("th", { scope: "col" }, head))))),
      h("tbody", {}, rows.map(([head, ...cells]) =>
        h("tr", {}, h("th", { scope: "row" }, head), cells.map((cell) =>
          cell instanceof Element && cell.tagName === "TD" ? cell : h("td", {}, cell)))))));
}

// Figures side by side, each with its title, and with a remark below where it has one.
export function cards(figures) {
  return h("div", { class: "cards" }, figures.map(({ title, value, below, id }) => h("div", { class: "card" },
    h("p", { class: "name" }, title), h("p", { class: "value", id }, value), below === undefined ? null : h("p", { class: "muted" }, below))));
}

// A number for people: four significant digits, no needless zeros.
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e6) return String(Number(value.toPrecision(4)));
  return value.toExponential(2);
}

export function signed(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "\u2212" : "") + Math.abs(value).toFixed(digits);
}

// A number with its noun.
export function counted(value, noun) {
  return `${value} ${noun}${value === 1 ? "" : "s"}`;
}

export function share(part, whole) {
  return whole ? `${(100 * part / whole).toFixed(1)} % (${part} of ${whole})` : "none to count";
}

export function mark(isRight) {
  if (isRight === null || isRight === undefined) return null;
  return h("span", { class: isRight ? "mark right" : "mark wrong" }, isRight ? "✓ right" : "✗ wrong");
}
