// "Look inside": the photo as patches, and what each token looks at. One request gets a token's attention in all layers
// and heads, so that the sliders need no further requests.

import { call, numbers } from "./api.js";
import { $ } from "./dom.js";

const MODES = {
  patches: "This is all the model gets: a sequence of patches and the position of each.",
  attention: "The brighter a patch, the more attention it gets. Early layers often look nearby or everywhere, late layers at the subject.",
  rollout: "Attention accumulated over all layers: how much each patch contributes to the answer.",
  gradient: "Only the attention that supports one class.",
};
const calm = matchMedia("(prefers-reduced-motion: reduce)");

// Black, violet, orange, yellow: brighter means more, also for colour-blind eyes.
const RAMP = [[11, 7, 38], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]];
function colour(v) {
  const at = Math.min(Math.max(v, 0), 0.9999) * (RAMP.length - 1), i = Math.floor(at), f = at - i;
  return RAMP[i].map((c, k) => Math.round(c + f * (RAMP[i + 1][k] - c)));
}

export class Look {
  constructor(model, complain) {
    this.model = model;
    this.complain = complain;
    [this.rows, this.columns] = model.grid;
    this.L = model.layers;
    this.h = Math.max(...model.heads.map((heads) => Math.max(...heads))) + 1;
    this.query = null;           // the token whose attention is shown; null for the one that the classification head reads
    this.cursor = null;          // the patch under mouse or keyboard
    this.shown = new Float32Array(this.rows * this.columns).fill(1);
    this.canvas = $("canvas");
    this.layer = $("layer");
    this.head = $("head");
    this.layer.max = this.L - 1;
    this.layer.value = Math.floor(this.L / 2);
    this.head.max = this.h;
    this.across = this.h < this.L / 2;      // few heads: a wide sheet, with layers from left to right
    $("direction").textContent = this.across ? "layers from left to right" : "layers from top to bottom";
    $("class-mode").hidden = model.classes.length === 0;
    this.listen();
  }

  get mode() { return document.querySelector("input[name=mode]:checked").value; }

