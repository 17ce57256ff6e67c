// "What it sees": the most likely classes, how far the photo is from what the model knows, and similar training photos.

import { call } from "./api.js";
import { $, element, percent } from "./dom.js";

const LISTED = 24;       // classes before the first photo

// Before the first photo: what the model can tell apart.
export function showClasses({ classes, several_labels: several }) {
  const more = classes.length - LISTED;
  $("knows").textContent = classes.length ? several ? `It looks for ${classes.length.toLocaleString("en")} labels; a photo can have several, or none.`
    : `It tells ${classes.length.toLocaleString("en")} classes apart.`
    : "This model predicts no classes, but you can look inside it.";
  $("classes").replaceChildren(...classes.slice(0, LISTED).map((name) => element("li", { textContent: name })),
    ...(more > 0 ? [element("li", { className: "quiet", textContent: `and ${more.toLocaleString("en")} more` })] : []));
}

export function hideAnswer() {
  $("bars").replaceChildren();
  for (const id of ["meter", "similar"]) $(id).hidden = true;
  $("before").hidden = false;
}

const grow = (fill, share) => requestAnimationFrame(() => requestAnimationFrame(() => { fill.style.width = `${share}%`; }));

function bar(guess, onClass) {
  const fill = element("span", { className: "fill" }), track = element("span", { className: "track" }, fill);
  track.setAttribute("aria-hidden", "true");
  if (guess.threshold !== undefined && guess.threshold !== null) {      // from where on the class counts as present
    const mark = element("span", { className: "mark" });
    mark.style.left = `${100 * guess.threshold}%`;
    track.append(mark);
  }
  const absent = guess.threshold != null && guess.p < guess.threshold;
  const row = element("button", { type: "button", className: absent ? "absent" : "", title: `Show where the model sees ${guess.class}` },
    element("span", { className: "name", textContent: guess.class }),
    element("span", { className: "share", textContent: percent(guess.p) }), track);
  row.addEventListener("click", () => onClass(guess.index));
  grow(fill, Math.max(100 * guess.p, 0.4));
  return element("li", {}, row);
}

// The labels of a photo as one text; empty without any.
export function nameLabels(labels) { return labels.map((label) => label.class).join(", "); }

// Show an answer, and return it as a sentence. `onClass` is called with the class whose row was clicked.
export function showAnswer(answer, onClass) {
  $("before").hidden = true;
  $("similar").hidden = true;
  $("bars").classList.remove("old");
  if (!answer.top) {
    $("bars").replaceChildren();
    return "This model predicts no classes, but you can look inside it.";
  }
  const none = element("li", { className: "none" }, element("span", { className: "name", textContent: "None of these" }));
  const { labels = null } = answer;      // of a model that gives a photo any number of labels; then the likeliest others
  const shown = labels ? [...labels, ...answer.top.filter((guess) => guess.p < guess.threshold)] : answer.top;
  $("bars").classList.toggle("several", labels !== null);
  if (labels?.length === 0) none.firstChild.textContent = "No label";
  $("bars").replaceChildren(...(answer.none_of_these || labels?.length === 0 ? [none] : []), ...shown.map((guess) => bar(guess, onClass)));
  const { distance = null } = answer;
  $("meter").hidden = distance === null;
  if (distance !== null) {      // the mark is in the middle: as far as what is accepted
    $("meter-out").textContent = `${Math.round(100 * distance).toLocaleString("en")}% of the limit`;
    $("meter").classList.toggle("over", distance > 1);
    grow($("meter-fill"), Math.min(50 * distance, 100));
  }
  const [first] = answer.top;
  let said = answer.none_of_these ? `None of these (nearest: ${first.class})` : `${first.class}, ${percent(first.p)}`;
  if (labels) said = nameLabels(labels) || `No label (nearest: ${first.class})`;
  return `${said}. Took ${answer.seconds.toFixed(2)} s.`;
}

// Show the most similar training photos. `onPhoto` is called with the one that was clicked.
export async function showSimilar(file, signal, onPhoto) {
  const { similar } = (await (await call("v1/similar?count=6", { file, signal })).json()).results[0];
  const items = await Promise.all(similar.map(async ({ photo, class: label, similarity }) => {
    const place = photo.slice(1), words = `${label}, similarity ${similarity.toFixed(2)}`;
    const response = await call(`${place}?thumbnail=true`, { signal }).catch(() => null);      // it may have been deleted
    if (!response) return null;
    const image = element("img", { src: URL.createObjectURL(await response.blob()), alt: "" });
    const tile = element("button", { type: "button", className: "tile", title: `More like this: ${words}` },
      element("span", { className: "thumb" }, image), element("span", { className: "caption", textContent: label }), element("span", { className: "share", textContent: similarity.toFixed(2) }));
    tile.setAttribute("aria-label", `More like this: ${words}`);
    tile.addEventListener("click", async () => onPhoto(place, label, await (await call(place)).blob()));
    return element("li", {}, tile);
  }));
  if (signal.aborted) return;
  $("similar-photos").replaceChildren(...items.filter(Boolean));
  $("similar").hidden = false;
}
