// The teach tab: classes, their photos, live answers, and what the left-out photos say. The server keeps the lesson; this
// page shows what it answers, and holds nothing but the lesson's key.

import { call, Problem } from "./api.js";
import { $, element, explain, percent } from "./dom.js";
import { Burst, canUseCamera, Watch } from "./teach-camera.js";
import { Uploads } from "./teach-uploads.js";

const STORED = "teach-lesson";      // in localStorage: the lesson's key
const SECONDS = 8;                  // that the last message stays
const FEW = 24;                     // photos of a class that are shown at first
let lesson = null;                  // what the server said last
let target = null;                  // the class that chosen files belong to
let dropped = null;                 // files and their class, read while the drop event lasts
let viewed = null;                  // the photo in the dialog
const whole = new Set();            // classes whose photos are all shown
const pictures = new Map();         // key -> promise of the address of a small picture
const uploads = new Uploads(post, onUploaded, drawProgress);

const many = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
const named = (id) => lesson.classes.find((one) => one.id === id)?.name ?? "another class";
let silence = 0;
function say(text) {
  $("teach-status").textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => { $("teach-status").textContent = ""; }, SECONDS * 1000);
}

function post(path, how = {}) {
  return call(`v1/teach${path}`, { ...how, headers: { Lesson: lesson?.lesson ?? "" } });
}

function complain(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Problem)) console.warn(error);
  const known = error instanceof Problem ? error : new Problem("ServerError", "");
  if (known.kind === "InputError") {
    $("teach-message").replaceChildren(element("span", { textContent: known.detail }));
    $("teach-message").hidden = false;
  } else explain($("teach-message"), known);
}

// One request at a time; what changes meanwhile is asked for once more.
let asking = null, again = false;
function refresh() {
  again = true;
  asking ??= (async () => {
    try {
      while (again) {
        again = false;
        lesson = await (await post("")).json();
        draw();
        if (lesson.choosing && !again) setTimeout(refresh, 700);
      }
    } catch (error) {
      complain(error);
    } finally {
      asking = null;
    }
  })();
  return asking;
}

async function change(what, words) {
  $("teach-message").hidden = true;
  try {
    const made = await (await post("/change", { json: { change: what } })).json();
    await refresh();
    if (words) say(words);
    return made;
  } catch (error) {
    complain(error);
    return null;
  }
}

// ---- pictures

function picture(key) {
  if (!pictures.has(key)) {
    const made = post(`/photo/${key}`).then((answer) => answer.blob()).then((blob) => URL.createObjectURL(blob));
    made.catch(() => pictures.delete(key));
    pictures.set(key, made);
  }
  return pictures.get(key);
}