  listen() {
    for (const input of [this.layer, this.head]) input.addEventListener("input", () => this.update());
    $("gap").addEventListener("input", () => this.draw());
    $("bright").addEventListener("input", () => { this.draw(); this.drawHeads(); });
    for (const radio of document.querySelectorAll("input[name=mode]")) radio.addEventListener("change", () => this.update());
    $("target").addEventListener("change", () => this.update());
    $("reset").addEventListener("click", () => this.choose(null));
    this.canvas.addEventListener("click", (event) => this.choose(this.patchAt(event)));
    this.canvas.addEventListener("pointermove", (event) => this.hover(this.patchAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.hover(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    $("heads").addEventListener("click", (event) => this.pickHead(event));
    new ResizeObserver(() => { this.draw(); this.drawHeads(); }).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.draw(); this.drawHeads(); });
  }

  async show(file, top, signal) {
    this.file = file;
    this.signal = signal;
    this.cache = new Map();
    this.query = null;
    this.cursor = null;
    $("target").replaceChildren(...top.map((guess) => new Option(guess.class, guess.index)));
    const blob = await (await call("v1/explain?kind=input", { file, signal })).blob();
    this.image = await createImageBitmap(blob);
    await this.update();
  }

  explainClass(index) {
    $("target").value = String(index);
    document.querySelector("input[name=mode][value=gradient]").checked = true;
    $("inside").scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "start" });
    this.update();
  }

  // The values for a view: one request each, cached until the next photo.
  numbers(choices) {
    const key = JSON.stringify(choices), { cache } = this;
    if (!cache.has(key)) {
      const answer = numbers(this.file, choices, this.signal);
      answer.catch(() => cache.delete(key));
      cache.set(key, answer);
    }
    return cache.get(key);
  }

  async update() {
    if (!this.image) return;
    const { mode } = this;
    for (const part of document.querySelectorAll(".for")) part.hidden = !part.classList.contains(mode);
    $("explain-mode").textContent = MODES[mode];
    $("layer-out").textContent = `${Number(this.layer.value) + 1} of ${this.L}`;
    $("head-out").textContent = Number(this.head.value) ? `${this.head.value} of ${this.h}` : `mean of ${this.h}`;
    this.head.setAttribute("aria-valuetext", $("head-out").textContent);
    this.layer.setAttribute("aria-valuetext", $("layer-out").textContent);
    $("reset").hidden = this.query === null;
    $("who").textContent = this.query === null ? (this.model.pool === "cls" ? "the class token" : "all patches together")
      : this.place(this.query - this.model.prefix_tokens);
    const turn = this.turn = (this.turn ?? 0) + 1;
    try {
      if (mode === "patches") {
        this.row = null;
        this.animate(new Float32Array(this.rows * this.columns).fill(1));
      } else {
        const choices = { kind: mode };
        if (mode === "attention" && this.query !== null) choices.query = this.query;
        if (mode === "gradient" && $("target").value) choices.target = $("target").value;
        this.canvas.setAttribute("aria-busy", "true");
        const found = await this.numbers(choices);
        if (turn !== this.turn) return;
        this.full = mode === "attention" ? found : null;
        this.row = mode === "attention" ? this.select(found) : found.values;
        this.animate(this.normalised(this.row));
        this.drawHeads();
      }
      this.speak();
    } catch (error) {
      this.complain(error);
    } finally {
      if (turn === this.turn) this.canvas.removeAttribute("aria-busy");
    }
  }

  // One row of attention [T]: of a head, or the mean over the heads that were not pruned.
  select({ shape: [, h, T], values }, layer = Number(this.layer.value), head = Number(this.head.value)) {
    const at = (k) => values.subarray((layer * h + k) * T, (layer * h + k + 1) * T);
    if (head) return at(head - 1);
    const mean = new Float32Array(T), kept = this.model.heads[layer];
    for (const k of kept) at(k).forEach((v, t) => { mean[t] += v / kept.length; });
    return mean;
  }

  patches(row) { return row.subarray(this.model.prefix_tokens); }

  // Scale to 0..1: attention from zero, rollout (where every patch has some) from its minimum.
  normalised(row) {
    const values = this.patches(row);
    let most = 0, least = this.mode === "attention" ? 0 : Infinity;
    for (const v of values) {
      if (v > most) most = v;
      if (v < least) least = v;
    }
    return values.map((v) => (most > least && v === v ? (v - least) / (most - least) : 0));
  }

  // A few patches often get most of the attention; brightness makes the others visible without changing the values.
  seen(v) { return v ** (1.5 - 1.25 * Number($("bright").value) / 100); }

  place(patch) { return `the patch in row ${Math.floor(patch / this.columns) + 1}, column ${patch % this.columns + 1}`; }

  choose(patch) {
    const query = patch === null ? null : patch + this.model.prefix_tokens;
    this.query = query === this.query ? null : query;
    if (this.mode !== "attention" && patch !== null) {
      document.querySelector("input[name=mode][value=attention]").checked = true;
    }
    this.update();
  }

  hover(patch) {
    if (patch === this.cursor) return;
    this.cursor = patch;
    this.draw();
    this.speak();
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (moves[event.key]) {
      const from = this.cursor ?? Math.floor(this.rows / 2) * this.columns + Math.floor(this.columns / 2);
      const row = Math.min(this.rows - 1, Math.max(0, Math.floor(from / this.columns) + moves[event.key][0]));
      const column = Math.min(this.columns - 1, Math.max(0, from % this.columns + moves[event.key][1]));
      this.hover(row * this.columns + column);
    } else if ((event.key === "Enter" || event.key === " ") && this.cursor !== null) {
      this.choose(this.cursor);
    } else if (event.key === "Escape") {
      this.hover(null);
      this.choose(null);
    } else {
      return;
    }
    event.preventDefault();
  }

  speak() {
    const share = (v) => `${(100 * v).toFixed(1)}%`;
    const pieces = [];
    if (this.row && this.mode !== "patches") {
      const values = this.patches(this.row);
      if (values.some((v) => v !== v)) {
        pieces.push("This head was pruned.");
      } else {
        let best = 0;
        values.forEach((v, i) => { if (v > values[best]) best = i; });
        if (this.mode === "attention") {
          const rest = this.row.subarray(0, this.model.prefix_tokens).reduce((sum, v) => sum + v, 0);
          const others = ["", "the class token"][this.model.prefix_tokens] ?? "the class and register tokens";
          pieces.push(`Looks most at ${this.place(best)} (${share(values[best])})${others && `; ${share(rest)} goes to ${others}`}.`);
        } else {
          pieces.push(`The largest contribution comes from ${this.place(best)}.`);
        }
        if (this.cursor !== null) {
          const v = values[this.cursor];
          const said = this.mode === "gradient" ? `${(100 * v / (values[best] || 1)).toFixed(0)}% of the maximum` : share(v);
          pieces.push(`Under the pointer, ${this.place(this.cursor)}: ${said}.`);
        }
      }
    } else if (this.cursor !== null) {
      pieces.push(`Patch ${this.cursor + 1}: row ${Math.floor(this.cursor / this.columns) + 1}, column ${this.cursor % this.columns + 1}, `
        + `${this.model.patch_size} × ${this.model.patch_size} pixels.`);
    } else {
      pieces.push(`${this.rows * this.columns} patches of ${this.model.patch_size} × ${this.model.patch_size} pixels.`);
    }
    $("readout").textContent = pieces.join(" ");
  }

  animate(target) {
    const from = this.shown, start = performance.now(), time = calm.matches ? 0 : 180;
    cancelAnimationFrame(this.frame);
    const step = (now) => {
      const f = time ? Math.min(1, Math.max(0, (now - start) / time)) : 1;     // a frame's time may lie before `start`
      this.shown = target.map((v, i) => from[i] + f * (v - from[i]));
      this.draw();
      if (f < 1) this.frame = requestAnimationFrame(step);
    };
    step(start);
  }

  // The layout of the patches in CSS pixels; `gap` is the space between two of them.
  layout() {
    const width = this.canvas.parentElement.clientWidth, [H, W] = this.model.input_spec.size;
    const apart = this.mode === "patches" ? Number($("gap").value) / 100 : 0;
    const gap = apart * 0.6 * width / this.columns;
    const side = (width - gap * (this.columns - 1)) / this.columns;
    return { width, height: Math.round(width * H / W), gap, side, tall: (width * H / W - gap * (this.rows - 1)) / this.rows };
  }

  patchAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / box.width * this.columns);
    const row = Math.floor((event.clientY - box.top) / box.height * this.rows);
    return Math.min(this.rows - 1, Math.max(0, row)) * this.columns + Math.min(this.columns - 1, Math.max(0, column));
  }

  draw() {
    if (!this.image) return;
    const { width, height, gap, side, tall } = this.layout(), ratio = devicePixelRatio || 1;
    if (width < 10) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const heat = this.mode !== "patches";
    const w = this.image.width / this.columns, t = this.image.height / this.rows;
    if (heat) {
      pen.filter = "grayscale(0.75)";
      pen.drawImage(this.image, 0, 0, width, height);
      pen.filter = "none";
      pen.fillStyle = "#07071299";
      pen.fillRect(0, 0, width, height);
    }
    for (let row = 0; row < this.rows; row += 1) {
      for (let column = 0; column < this.columns; column += 1) {
        const i = row * this.columns + column, v = heat ? this.seen(this.shown[i]) : 1, x = column * (side + gap), y = row * (tall + gap);
        pen.globalAlpha = heat ? Math.sqrt(v) : 1;
        pen.drawImage(this.image, column * w, row * t, w, t, x, y, side, tall);
        if (heat) {
          pen.globalAlpha = 0.5 * v;
          pen.fillStyle = `rgb(${colour(0.35 + 0.6 * v).join(" ")})`;
          pen.fillRect(x, y, side, tall);
        }
      }
    }
    pen.globalAlpha = 1;
    const frame = (patch, style, thick) => {
      const x = patch % this.columns * (side + gap), y = Math.floor(patch / this.columns) * (tall + gap);
      pen.strokeStyle = "#000b";
      pen.lineWidth = thick + 2;
      pen.strokeRect(x, y, side, tall);
      pen.strokeStyle = style;
      pen.lineWidth = thick;
      pen.strokeRect(x, y, side, tall);
    };
    if (this.query !== null && this.mode === "attention") frame(this.query - this.model.prefix_tokens, "#5df2ff", 3);
    if (this.cursor !== null) frame(this.cursor, "#fff", 1.5);
  }

  // Thumbnails of all layers and heads: one pixel per patch, scaled up by the browser.
  drawHeads() {
    const sheet = $("heads");
    if (!this.full || this.mode !== "attention") return;
    const gap = 2, w = this.columns, t = this.rows, room = sheet.parentElement.clientWidth;
    const [down, wide] = this.across ? [this.h, this.L] : [this.L, this.h];
    const corner = (layer, head) => (this.across ? [layer * (w + gap), head * (t + gap)] : [head * (w + gap), layer * (t + gap)]);
    sheet.width = wide * (w + gap) + gap;
    sheet.height = down * (t + gap) + gap;
    const pen = sheet.getContext("2d"), styles = getComputedStyle(document.documentElement);
    for (let layer = 0; layer < this.L; layer += 1) {
      for (const head of this.model.heads[layer]) {
        const values = this.normalised(this.select(this.full, layer, head + 1)), tile = pen.createImageData(w, t);
        values.forEach((v, i) => tile.data.set([...colour(this.seen(v)), 255], 4 * i));
        const [x, y] = corner(layer, head);
        pen.putImageData(tile, gap + x, gap + y);
      }
    }
    pen.strokeStyle = styles.getPropertyValue("--accent");
    pen.lineWidth = gap;
    const chosen = Number(this.head.value), layer = Number(this.layer.value);
    const [x, y] = corner(layer, chosen ? chosen - 1 : 0), all = chosen ? 1 : this.h;
    pen.strokeRect(x + 1, y + 1, (this.across ? 1 : all) * (w + gap), (this.across ? all : 1) * (t + gap));
    const scale = Math.min(room / sheet.width, 380 / sheet.height, 3);
    sheet.style.width = `${sheet.width * scale}px`;
    sheet.style.height = `${sheet.height * scale}px`;
  }

  pickHead(event) {
    const box = $("heads").getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
    this.layer.value = Math.floor((this.across ? x : y) * this.L);
    this.head.value = Math.floor((this.across ? y : x) * this.h) + 1;
    this.update();
  }
}
