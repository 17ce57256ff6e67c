// The page: one state, one photo, one result; every change goes through `set` and is drawn by `update`.

import { element } from "./charts.js";
import { draw, EQUATIONS, percent } from "./equations.js";
import { download, inflate } from "./files.js";
import { decode, setUpPhotos } from "./photo.js";
import { normalise, pixels } from "./resize.js";
import { best, Live, Stored } from "./result.js";
import { Runner } from "./runner.js";
import { Stage } from "./stage.js";
import { fromHash, toHash, VIEWS } from "./state.js";
import { fill, TOUR } from "./tour.js";
import { VIEW } from "./views.js";

const $ = (id) => document.getElementById(id);

class Explorer {
  constructor(card) {
    this.card = card;
    this.model = card.model;
    this.pointed = null;             // the patch under mouse or keyboard
    this.photo = null;               // {seen: 8-bit pixels, planes: normalised}
    this.result = null;              // of what is shown now
    this.whole = null;               // of the photo without anything erased
    this.stage = new Stage($("canvas"), this.model, {
      point: (patch) => this.point(patch),
      pick: (patch) => this.set({ held: this.state.held === patch ? null : patch }),
      paint: (patch, erase) => this.paint(patch, erase),
      done: () => this.remember(),
    });
    this.state = fromHash(location.hash, this.model, TOUR.length, card.examples.length);
    if (!location.hash) this.state.tour = 0;
    this.build();
    this.listen();
    this.runner = new Runner(card, {
      progress: (share) => this.status(`Loading the model: ${Math.round(100 * share)}%`, share),
      ready: (threads) => {
        this.threads = threads;
        this.status("Ready");
        this.run();
      },
      failed: (message) => this.complain(`The model cannot run here: ${message}`),
    });
    this.showExample(Math.max(0, this.state.photo));
  }

  // --- what never changes ---

  build() {
    const { model, card } = this;
    $("tabs").append(...VIEWS.map((name, i) => element("button", {
      type: "button", "data-view": name, title: `Key ${i + 1}`, onclick: () => this.set({ view: name, tour: -1 }),
    }, VIEW[name].tab)));
    $("examples").append(...card.examples.map(({ title, picture }, i) => {
      const image = element("img", { alt: title, width: 64, height: 64 });
      download(picture).then((bytes) => { image.src = URL.createObjectURL(new Blob([bytes])); }, () => {});
      return element("li", {}, element("button", { type: "button", title, onclick: () => this.choose(i) }, image));
    }));
    $("canvas").parentElement.style.aspectRatio = `${model.size[1]} / ${model.size[0]}`;       // before the photo is there
    $("layer").max = model.layers;
    $("head").max = model.heads;
    $("facts").textContent = `${model.name}: ${(model.parameters / 1e6).toFixed(1)} million parameters, ${model.layers} layers, ${model.heads} heads, ${card.classes.length} classes.`;
    $("note").textContent = card.note;
    if (card.home) $("home").hidden = false;
    $("credits").textContent = card.examples.map(({ credit }) => credit).filter(Boolean).join(" ");
  }

  listen() {
    setUpPhotos((file) => this.take(file));
    for (const [id, from] of [["layer", 1], ["head", 1]]) {
      $(id).addEventListener("input", () => this.set({ [id]: Number($(id).value) - from }));
    }
    for (const radio of document.querySelectorAll("input[name=how]")) {
      radio.addEventListener("change", () => this.set({ how: radio.value }));
    }
    $("restore").addEventListener("click", () => this.set({ erased: [] }));
    $("salient").addEventListener("click", () => this.set({ erased: this.salient() }));
    $("release").addEventListener("click", () => this.set({ held: null }));
    $("next").addEventListener("click", () => this.step(this.state.tour + 1));
    $("back").addEventListener("click", () => this.step(this.state.tour - 1));
    $("leave").addEventListener("click", () => this.set({ tour: -1 }));
    $("guide").addEventListener("click", () => this.step(0));
    $("share").addEventListener("click", () => this.share());
    addEventListener("keydown", (event) => this.key(event));
    addEventListener("hashchange", () => {
      if (location.hash.slice(1) === toHash(this.state, this.model)) return;
      const before = this.state.photo;
      this.state = fromHash(location.hash, this.model, TOUR.length, this.card.examples.length);
      if (this.state.photo !== before) this.showExample(this.state.photo);
      else this.changed(true);
    });
  }