const visible = new IntersectionObserver((entries) => {
  for (const { target: image, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    visible.unobserve(image);
    picture(image.dataset.key).then((source) => { image.src = source; }, () => {});
  }
}, { rootMargin: "200px" });

function thumb(photo, words = "") {
  const image = element("img", { alt: "" });
  image.dataset.key = photo.key;
  visible.observe(image);
  const button = element("button", { type: "button", title: photo.name, className: "thumb" }, image);
  button.setAttribute("aria-label", `${photo.name}, ${named(photo.of)}${words}`);
  button.addEventListener("click", () => view(photo.key));
  return button;
}

// ---- classes

function card(one) {
  const name = element("input", { type: "text", value: one.name, maxLength: 60 });
  const count = element("span", { className: "teach-count" });
  const remove = element("button", { type: "button", textContent: "×" });
  const pick = element("button", { type: "button", textContent: "Add photos" });
  const shoot = element("button", { type: "button", textContent: "Camera" });
  const made = element("li", { className: "card teach-class" },
    element("div", { className: "teach-class-head" }, name, count, remove),
    element("ul", { className: "teach-thumbs" }),
    element("button", { type: "button", className: "teach-more", hidden: true }),
    element("div", { className: "teach-progress", hidden: true }, element("span")),
    element("ul", { className: "teach-errors" }),
    element("div", { className: "buttons" }, pick, shoot));
  made.dataset.of = one.id;
  name.addEventListener("change", async () => {
    const old = named(one.id), text = name.value.trim();
    if (text !== old && !(await change({ do: "class", id: one.id, name: text }, `Renamed to ${text}.`))) name.value = old;
  });
  name.addEventListener("keydown", (event) => {
    if (event.key === "Enter") name.blur();
    if (event.key === "Escape") { name.value = named(one.id); name.blur(); }
  });
  remove.addEventListener("click", async () => {
    await change({ do: "drop", id: one.id }, `${named(one.id)} removed. Undo brings it back.`);
    $("teach-name").focus();
  });
  pick.addEventListener("click", () => { target = one.id; $("teach-file").click(); });
  shoot.addEventListener("click", () => takePhotos(one.id));
  made.querySelector(".teach-more").addEventListener("click", () => {
    if (!whole.delete(one.id)) whole.add(one.id);
    draw();
  });
  return made;
}

function drawClasses() {
  const list = $("teach-classes"), wrong = new Map(lesson.seen.suspects.map((one) => [one.key, one]));
  const photos = new Map(lesson.classes.map((one) => [one.id, []]));
  for (const photo of lesson.photos) photos.get(photo.of)?.push(photo);
  for (const old of [...list.children]) if (!photos.has(Number(old.dataset.of))) old.remove();
  for (const one of lesson.classes) {
    let place = list.querySelector(`[data-of="${one.id}"]`);
    if (!place) list.append(place = card(one));
    const name = place.querySelector("input"), all = photos.get(one.id).reverse();
    if (document.activeElement !== name) name.value = one.name;
    name.setAttribute("aria-label", `Name of the class ${one.name}`);
    place.querySelector(".teach-count").textContent = many(one.photos, "photo");
    place.querySelector(".teach-class-head button").setAttribute("aria-label", `Remove ${one.name} with its photos`);
    const [pick, shoot] = place.querySelectorAll(".buttons button");
    pick.setAttribute("aria-label", `Add photos of ${one.name}`);
    shoot.setAttribute("aria-label", `Take photos of ${one.name} with the camera`);
    const shown = whole.has(one.id) ? all : all.slice(0, FEW), thumbs = place.querySelector(".teach-thumbs");
    const have = new Map([...thumbs.children].map((item) => [item.dataset.key, item]));
    const items = shown.map((photo) => {
      let item = have.get(photo.key);
      if (!item) {
        item = element("li", {}, thumb(photo));
        item.dataset.key = photo.key;
      }
      const doubt = wrong.get(photo.key);
      item.firstChild.classList.toggle("wrong", Boolean(doubt));
      item.firstChild.setAttribute("aria-label", `${photo.name}, ${one.name}${doubt ? `; it says ${named(doubt.guess)}` : ""}`);
      return item;
    });
    if (items.length !== have.size || items.some((item, i) => thumbs.children[i] !== item)) thumbs.replaceChildren(...items);
    const more = place.querySelector(".teach-more");
    more.hidden = all.length <= FEW;
    more.textContent = whole.has(one.id) ? "Show fewer" : `Show all ${all.length}`;
  }
}

function drawProgress(of) {
  const place = $("teach-classes").querySelector(`[data-of="${of}"]`);
  if (!place) return;
  const { done, all, errors } = uploads.progress(of);
  place.querySelector(".teach-progress").hidden = all === 0;
  place.querySelector(".teach-progress span").style.width = `${(100 * done) / Math.max(all, 1)}%`;
  place.querySelector(".teach-errors").replaceChildren(...errors.map((text) =>
    element("li", { className: "message", textContent: text })));
  if (all) say(`Adding photos of ${named(of)}: ${done} of ${all}.`);
}

async function onUploaded(of, added, failed, finished) {
  await refresh();
  if (added && !failed) $("teach-message").hidden = true;
  if (!finished) return;
  const refused = failed ? ` ${many(failed, "file")} could not be used.` : "";
  say(`${many(added, "photo")} of ${named(of)} added.${refused}${lesson.seen.ready ? ` ${score()}` : ""}`);
  if (tried) tryPhoto(tried);
}

// ---- what is known

const score = () => `${lesson.seen.right} of ${many(lesson.seen.judged, "photo")} recognised.`;

function drawSeen() {
  const { seen } = lesson, photos = new Map(lesson.photos.map((one) => [one.key, one]));
  $("teach-seen").hidden = !seen.ready;
  if (!seen.ready) return;
  $("teach-score").textContent = score();
  const head = element("tr", {}, element("td", { className: "corner" }), ...seen.classes.map((of) =>
    Object.assign(element("th", { textContent: named(of), title: named(of) }), { scope: "col" })));
  const rows = seen.confusion.map((row, i) => {
    const all = row.reduce((sum, count) => sum + count, 0), name = named(seen.classes[i]);
    return element("tr", {}, Object.assign(element("th", { textContent: name, title: name }), { scope: "row" }),
      ...row.map((count, k) => {
        const share = all ? count / all : 0, cell = element("td", { textContent: count });
        cell.className = count === 0 ? "zero" : `${i === k ? "right" : "wrong"}${share > 0.5 ? " strong" : ""}`;
        cell.style.setProperty("--share", share.toFixed(3));
        cell.title = `${count} of ${all} photos of ${name} are taken for ${named(seen.classes[k])}`;
        return cell;
      }));
  });
  $("teach-table").replaceChildren(
    element("caption", { className: "quiet", textContent: "Rows: your label. Columns: what it says." }),
    element("thead", {}, head), element("tbody", {}, ...rows));
  $("teach-suspects-part").hidden = seen.suspects.length === 0;
  $("teach-suspects").replaceChildren(...seen.suspects.map((one) => {
    const photo = photos.get(one.key), move = element("button", { type: "button", textContent: `Move to ${named(one.guess)}` });
    move.addEventListener("click", () => change({ do: "move", keys: [one.key], to: one.guess }, `Moved to ${named(one.guess)}.`));
    return element("li", {}, thumb(photo),
      element("span", { textContent: `In ${named(photo.of)}; it says ${named(one.guess)}, ${percent(one.p)}.` }), move);
  }));
  $("teach-unsure-part").hidden = seen.unsure.length === 0;
  $("teach-unsure").replaceChildren(...seen.unsure.map((one) =>
    element("li", {}, thumb(photos.get(one.key), `; it says ${named(one.guess)}, ${percent(one.p)}`))));
}

function drawAdvice() {
  $("teach-advice").replaceChildren(...lesson.advice.map(({ text, of }) => {
    const item = element("li", { textContent: text });
    if (of !== null) {
      const add = element("button", { type: "button", textContent: `Add photos of ${named(of)}` });
      add.addEventListener("click", () => { target = of; $("teach-file").click(); });
      item.append(add);
    }
    return item;
  }));
}

function draw() {
  drawClasses();
  drawSeen();
  drawAdvice();
  const { ready } = lesson.seen;
  $("teach-undo").disabled = !lesson.undo;
  $("teach-undo").title = lesson.undo ? `Undo: ${lesson.undo}` : "There is nothing to undo";
  $("teach-save").disabled = !ready || lesson.saved;
  $("teach-save").textContent = lesson.saved && ready ? "Saved" : "Save";
  $("teach-name-label").textContent = ["Name the first class", "Name a second class"][lesson.classes.length] ?? "Name another class";
  $("teach-pick").disabled = $("teach-watch").disabled = !ready;
  $("teach-invite").textContent = ready ? "Drop a photo that it has not seen" :
    "Live answers appear after the second photo of two classes";
  if (!ready) $("teach-bars").replaceChildren();
  if (!lesson.saved) $("teach-saved").hidden = true;
}

// ---- trying it

let tried = null, busy = false;
function bars(top) {
  const list = $("teach-bars"), rows = new Map([...list.children].map((row) => [row.dataset.name, row]));
  const items = top.slice(0, 6).map((guess) => {
    const row = rows.get(guess.class) ?? element("li", {}, element("span", { className: "name", textContent: guess.class }),
      element("span", { className: "share" }),
      element("span", { className: "track" }, element("span", { className: "fill" })));
    row.dataset.name = guess.class;
    row.querySelector(".share").textContent = percent(guess.p);
    row.querySelector(".fill").style.width = `${Math.max(100 * guess.p, 0.4)}%`;
    return row;
  });
  if (items.length !== list.children.length || items.some((item, i) => list.children[i] !== item)) list.replaceChildren(...items);
}

async function ask(file) {
  const [found] = (await (await post("/predict", { file })).json()).results;
  if (found.error) throw new Problem(found.kind, found.error);
  bars(found.top);
  return found.top[0];
}

async function tryPhoto(file) {
  if (!lesson.seen.ready) return;
  watch.stop();
  tried = file;
  $("teach-message").hidden = true;
  const image = $("teach-photo");
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.alt = `The photo to try: ${file.name}`;
  image.onerror = () => { image.hidden = true; };
  image.hidden = false;
  $("teach-stage").classList.add("full", "busy");
  try {
    const first = await ask(file);
    say(`It says ${first.class}, ${percent(first.p)}.`);
  } catch (error) {
    tried = null;
    image.hidden = true;
    $("teach-stage").classList.remove("full");
    $("teach-bars").replaceChildren();
    complain(error);
  } finally {
    $("teach-stage").classList.remove("busy");
  }
}

const watch = new Watch(async (file) => {
  if (busy || !lesson.seen.ready) return;
  busy = true;
  try {
    await ask(file);
  } catch (error) {
    watch.stop();
    complain(error);
  } finally {
    busy = false;
  }
});

// ---- one photo

function view(key) {
  const photo = lesson.photos.find((one) => one.key === key);
  if (!photo) return;
  viewed = key;
  const doubt = [...lesson.seen.suspects, ...lesson.seen.unsure].find((one) => one.key === key);
  $("teach-view-title").textContent = photo.name;
  $("teach-view-photo").alt = photo.name;
  $("teach-view-photo").removeAttribute("src");
  picture(key).then((source) => { $("teach-view-photo").src = source; }, complain);
  $("teach-view-words").textContent = doubt ? `Without having seen it, it says ${named(doubt.guess)}, ${percent(doubt.p)}.` : "";
  $("teach-view-class").replaceChildren(...lesson.classes.map((one) =>
    element("option", { value: one.id, textContent: one.name, selected: one.id === photo.of })));
  $("teach-view").showModal();
}

// ---- camera

const burst = new Burst((files, of, number) => uploads.add(of, files, number));

function takePhotos(of) {
  watch.stop();
  if (canUseCamera()) {
    burst.open(of, named(of));
    return;
  }
  target = of;
  $("teach-capture").click();
}

// ---- dropping files and folders

async function entriesIn(folder) {
  const reader = folder.createReader(), found = [];
  for (;;) {      // browsers answer with some at a time
    const some = await new Promise((resolve, reject) => { reader.readEntries(resolve, reject); });
    if (!some.length) return found;
    found.push(...some);
  }
}

async function filesIn(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => { entry.file(resolve, reject); })];
  const found = [];
  for (const one of await entriesIn(entry)) found.push(...await filesIn(one));
  return found;
}

