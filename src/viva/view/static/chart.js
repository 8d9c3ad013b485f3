// One chart as SVG: lines, bands, ticks, and a cursor that reads values off with mouse or arrow keys.

import { h, number, replace, svg } from "./dom.js";

const WIDE = { left: 52, right: 10, top: 8, bottom: 22 };

// Exponential smoothing without the bias of its start: each value is a weighted mean of those up to it.
function smooth(values, factor) {
  if (!factor) return values;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    sum = factor * sum + value;
    weight = factor * weight + 1;
    return sum / weight;
  });
}

function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most - 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw * (1 - 1e-9));
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index <= Math.floor(high / step + 1e-9); index += 1) found.push(index * step);
  return found;
}

function range(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  return [low - 0.04 * (high - low), high + 0.04 * (high - low)];
}

function scales(lines, size) {
  const [x0, x1] = range(lines.flatMap((line) => [line.steps[0], line.steps.at(-1)]));
  const [y0, y1] = range(lines.flatMap((line) => line.shown.concat(line.values,
    line.band ? line.values.flatMap((value, index) => [value - line.band[index], value + line.band[index]]) : [])));
  const { left, right, top, bottom } = WIDE;
  return {
    x: (value) => left + (value - x0) / (x1 - x0) * (size[0] - left - right),
    y: (value) => size[1] - bottom - (value - y0) / (y1 - y0) * (size[1] - top - bottom),
    step: (pixel) => x0 + (pixel - left) / (size[0] - left - right) * (x1 - x0),
    xs: ticks(x0, x1, 7).filter(Number.isInteger),
    ys: ticks(y0, y1, 5),
  };
}

const at = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;

function path(line, values, scale) {
  return values.map((value, index) => `${index ? "L" : "M"}${at(scale.x(line.steps[index]), scale.y(value))}`).join("");
}

// The interval of what was measured, also where a smoothed line is drawn.
function band(line, scale) {
  const upper = line.values.map((value, index) => at(scale.x(line.steps[index]), scale.y(value + line.band[index])));
  const lower = line.values.map((value, index) => at(scale.x(line.steps[index]), scale.y(value - line.band[index])));
  return `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
}

function nearest(steps, wanted) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low && wanted - steps[low - 1] < steps[low] - wanted ? low - 1 : low;
}

// lines: [{name, run, colour, steps, values, band}]; returns an element with the chart and its values.
export function chart(title, lines, { size = [420, 190], smoothing = 0 } = {}) {
  const drawn = lines.filter((line) => line.steps.length).map((line) => ({ ...line, shown: smooth(line.values, smoothing) }));
  const values = h("div", { class: "values", "aria-live": "polite" });
  if (!drawn.length) return h("div", { class: "plot" }, h("p", { class: "muted" }, "no points yet"));
  const scale = scales(drawn, size);
  const cursor = svg("line", { class: "cursor", y1: WIDE.top, y2: size[1] - WIDE.bottom, x1: -9, x2: -9 });
  const node = svg("svg", { viewBox: `0 0 ${size[0]} ${size[1]}`, role: "img", "aria-label": title, tabindex: "0" },
    scale.ys.map((y) => [svg("line", { class: "grid", x1: WIDE.left, x2: size[0] - WIDE.right, y1: scale.y(y), y2: scale.y(y) }),
      svg("text", { class: "tick", x: WIDE.left - 5, y: scale.y(y) + 4, "text-anchor": "end" }, number(Number(y.toPrecision(12))))]),
    scale.xs.map((x) => svg("text", { class: "tick", x: scale.x(x), y: size[1] - 6, "text-anchor": "middle" }, number(x))),
    drawn.filter((line) => line.band).map((line) => svg("path", { class: `band c${line.colour} run${line.run}`, d: band(line, scale) })),
    smoothing ? drawn.map((line) => svg("path", { class: `raw c${line.colour} run${line.run}`, d: path(line, line.values, scale) })) : null,
    drawn.map((line) => line.steps.length > 1
      ? svg("path", { class: `line c${line.colour} run${line.run}`, d: path(line, line.shown, scale) })
      : svg("circle", { class: `dot c${line.colour}`, r: 3, cx: scale.x(line.steps[0]), cy: scale.y(line.shown[0]) })),
    cursor);

  const steps = [...new Set(drawn.flatMap((line) => line.steps))].sort((a, b) => a - b);
  let place = -1;

  function show(index) {
    place = index;
    const step = index < 0 ? steps.at(-1) : steps[index];
    const x = index < 0 ? -9 : scale.x(step);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    replace(values, h("span", { class: "step" }, `step ${step}`), drawn.map((line) => {
      const own = line.steps[nearest(line.steps, step)] === step ? nearest(line.steps, step) : -1;
      const width = own >= 0 && line.band && line.band[own] ? ` ± ${number(line.band[own])}` : "";
      const beside = own >= 0 && smoothing ? ` (${number(line.values[own])}${width})` : width;
      return h("span", { class: `legend c${line.colour} run${line.run}` }, h("i", {}),
        `${line.name} `, h("b", {}, own >= 0 ? number(line.shown[own]) : "–"), beside);
    }));
  }

  node.addEventListener("pointermove", (event) => {
    const box = node.getBoundingClientRect();
    show(nearest(steps, scale.step((event.clientX - box.left) / box.width * size[0])));
  });
  node.addEventListener("pointerleave", () => show(-1));
  node.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
    if (!move) return;
    event.preventDefault();
    show(Math.min(steps.length - 1, Math.max(0, (place < 0 ? steps.length - 1 : place) + move)));
  });
  show(-1);
  return h("div", { class: "plot" }, node, values);
}
