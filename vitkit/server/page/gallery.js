// "More pictures": a gallery of the figures that the server draws, each with a sentence that says what to see in it.
// A figure is drawn when it comes into view, one at a time; those of the model alone are drawn once for all photos.

import { call } from "./api.js";
import { $, element } from "./dom.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

export class Gallery {
  constructor(pictures) {
    this.file = null;
    this.queue = Promise.resolve();
    this.cards = Object.entries(pictures).map(([name, about]) => this.card(name, about));
    $("pictures").replaceChildren(...this.cards.map((card) => card.place));
    this.eye = new IntersectionObserver((seen) => {
      for (const one of seen) this.enqueue(this.cards.find((card) => card.place === one.target), one.isIntersecting);
    }, { rootMargin: "200px" });
    for (const card of this.cards) this.eye.observe(card.place);
    dark.addEventListener("change", () => this.show(this.file, this.signal));
  }

  card(name, { title, caption, needs }) {
    const image = element("img", { alt: "", hidden: true }), note = element("span", { className: "quiet" });
    const button = element("button", { type: "button", className: "frame", disabled: true }, image, note);
    const place = element("figure", {}, button, element("figcaption", {},
      element("h3", { textContent: title }), element("p", { className: "quiet", textContent: caption })));
    button.setAttribute("aria-label", `Show large: ${title}`);
    button.addEventListener("click", () => {
      $("large-title").textContent = title;
      $("large-caption").textContent = caption;
      $("large-picture").src = image.src;
      $("large-picture").alt = title;
      $("large").showModal();
    });
    return { name, title, needs, place, button, image, note, drawn: null, visible: false };
  }

  // What a figure shows depends on the photo, unless it shows the model alone, and on the colours of the page.
  key(card) { return JSON.stringify([dark.matches, card.needs === "model" ? "" : this.photo]); }

  show(file, signal) {
    if (file !== this.file) this.photo = (this.photo ?? 0) + 1;
    this.file = file;
    this.signal = signal;
    for (const card of this.cards) this.enqueue(card, card.visible);
  }

  enqueue(card, visible) {
    card.visible = visible;
    if (!visible || !this.file) return;
    this.queue = this.queue.then(() => this.draw(card));
  }

  async draw(card) {
    const key = this.key(card), { file, signal } = this;
    if (!card.visible || card.drawn === key || signal?.aborted) return;
    card.note.textContent = "Drawing…";
    try {
      const query = new URLSearchParams({ name: card.name, theme: dark.matches ? "dark" : "light" });
      const blob = await (await call(`v1/picture?${query}`, { file, signal })).blob();
      URL.revokeObjectURL(card.image.src);
      card.image.src = URL.createObjectURL(blob);
      card.image.alt = card.title;
      card.image.hidden = false;
      card.button.disabled = false;
      card.drawn = key;
      card.note.textContent = "";
    } catch (error) {
      card.image.hidden = true;
      card.button.disabled = true;
      card.note.textContent = error.name === "AbortError" ? "" : error.detail ?? "That did not work.";
    }
  }
}