const images = (files) => files.filter((file) => file.type.startsWith("image/") || !file.type || /\.(heic|heif|avif)$/i.test(file.name));

// A folder becomes a class of its name, unless it is dropped on a class; a folder of folders becomes several classes.
async function takeEntries({ entries, of, tries }) {
  if (tries && entries.length === 1 && entries[0].isFile) {
    await tryPhoto((await filesIn(entries[0]))[0]);
    return;
  }
  const groups = new Map();      // name of a class, or its id -> files
  const put = (place, files) => groups.set(place, [...(groups.get(place) ?? []), ...files]);
  const walk = async (entry) => {
    if (entry.isFile) { put(of ?? null, await filesIn(entry)); return; }
    const inside = await entriesIn(entry);
    if (of === null && inside.length && inside.every((one) => one.isDirectory || one.name.startsWith("."))) {
      for (const one of inside) if (one.isDirectory) await walk(one);
    } else put(of ?? entry.name, images(await filesIn(entry)));
  };
  for (const entry of entries) await walk(entry);
  for (const [place, files] of groups) {
    if (!files.length) continue;
    if (place === null) await give(files);
    else if (typeof place === "number") uploads.add(place, files);
    else {
      const known = lesson.classes.find((one) => one.name.toLowerCase() === place.toLowerCase());
      const id = known?.id ?? (await change({ do: "class", name: place }))?.id;
      if (id) uploads.add(id, files);
    }
  }
}

