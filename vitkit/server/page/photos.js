// The photos tab: choose photos, see an answer for each, and look inside the model.

import { call, Problem } from "./api.js";
import { hideAnswer, nameLabels, showAnswer, showClasses, showSimilar } from "./answer.js";
import { $, element, explain, percent } from "./dom.js";
import { Gallery } from "./gallery.js";
import { Look } from "./look.js";

const MOST = 60;         // photos at once
const GROUP = 8;         // photos per request, so that the first answers come soon
const BROKEN = '<svg viewBox="0 0 24 24" width="28" height="28" aria-hidden="true"><path d="M12 7v6m0 3.5v.5M4 20h16L12 4z" fill="none" stroke="currentColor" stroke-width="1.8" stroke-linecap="round" stroke-linejoin="round"/></svg>';

let model = null;        // the model card
let look = null;
let gallery = null;
let shown = null;        // the photo that is shown
let job = new AbortController();

const say = (text) => { $("status").textContent = text; };
const problem = (error) => (error instanceof Problem ? error : new Problem("ServerError", ""));

function complain(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Problem)) console.warn(error);
  explain($("message"), problem(error));
  say("");
}

// A photo in a tray. `load` gives its file, and `answer` is a promise of a result or a Problem, once it was asked for.
function makePhoto(name, source, load, label = name) {
  const image = element("img", { src: source, alt: label }), caption = element("span", { className: "caption" });
  const picture = element("span", { className: "thumb" }, image), share = element("span", { className: "share" });
  const tile = element("button", { type: "button", className: "tile", title: label }, picture, caption, share);
  const photo = { name, source, load, label, tile, picture, caption, share, answer: null };
  image.addEventListener("error", () => image.replaceWith(element("span", { className: "name", textContent: name })));
  tile.setAttribute("aria-current", "false");
  tile.addEventListener("click", () => select(photo));
  return photo;
}

function setAnswer(photo, answer) {
  const bad = answer instanceof Problem;
  photo.tile.classList.toggle("bad", bad);
  if (bad) {
    photo.picture.innerHTML = BROKEN;      // no picture, or one that the browser shows and the server cannot read
    photo.caption.textContent = photo.name;
    photo.share.textContent = "no answer";
    photo.tile.title = `${photo.name}: ${answer.headline}`;
    return;
  }
  if (!answer.top) return;
  const [first] = answer.top;
  photo.caption.textContent = answer.none_of_these ? "none of these" : first.class;
  photo.share.textContent = answer.none_of_these ? "" : percent(first.p);
  if (answer.labels) {
    photo.caption.textContent = nameLabels(answer.labels) || "no label";
    photo.share.textContent = "";
  }
}

// Ask for the answers of photos: a few requests with several photos each. A bad photo has its own Problem.
function predict(photos) {
  const groups = [[]], room = model.limits.megabytes * 2 ** 20 * 0.9, most = Math.min(GROUP, model.limits.files);
  let size = 0;
  for (const photo of photos) {
    if (groups.at(-1).length && (groups.at(-1).length === most || size + (photo.size ?? 0) > room)) { groups.push([]); size = 0; }
    groups.at(-1).push(photo);
    size += photo.size ?? 0;
  }
  let before = Promise.resolve();
  for (const group of groups.filter((one) => one.length)) {
    const answers = before.then(() => ask(group));      // one request after the other
    before = answers;
    group.forEach((photo, i) => {
      photo.answer = answers.then((all) => all[i]);
      photo.answer.then((answer) => setAnswer(photo, answer));
    });
  }
}

async function ask(photos) {
  if (!model.classes.length) return photos.map(() => ({}));
  const start = performance.now();
  try {
    const files = await Promise.all(photos.map((photo) => photo.load()));
    const onWait = (seconds) => say(`The server is busy; trying again in ${seconds} s…`);
    const { results } = await (await call("v1/predict?top=5", { files, onWait })).json();
    const seconds = (performance.now() - start) / 1000;
    return results.map((result) => (result.error ? new Problem(result.kind, result.error) : { ...result, seconds }));
  } catch (error) {
    if (!(error instanceof Problem)) console.warn(error);
    return photos.map(() => problem(error));
  }
}

function showPhoto(photo) {
  $("photo").onerror = () => {      // the model may read formats that the browser does not
    $("photo").hidden = true;
    $("invitation").textContent = `Your browser cannot show ${photo.name}`;
    $("invite").hidden = false;
  };
  $("photo").alt = `Your photo: ${photo.name}`;
  $("photo").src = photo.source;
  $("photo").hidden = false;
  $("invite").hidden = true;
  $("drop").classList.add("full");
}

function showNoPhoto() {
  $("photo").hidden = true;
  $("photo").removeAttribute("src");
  $("invitation").textContent = "Drop, paste or choose photos";
  $("invite").hidden = false;
  $("drop").classList.remove("full");
  hideAnswer();
  for (const id of ["inside", "more"]) $(id).hidden = true;
}

