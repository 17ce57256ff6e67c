// The photos tab: choose photos, see the predictions, and look inside the model.

import { call, Problem } from "./api.js";
import { $, element, explain, percent } from "./dom.js";
import { Look } from "./look.js";

let model = null;        // the model card
let look = null;
let current = null;      // the photo that is shown
let job = new AbortController();

function say(text) { $("status").textContent = text; }

function complain(error) {
  if (error.name === "AbortError") return;
  const known = error instanceof Problem ? error : new Problem("ServerError", "");
  if (known !== error) console.warn(error);
  explain($("message"), known);
  say("");
}

function showBars(top, none) {
  $("bars").classList.remove("old");
  const answer = element("button", { type: "button", disabled: true }, element("span", { className: "name", textContent: "None of these" }));
  $("bars").replaceChildren(...(none ? [element("li", {}, answer)] : []), ...top.map((guess) => {
    const fill = element("span", { className: "fill" });
    const track = element("span", { className: "track" }, fill);
    track.setAttribute("aria-hidden", "true");
    const row = element("button", { type: "button", title: `Show where the model sees ${guess.class}` },
      element("span", { className: "name", textContent: guess.class }),
      element("span", { className: "share", textContent: percent(guess.p) }), track);
    row.addEventListener("click", () => look?.explainClass(guess.index));
    requestAnimationFrame(() => requestAnimationFrame(() => { fill.style.width = `${Math.max(100 * guess.p, 0.4)}%`; }));
    return element("li", {}, row);
  }));
}

async function ask(file, thumb) {
  job.abort();
  job = new AbortController();
  const { signal } = job;
  current = file;
  for (const other of $("tray").querySelectorAll("button")) other.setAttribute("aria-current", String(other === thumb));
  $("message").hidden = true;
  $("photo").onerror = () => {      // the model may read formats that the browser does not
    $("photo").hidden = true;
    $("invitation").textContent = `Your browser cannot show ${file.name}`;
    $("invite").hidden = false;
  };
  $("photo").alt = `Your photo: ${file.name}`;
  $("photo").src = thumb.dataset.source;
  $("photo").hidden = false;
  $("invite").hidden = true;
  $("drop").classList.add("full", "busy");
  $("bars").classList.add("old");
  say("Looking…");
  const start = performance.now();
  try {
    const wait = (seconds) => say(`The server is busy; trying again in ${seconds} s…`);
    if (model.classes.length) {
      const found = (await (await call("v1/predict?top=5", { file, signal, onWait: wait })).json()).results[0];
      showBars(found.top, found.none_of_these);
      const [first] = found.top;
      const answer = found.none_of_these ? `None of these (nearest: ${first.class})` : `${first.class}, ${percent(first.p)}`;
      say(`${answer}. Took ${((performance.now() - start) / 1000).toFixed(2)} s.`);
      if (Object.keys(model.explanations).length) {      // an exported file can only predict
        $("inside").hidden = false;
        await look.show(file, found.top, signal);
      }
    } else {
      $("bars").replaceChildren();
      say("This model predicts no classes, but you can look inside it.");
      $("inside").hidden = false;
      await look.show(file, [], signal);
    }
    $("more").hidden = Object.keys(model.pictures).length === 0;
  } catch (error) {
    if (error.name !== "AbortError") {
      if (error.kind === "BadImage") forget(thumb);
      $("bars").replaceChildren();
      for (const id of ["inside", "more"]) $(id).hidden = true;
    }
    complain(error);
  } finally {
    if (!signal.aborted) $("drop").classList.remove("busy");
  }
}

function forget(thumb) {
  thumb.parentElement.remove();
  $("photo").hidden = true;
  $("invitation").textContent = "Drop, paste or choose a photo";
  $("invite").hidden = false;
  $("drop").classList.remove("full");
}