  // --- photos ---

  // The picture first, then what was computed when the page was built; the live model replaces it.
  async showExample(index) {
    const { picture, data } = this.card.examples[index], turn = (this.turn = (this.turn ?? 0) + 1);
    this.state.photo = index;
    const stored = download(data).then(inflate);
    const image = await decode(new Blob([await download(picture)]));
    if (turn !== this.turn) return;
    const depth = this.model.channels, small = new Uint8Array(image.width * image.height * depth);
    for (let i = 0; i < image.width * image.height; i += 1) {
      for (let c = 0; c < depth; c += 1) small[i * depth + c] = image.data[4 * i + c];
    }
    await this.see({ data: small, width: image.width, height: image.height, depth });
    const bytes = await stored;
    if (turn !== this.turn || this.whole) return;
    this.whole = new Stored(this.card, bytes);
    if (!this.state.erased.length) this.result = this.whole;
    document.documentElement.dataset.stored = performance.now().toFixed(0);
    this.update();
  }

  choose(index) {
    this.set({ photo: index, erased: [], held: null }, false);
    this.showExample(index);
  }

  async take(file) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.complain("");
    try {
      const image = await decode(file);
      if (turn !== this.turn) return;
      Object.assign(this.state, { photo: -1, erased: [], held: null });
      if (this.state.tour === TOUR.length - 1 || this.state.view === "photo") this.state.tour = -1;
      await this.see(pixels(image, this.model.input));
    } catch (error) {
      this.complain(error.message);
    }
  }

  async see(seen) {
    this.photo = { seen, planes: normalise(seen, this.model.input) };
    const { data, width, height, depth } = seen, shown = new ImageData(width, height);
    for (let i = 0; i < width * height; i += 1) {
      for (let c = 0; c < 3; c += 1) shown.data[4 * i + c] = data[i * depth + Math.min(c, depth - 1)];
      shown.data[4 * i + 3] = 255;
    }
    this.stage.image = await createImageBitmap(shown);
    this.result = this.whole = null;
    this.changed(true);
    document.documentElement.dataset.picture ??= performance.now().toFixed(0);        // ms since the page was asked for
  }

  // --- the model ---

  // Run the model for the photo as it is, erased patches included; the first run of a photo is without them.
  async run() {
    if (!this.runner?.ready || !this.photo) return;
    const { photo, model } = this, shape = [1, model.channels, ...model.size], key = this.wanted();
    if (!this.whole?.live && this.state.erased.length) {
      const found = await this.runner.run(photo.planes, shape, new Float32Array(model.patches).fill(1));
      if (photo !== this.photo) return;
      if (found) this.whole = new Live(this.card, found);
    }
    if (key !== this.wanted()) return;
    const { planes, keep } = this.input();
    const found = await this.runner.run(planes, shape, keep);
    if (!found || photo !== this.photo) return;
    this.result = new Live(this.card, found);
    this.result.key = key;
    if (!this.state.erased.length && key === this.wanted()) this.whole = this.result;
    this.status(`Live in your browser: ${found.milliseconds.toFixed(0)} ms per photo, ${this.threads === 1 ? "one thread" : `${this.threads} threads`}`);
    document.documentElement.dataset.result = key;
    this.update();
  }

  wanted() { return `${this.turn}:${this.state.how}:${this.state.erased.join(",")}`; }

  input() {
    const { model, photo, state } = this, keep = new Float32Array(model.patches).fill(1), planes = photo.planes.slice();
    const [H, W] = model.size, P = model.patch;
    for (const patch of state.erased) {
      if (state.how === "mask") {
        keep[patch] = 0;
        continue;
      }
      const top = Math.floor(patch / model.columns) * P, left = patch % model.columns * P;
      for (let c = 0; c < model.channels; c += 1) {
        for (let y = 0; y < P; y += 1) planes.fill(0, (c * H + top + y) * W + left, (c * H + top + y) * W + left + P);
      }
    }
    return { planes, keep };
  }

  // The patches that what the head reads looks at most, over the last third of the layers.
  salient() {
    const { model } = this, result = this.whole ?? this.result, sum = new Float32Array(model.patches);
    if (!result) return [];
    for (let l = Math.floor(2 * model.layers / 3); l < model.layers; l += 1) {
      result.attention(l, -1, -1).subarray(result.prefix).forEach((v, i) => { sum[i] += v; });
    }
    return best([...sum], Math.ceil(model.patches / 8)).sort((a, b) => a - b);
  }

  // The number of the projection that differs most between the patches of this photo.
  lively() {
    const { result, model } = this;
    if (!result?.live) return this.state.dimension;
    const sum = new Float64Array(model.width), squares = new Float64Array(model.width);
    for (let i = 0; i < model.patches; i += 1) {
      result.embedded(i).forEach((v, d) => {
        sum[d] += v / model.patches;
        squares[d] += v * v / model.patches;
      });
    }
    return best([...squares.map((v, d) => v - sum[d] ** 2)], 1)[0];
  }

  // --- changes ---

  set(changes, draw_ = true) {
    const erased = this.wanted();
    Object.assign(this.state, changes);
    if (draw_) this.changed(erased !== this.wanted());
  }

  changed(run) {
    this.remember();
    this.update();
    if (run) this.run();
  }

  remember() {
    history.replaceState(null, "", `#${toHash(this.state, this.model)}`);
  }

  paint(patch, erase) {
    const erased = new Set(this.state.erased);
    if (erased.has(patch) === erase) return;
    if (erase) erased.add(patch);
    else erased.delete(patch);
    this.state.erased = [...erased].sort((a, b) => a - b);
    this.update();
    this.run();
  }

  point(patch) {
    if (patch === this.pointed) return;
    this.pointed = patch;
    this.update();
  }

  step(index) {
    if (index >= TOUR.length) {
      this.set({ tour: -1 });
      return;
    }
    const { model } = this, middle = Math.floor(model.rows / 2) * model.columns + Math.floor(model.columns / 2);
    this.pointed = null;
    this.set({ tour: index, ...TOUR[index].set({ middle, layers: model.layers, salient: this.salient(), lively: this.lively() }) });
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("dialog")) return;
    const { model, state } = this, typing = event.target.matches("input");
    const wrap = (v, most) => (v + most) % most;
    const onCanvas = event.target === $("canvas");
    const from = this.pointed ?? state.held ?? Math.floor(model.rows / 2) * model.columns + Math.floor(model.columns / 2);
    const row = Math.floor(from / model.columns), column = from % model.columns;
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (onCanvas && moves[event.key]) {
      const [down, right] = this.pointed === null ? [0, 0] : moves[event.key];
      this.point(Math.min(model.rows - 1, Math.max(0, row + down)) * model.columns + Math.min(model.columns - 1, Math.max(0, column + right)));
    } else if (onCanvas && (event.key === "Enter" || event.key === " ") && this.pointed !== null) {
      if (state.view === "erase") this.toggle(this.pointed);
      else this.set({ held: state.held === this.pointed ? null : this.pointed });
    } else if (["e", "Delete", "Backspace"].includes(event.key) && onCanvas && this.pointed !== null) {
      this.toggle(this.pointed);
    } else if (event.key === "Escape") {
      this.pointed = null;
      this.set({ held: null });
    } else if (!typing && VIEWS[Number(event.key) - 1]) {
      this.set({ view: VIEWS[Number(event.key) - 1], tour: -1 });
    } else if (!typing && (event.key === "[" || event.key === "]")) {
      this.set({ layer: Math.min(model.layers - 1, Math.max(0, state.layer + (event.key === "]" ? 1 : -1))) });
    } else if (!typing && event.key === "h") {
      this.set({ head: wrap(state.head + 2, model.heads + 1) - 1 });
    } else if (!typing && event.key === "n") {
      this.step(state.tour + 1);
    } else {
      return;
    }
    event.preventDefault();
  }

  toggle(patch) {
    this.paint(patch, !this.state.erased.includes(patch));
    this.remember();
  }

  async share() {
    const own = this.state.photo < 0 ? " Your photo is not part of it." : "";
    try {
      await navigator.clipboard.writeText(location.href);
      $("shared").textContent = `The link to this view is copied.${own}`;
    } catch {
      $("shared").textContent = `The address of this page is the link to this view.${own}`;
    }
  }

  // --- drawing ---

  // Everything that views and equations read.
  context() {
    const { state, model, result, card } = this, { prefix } = model;
    const patch = this.pointed ?? state.held ?? Math.floor(model.rows / 2) * model.columns + Math.floor(model.columns / 2);
    const reader = state.held === null && this.pointed === null;
    const token = state.held !== null ? prefix + state.held : this.pointed !== null ? prefix + this.pointed : -1;
    const place = (i) => `the patch in row ${Math.floor(i / model.columns) + 1}, column ${i % model.columns + 1}`;
    const label = (t) => (t < prefix ? "the class token" : place(t - prefix));
    return {
      ...state, model, result, patch, token, label, place, pointed: this.pointed ?? state.held, names: card.classes,
      who: reader ? (model.pool === "cls" ? "the class token, from which the answer is read," : "all patches together") : label(token),
      chosen: this.whole ? best(this.whole.probabilities, 1)[0] : 0,
      set: (changes) => this.set(changes),
    };
  }

  update() {
    if (!this.photo) return;
    const { state, model, result } = this, view = VIEW[state.view], at = this.context();
    const usable = result && (result.live || !view.live);
    const scene = usable ? view.scene(at) : VIEW[state.view === "patches" ? "patches" : "photo"].scene(at);
    this.stage.show({
      tool: "look", ...scene, erased: new Set(state.erased), held: state.view === "erase" ? null : state.held, cursor: this.pointed,
      how: state.how, grey: model.grey,
    });
    for (const button of document.querySelectorAll("#tabs button")) {
      const here = button.dataset.view === state.view;
      button.setAttribute("aria-current", here ? "true" : "false");
      if (here && button !== this.tab) {
        this.tab = button;
        $("tabs").scrollTo({ left: button.offsetLeft - 60, behavior: "auto" });
      }
    }
    for (const [i, button] of document.querySelectorAll("#examples button").entries()) button.setAttribute("aria-current", i === state.photo ? "true" : "false");
    for (const part of document.querySelectorAll("[data-for]")) part.hidden = !(view.controls ?? []).includes(part.dataset.for);
    this.updateControls();
    $("title").textContent = view.title;
    $("words").textContent = view.words(at);
    $("wait").hidden = Boolean(usable);
    $("charts").replaceChildren(...(usable && view.charts ? view.charts(at) : []));
    $("equations").replaceChildren(...this.equations(at));
    $("readout").textContent = this.readout(at);
    this.updateTour();
    this.updateAnswer();
  }

  updateControls() {
    const { state, model } = this;
    $("layer").value = state.layer + 1;
    $("head").value = state.head + 1;
    $("layer-out").textContent = `${state.layer + 1} of ${model.layers}`;
    $("head-out").textContent = state.head < 0 ? `mean of all ${model.heads}` : `${state.head + 1} of ${model.heads}`;
    for (const name of ["layer", "head"]) $(name).setAttribute("aria-valuetext", $(`${name}-out`).textContent);
    for (const radio of document.querySelectorAll("input[name=how]")) radio.checked = radio.value === state.how;
    $("restore").disabled = !state.erased.length;
    $("release").hidden = state.held === null;
  }

  updateTour() {
    const { tour } = this.state, step = TOUR[tour];
    $("tour").hidden = !step;
    $("free").hidden = Boolean(step);
    if (!step) return;
    $("tour-step").textContent = `${tour + 1} of ${TOUR.length}`;
    $("tour-title").textContent = fill(step.title, this.model);
    $("tour-words").textContent = fill(step.words, this.model);
    $("back").disabled = tour === 0;
    $("next").textContent = tour === TOUR.length - 1 ? "Explore freely" : "Next";
  }

  updateAnswer() {
    const { result, whole, card, state } = this, list = $("answer");
    if (!result) {
      list.replaceChildren();
      $("verdict").textContent = this.runner?.ready ? "Looking …" : "The answer appears when the model is loaded.";
      return;
    }
    const p = result.probabilities, before = whole && state.erased.length ? whole.probabilities : null, top = best(p, 5);
    $("verdict").textContent = `It answers: ${card.classes[top[0]]}, ${percent(p[top[0]])}`;
    list.replaceChildren(...top.map((k) => {
      const fill_ = element("span", { class: "fill" }), track = element("span", { class: "track" }, fill_);
      fill_.style.width = `${100 * p[k]}%`;
      if (before) {
        const mark = element("span", { class: "before", title: `${percent(before[k])} before` });
        mark.style.left = `${100 * before[k]}%`;
        track.append(mark);
      }
      const share = before ? `${percent(before[k])} → ${percent(p[k])}` : percent(p[k]);
      return element("li", { "data-class": k }, element("span", { class: "name" }, card.classes[k]), element("span", { class: "share" }, share), track);
    }));
    if (before) {
      const [first] = best(before, 1);
      $("verdict").textContent += top[0] === first ? ` (before: ${percent(before[first])})` : `. Before, it answered: ${card.classes[first]}, ${percent(before[first])}`;
    }
  }

  equations(at) {
    const { result, state, model } = this;
    if (!result?.live && !["photo", "patches", "erase"].includes(state.view)) {
      return [element("p", { class: "quiet" }, "The numbers appear when the model is loaded.")];
    }
    const token = at.token < 0 ? (model.pool === "cls" ? 0 : model.prefix + at.patch) : at.token;
    let seen = token;
    if (state.view === "attention") {
      const row = result.row(state.layer, Math.max(state.head, 0), token);
      seen = state.held !== null && this.pointed !== null ? model.prefix + this.pointed : row.reduce((most, v, i) => (v > row[most] ? i : most), 0);
    }
    return draw(EQUATIONS[state.view](result ?? { T: model.tokens, prefix: model.prefix }, {
      ...at, token, seen, erased: state.erased.length, numbers: this.patchPixels(at.patch),
    }));
  }

  patchPixels(patch) {
    const { model, photo } = this, [H, W] = model.size, P = model.patch;
    const top = Math.floor(patch / model.columns) * P, left = patch % model.columns * P;
    return Array.from({ length: model.channels }, (_, c) => photo.planes[(c * H + top) * W + left]);
  }

  readout({ place, token, layer, head }) {
    const { state, result, model } = this, spot = this.pointed ?? state.held;
    if (state.view === "erase") return `${state.erased.length} of ${model.patches} patches are erased.${spot === null ? "" : ` You are at ${place(spot)}.`}`;
    if (state.view === "attention" && result) {
      const row = result.attention(layer, head, token), patches = row.subarray(result.prefix);
      const most = patches.reduce((top, v, i) => (v > patches[top] ? i : top), 0);
      const self = result.prefix ? ` ${percent(row[0])} goes to the class token.` : "";
      const between = state.held !== null && this.pointed !== null && this.pointed !== state.held ? ` ${percent(patches[this.pointed])} goes to ${place(this.pointed)}.` : "";
      return `It looks most at ${place(most)}: ${percent(patches[most])}.${self}${between}`;
    }
    if (state.view === "stream" && result && spot !== null) return `${place(spot).replace(/^t/, "T")}: length ${result.norm(layer + 1, result.prefix + spot).toFixed(1)} after layer ${layer + 1}.`;
    return spot === null ? matchMedia("(hover: none)").matches ? "Tap a patch to look closer." : "Point at a patch, or move with the arrow keys." : `Patch ${spot + 1}: ${place(spot).slice(4)}.`;
  }

  status(text, share = 1) {
    $("status").textContent = text;
    $("loading").style.transform = `scaleX(${share})`;
    $("loading").classList.toggle("done", share >= 1);
  }

  complain(text) {
    $("message").textContent = text;
    $("message").hidden = !text;
    if (text) document.documentElement.dataset.failed = text;
  }
}

// The server exports the model when somebody opens this page for the first time.
function prepare(words) {
  $("status").textContent = words;
  $("verdict").textContent = "The server is preparing this page. This takes up to a minute, and happens only once.";
}

try {
  const card = JSON.parse(new TextDecoder().decode(await download("model/card.json", undefined, prepare)));
  const explorer = new Explorer(card);
  window.vitkit = explorer;                    // for the console: vitkit.result.attention(layer, head, token)
  document.documentElement.dataset.ready = "";
} catch (error) {
  const message = $("message");
  message.textContent = `This page could not start: ${error.message}`;
  message.hidden = false;
}
