// Small pictures next to the photo: a vector as a strip, all heads as thumbnails, lines over the layers.

import { css, heat, signed } from "./colours.js";

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "circle", "line", "text", "title"].includes(name);
  const made = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const largest = (values) => values.reduce((most, v) => Math.max(most, Math.abs(v)), 0) || 1;

// Numbers as coloured cells; `pick` receives the place of a click.
export function strip(values, chosen, label, pick) {
  const columns = Math.min(values.length, 64), rows = Math.ceil(values.length / columns), most = largest(values);
  const canvas = element("canvas", { class: pick ? "strip pickable" : "strip", role: "img", "aria-label": label });
  const side = 8;
  [canvas.width, canvas.height] = [columns * side, rows * side];
  const pen = canvas.getContext("2d");
  values.forEach((v, i) => {
    pen.fillStyle = css(signed(v / most));
    pen.fillRect(i % columns * side, Math.floor(i / columns) * side, side - 1, side - 1);
  });
  if (chosen !== null) {
    pen.strokeStyle = "#5df2ff";
    pen.lineWidth = 2;
    pen.strokeRect(chosen % columns * side, Math.floor(chosen / columns) * side, side - 1, side - 1);
  }
  if (pick) {
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / box.width * columns);
      const place = Math.floor((event.clientY - box.top) / box.height * rows) * columns + column;
      if (place >= 0 && place < values.length) pick(place);
    });
  }
  return canvas;
}

// Attention of one token in every layer and head, one thumbnail each: layers from left to right.
export function thumbnails(result, token, grid, { layer, head }, seen, pick) {
  const { L, h, prefix } = result, gap = 2, w = grid.columns + gap, t = grid.rows + gap;
  const canvas = element("canvas", { class: "heads pickable", role: "img", "aria-label": "Attention in every layer and head" });
  [canvas.width, canvas.height] = [L * w + gap, h * t + gap];
  const pen = canvas.getContext("2d");
  for (let l = 0; l < L; l += 1) {
    for (let k = 0; k < h; k += 1) {
      const values = result.attention(l, k, token).subarray(prefix), most = largest(values), tile = pen.createImageData(grid.columns, grid.rows);
      values.forEach((v, i) => tile.data.set([...heat(seen(v / most)), 255], 4 * i));
      pen.putImageData(tile, gap + l * w, gap + k * t);
    }
  }
  pen.strokeStyle = "#5df2ff";
  pen.lineWidth = gap;
  pen.strokeRect(layer * w + 1, (head < 0 ? 0 : head) * t + 1, w, (head < 0 ? h : 1) * t);
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    pick(Math.min(L - 1, Math.floor((event.clientX - box.left) / box.width * L)), Math.min(h - 1, Math.floor((event.clientY - box.top) / box.height * h)));
  });
  return canvas;
}

// Lines over z_0 .. z_L: [{name, values, colour}]; the chosen one is marked.
export function lines(series, chosen, label) {
  const W = 420, H = 170, left = 40, right = 10, top = 10, bottom = 26, L = series[0].values.length - 1;
  const most = Math.max(...series.flatMap(({ values }) => [...values])) * 1.05 || 1;
  const x = (l) => left + l / (L || 1) * (W - left - right), y = (v) => H - bottom - v / most * (H - top - bottom);
  const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, class: "lines", role: "img", "aria-label": label });
  for (const share of [0, 0.5, 1]) {
    const v = share * most / 1.05;
    svg.append(element("line", { x1: left, x2: W - right, y1: y(v), y2: y(v), class: "rule" }),
      element("text", { x: left - 6, y: y(v) + 4, class: "tick end" }, v >= 10 ? v.toFixed(0) : v.toFixed(1)));
  }
  for (let l = 0; l <= L; l += Math.max(1, Math.round(L / 6))) {
    svg.append(element("text", { x: x(l), y: H - 8, class: "tick middle" }, `z${l}`));
  }
  svg.append(element("line", { x1: x(chosen), x2: x(chosen), y1: top, y2: H - bottom, class: "here" }));
  for (const { name, values, kind } of series) {
    const path = Array.from(values, (v, l) => `${l ? "L" : "M"}${x(l).toFixed(1)} ${y(v).toFixed(1)}`).join("");
    svg.append(element("path", { d: path, class: `line ${kind}` }, element("title", {}, name)),
      element("circle", { cx: x(chosen), cy: y(values[chosen]), r: 4, class: `dot ${kind}` }));
  }
  const legend = element("p", { class: "legend" },
    ...series.map(({ name, kind }) => element("span", { class: kind }, name)));
  return [svg, legend];
}
