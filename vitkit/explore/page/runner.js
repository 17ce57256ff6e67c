// The page's side of the worker. Only the latest request matters: while one runs, newer ones replace each other.

import { givenToken } from "./files.js";

export class Runner {
  constructor(card, { progress, ready, failed }) {
    this.card = card;
    this.ready = false;
    this.waiting = null;
    this.running = null;
    this.count = 0;
    this.failed = failed;
    this.worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.worker.addEventListener("message", ({ data }) => {
      if (data.kind === "progress") progress(data.share);
      if (data.kind === "ready") {
        this.ready = true;
        this.threads = data.threads;
        ready(data.threads);
        this.next();
      }
      if (data.kind === "error" || data.kind === "result") this.answer(data);
    });
    this.worker.addEventListener("error", (event) => failed(event.message || "The model's thread could not start."));
    this.worker.postMessage({ kind: "load", files: card.files, token: givenToken() });
  }

  // Resolves to {outputs, milliseconds}, or to null if a newer request came before this one was started.
  run(pixels, shape, keep) {
    return new Promise((resolve) => {
      this.waiting?.resolve(null);
      this.waiting = { id: (this.count += 1), pixels, shape, keep, resolve };
      this.next();
    });
  }

  next() {
    if (!this.ready || this.running || !this.waiting) return;
    this.running = this.waiting;
    this.waiting = null;
    const { id, pixels, shape, keep } = this.running;
    this.worker.postMessage({ kind: "run", id, pixels, shape, keep });
  }

  answer(data) {
    const { running } = this;
    this.running = null;
    if (data.kind === "error") this.failed(data.message);
    running?.resolve(data.kind === "result" ? data : null);
    this.next();
  }
}