function addToTray(source, label, load, front = false) {
  const image = element("img", { src: source, alt: label });
  const thumb = element("button", { type: "button", title: label }, image);
  image.addEventListener("error", () => image.replaceWith(element("span", { className: "name", textContent: label })));
  thumb.dataset.source = source;
  thumb.setAttribute("aria-current", "false");
  thumb.addEventListener("click", async () => {
    try {
      await ask(await load(), thumb);
    } catch (error) {
      complain(error);
    }
  });
  const item = element("li", {}, thumb);
  if (front) $("tray").prepend(item);
  else $("tray").append(item);
  return thumb;
}

function take(files) {
  const given = [...files].slice(0, 12);
  if (!given.length || !model) return;
  if (given.every((file) => file.type && !file.type.startsWith("image/"))) {
    complain(new Problem("BadImage", `${given[0].name} is not an image.`));
    return;
  }
  const thumbs = given.reverse().map((file) => addToTray(URL.createObjectURL(file), file.name, async () => file, true));
  ask(given.at(-1), thumbs.at(-1));
}

async function showPicture(name, title, chip) {
  for (const other of $("pictures").children) other.setAttribute("aria-pressed", String(other === chip));
  const [image] = $("picture").getElementsByTagName("img");
  const [caption] = $("picture").getElementsByTagName("figcaption");
  caption.textContent = "Drawing…";
  $("picture").hidden = false;
  try {
    const blob = await (await call(`v1/picture?name=${encodeURIComponent(name)}`, { file: current })).blob();
    URL.revokeObjectURL(image.src);
    image.src = URL.createObjectURL(blob);
    image.alt = title;
    caption.textContent = title;
  } catch (error) {
    caption.textContent = error.detail ?? "That did not work.";
  }
}

function showCard() {
  const spec = model.input_spec;
  const name = [model.variant ?? "ViT", `${(model.parameters / 1e6).toFixed(1)}M parameters`].join(" · ");
  $("count").textContent = `${model.grid[0]} × ${model.grid[1]} = ${model.grid[0] * model.grid[1]}`;
  const facts = {
    Weights: model.source, sha256: model.sha256, Model: `${name}, ${model.layers} layers, width ${model.width}`,
    Classes: `${model.classes.length}: ${model.classes.slice(0, 6).join(", ")}${model.classes.length > 6 ? ", …" : ""}`,
    Input: `${spec.size.join(" × ")} pixels in patches of ${model.patch_size} × ${model.patch_size}; resize ${spec.resize}, ${spec.interpolation}`,
    "Runs on": `${model.device}, ${model.dtype}, engine ${model.engine}, vitkit ${model.vitkit}`,
    Limits: `${model.limits.files} images and ${model.limits.megabytes} MB per request, ${model.limits.megapixels} megapixels per image`,
  };
  $("facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value).flatMap(([term, value]) =>
    [element("dt", { textContent: term }), element("dd", { textContent: value })]));
  $("curl").textContent = `curl -F files=@photo.jpg ${new URL("v1/predict", location.href).href}`;
  $("pictures").replaceChildren(...Object.entries(model.pictures).map(([key, { title }]) => {
    const chip = element("button", { type: "button", textContent: title.replace(/ \(.*\)$/, "") });
    chip.setAttribute("aria-pressed", "false");
    chip.addEventListener("click", () => showPicture(key, title, chip));
    return chip;
  }));
  for (const [path, label] of Object.entries(model.samples)) {
    const place = path.slice(1);
    addToTray(place, `Sample: ${label}`, async () => {
      const blob = await (await call(place)).blob();
      return new File([blob], path.split("/").at(-1), { type: blob.type });
    });
  }
}

export function start(panel, context) {
  model = context.model;
  look = new Look(model, complain);
  showCard();
  $("pick").addEventListener("click", () => $("file").click());
  $("drop").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", (event) => {
    take(event.target.files);
    event.target.value = "";
  });
  $("take").addEventListener("click", context.takePhoto);
  return { take };
}