// Files that were given to the page as a whole: to the only class, or to be tried.
async function give(files) {
  if (lesson.classes.length === 1) uploads.add(lesson.classes[0].id, files);
  else if (lesson.seen.ready && files.length === 1) await tryPhoto(files[0]);
  else complain(new Problem("InputError", lesson.classes.length
    ? "Drop the photos on the class that they belong to."
    : "Name a class first, then drop its photos on it; or drop a folder that has the name of a class."));
}

function setUpDrops() {
  const cardAt = (event) => event.target.closest?.(".teach-class");
  const mark = (place) => {
    for (const one of document.querySelectorAll(".teach-class.over")) if (one !== place) one.classList.remove("over");
    place?.classList.add("over");
  };
  window.addEventListener("dragover", (event) => mark(cardAt(event)));
  window.addEventListener("drop", (event) => {      // entries can only be read while the event lasts
    if ($("panel-teach").hidden) return;
    const place = cardAt(event);
    mark(null);
    dropped = {
      of: place ? Number(place.dataset.of) : null,
      tries: Boolean(event.target.closest?.("#teach-stage")),
      entries: [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean),
    };
  }, true);
}

function setUp() {
  setUpDrops();
  $("teach-new").addEventListener("submit", async (event) => {
    event.preventDefault();
    const name = $("teach-name").value.trim();
    if (!name) { $("teach-name").focus(); return; }
    if (await change({ do: "class", name }, `Class ${name} added. Add photos of it.`)) {
      $("teach-name").value = "";
      if (lesson.classes.length > 1) $("teach-classes").lastChild.querySelector(".buttons button").focus();
    }
  });
  $("teach-undo").addEventListener("click", () => change({ do: "undo" }, `Undone: ${lesson.undo}.`));
  window.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input[type=text], input[type=password], dialog");
    if (!$("panel-teach").hidden && !typing && !event.shiftKey && (event.ctrlKey || event.metaKey) && event.key === "z") {
      event.preventDefault();
      if (lesson.undo) $("teach-undo").click();
    }
  });
  $("teach-save").addEventListener("click", async () => {
    $("teach-save").disabled = true;
    say("Saving…");
    try {
      const { folder } = await (await post("/save", { json: {} })).json();
      await refresh();
      const quoted = /^[\w./~-]+$/.test(folder) ? folder : `'${folder.replaceAll("'", "'\\''")}'`;
      $("teach-folder").textContent = folder;
      $("teach-commands").textContent = [`vitkit predict ${quoted} PHOTO`, `vitkit serve ${quoted}`, `vitkit report ${quoted}`,
        `vitkit teach ${quoted}        # go on later`].join("\n");
      $("teach-saved").hidden = false;
      say(`Saved in ${folder}.`);
      $("teach-saved-title").focus();
    } catch (error) {
      say("");
      complain(error);
      $("teach-save").disabled = false;
    }
  });
  $("teach-file").addEventListener("change", (event) => { uploads.add(target, [...event.target.files]); event.target.value = ""; });
  $("teach-capture").addEventListener("change", (event) => { uploads.add(target, [...event.target.files]); event.target.value = ""; });
  $("teach-try-file").addEventListener("change", (event) => {
    if (event.target.files.length) tryPhoto(event.target.files[0]);
    event.target.value = "";
  });
  $("teach-pick").addEventListener("click", () => $("teach-try-file").click());
  $("teach-stage").addEventListener("click", () => { if (lesson.seen.ready && !watch.on) $("teach-try-file").click(); });
  $("teach-watch").hidden = !canUseCamera();
  $("teach-watch").addEventListener("click", () => (watch.on ? watch.stop() : watch.start().catch(complain)));
  $("teach-view-close").addEventListener("click", () => $("teach-view").close());
  $("teach-view-remove").addEventListener("click", async () => {
    $("teach-view").close();
    await change({ do: "remove", keys: [viewed] }, "Photo removed. Undo brings it back.");
  });
  $("teach-view-class").addEventListener("change", async (event) => {
    const to = Number(event.target.value);
    $("teach-view").close();
    await change({ do: "move", keys: [viewed], to }, `Moved to ${named(to)}.`);
  });
  $("teach-http").hidden = canUseCamera();
}

export async function start() {
  setUp();
  lesson = await (await post("", { json: { lesson: localStorage.getItem(STORED) ?? "" } })).json();
  localStorage.setItem(STORED, lesson.lesson);
  draw();
  $("teach-name").disabled = $("teach-add").disabled = false;      // now there is a lesson that classes can be added to
  return {
    hide: () => watch.stop(),
    take: async (files) => {
      const from = dropped;
      dropped = null;
      try {
        if (from?.entries.length) await takeEntries(from);
        else if (from?.of) uploads.add(from.of, [...files]);
        else await give([...files]);
      } catch (error) {
        complain(error);
      }
    },
  };
}