async function select(photo) {
  job.abort();
  job = new AbortController();
  const { signal } = job;
  shown = photo;
  for (const tile of document.querySelectorAll(".tile")) tile.setAttribute("aria-current", String(tile === photo.tile));
  $("message").hidden = true;
  $("drop").classList.add("busy");
  $("bars").classList.add("old");
  if (!photo.tile.classList.contains("bad")) showPhoto(photo);
  say("Looking…");
  try {
    if (!photo.answer) predict([photo]);
    const answer = await photo.answer;
    if (signal.aborted) return;
    if (answer instanceof Problem) {
      if (answer.kind !== "BadImage" && answer.kind !== "TooLarge") photo.answer = null;      // it can be tried again
      showNoPhoto();
      throw answer;
    }
    say(showAnswer(answer, (index) => look?.explainClass(index)));
    $("inside").hidden = !look;
    $("more").hidden = Object.keys(model.pictures).length === 0;
    const file = await photo.load();
    await Promise.all([look?.show(file, answer.top ?? [], signal), model.similar ? showSimilar(file, signal, again) : null]);
    gallery.show(file, signal);
  } catch (error) {
    if (!signal.aborted) complain(error);
  } finally {
    if (!signal.aborted) $("drop").classList.remove("busy");
  }
}

// "More like this": a training photo becomes one of the user's photos.
function again(place, label, blob) {
  const name = `${label}, from the training photos`;
  const photo = makePhoto(name, URL.createObjectURL(blob), async () => new File([blob], `${label}.jpg`, { type: blob.type }));
  add([photo]);
  select(photo);
  $("title").scrollIntoView({ block: "nearest" });
}

function add(photos) {
  $("tray").prepend(...photos.map((photo) => element("li", {}, photo.tile)));
  $("own").hidden = $("tray").children.length === 0;
}

function take(files) {
  const given = [...files].slice(0, MOST);
  if (!given.length) return;
  const photos = given.map((file) => {
    const photo = makePhoto(file.name, URL.createObjectURL(file), async () => file);
    photo.size = file.size;
    const large = file.size > model.limits.megabytes * 2 ** 20;
    const refused = file.type && !file.type.startsWith("image/") ? new Problem("BadImage", `${file.name} is not an image.`)
      : large ? new Problem("TooLarge", `${file.name} is larger than ${model.limits.megabytes} MB.`) : null;
    if (refused) {      // without sending it
      photo.answer = Promise.resolve(refused);
      setAnswer(photo, refused);
    }
    return photo;
  });
  add(photos);
  predict(photos.filter((photo) => !photo.answer));
  select(photos[0]).then(() => {
    if (files.length > MOST) complain(new Problem("TooLarge", `These are the first ${MOST} of ${files.length} photos. Add the others afterwards.`));
  });
}

function clear() {
  const own = [...$("tray").querySelectorAll(".tile")];
  if (shown && own.includes(shown.tile)) {
    job.abort();
    $("message").hidden = true;
    $("drop").classList.remove("busy");
    say("");
    showNoPhoto();
  }
  $("tray").replaceChildren();
  $("own").hidden = true;
  $("pick").focus();
}

async function showSamples() {
  const photos = await Promise.all(Object.entries(model.samples).map(async ([path, label]) => {
    const place = path.slice(1), own = place.startsWith("v1/");
    try {
      const small = await (await call(own ? `${place}?thumbnail=true` : place)).blob();
      const load = async () => {
        photo.file ??= own ? await (await call(place)).blob() : small;
        return new File([photo.file], `${label}.${photo.file.type.split("/").at(-1)}`, { type: photo.file.type });
      };
      const photo = makePhoto(label, URL.createObjectURL(small), load, own ? `Sample: ${label}, held out of training` : `Sample: ${label}`);
      photo.caption.textContent = label;
      return photo;
    } catch (error) {      // a photo that is gone is no sample
      if (!(error instanceof Problem)) throw error;
      return null;
    }
  }));
  const there = photos.filter(Boolean);
  $("samples").replaceChildren(...there.map((photo) => element("li", {}, photo.tile)));
  $("samples-title").hidden = there.length === 0;
}

function showCard() {
  const spec = model.input_spec, name = [model.variant ?? "ViT", `${(model.parameters / 1e6).toFixed(1)}M parameters`].join(", ");
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
}

export async function start(panel, context) {
  model = context.model;
  look = Object.keys(model.explanations).length ? new Look(model, complain) : null;      // an exported file can only predict
  gallery = new Gallery(model.pictures);
  showCard();
  showClasses(model);
  $("pick").addEventListener("click", () => $("file").click());
  $("drop").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", (event) => {
    take(event.target.files);
    event.target.value = "";
  });
  $("take").addEventListener("click", context.takePhoto);
  $("clear").addEventListener("click", clear);
  await showSamples();
  return { take };
}
