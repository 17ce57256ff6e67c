// Send photos to their classes: a few requests at a time, each with a few files. A file that is refused has its own words.

import { Problem } from "./api.js";

const FILES = 8, BYTES = 12e6, REQUESTS = 3, ERRORS = 5;

export class Uploads {
  // post(path, { files }) sends; done(of, added, failed, finished) and moved(of) hear how it goes.
  constructor(post, done, moved) {
    Object.assign(this, { post, done, moved, waiting: [], running: 0, batch: 0, classes: new Map() });
  }

  progress(of) {
    return this.classes.get(of) ?? { done: 0, all: 0, errors: [], added: 0, failed: 0 };
  }

  add(of, files, burst = 0) {
    if (!files.length) return;
    const state = this.progress(of);
    if (state.all === 0) Object.assign(state, { done: 0, added: 0, failed: 0, errors: [] });
    state.all += files.length;
    this.classes.set(of, state);
    let part = [], size = 0, batch = this.batch = Math.max(Date.now(), this.batch + 1);      // undone together
    for (const file of files) {
      if (part.length && (part.length === FILES || size + file.size > BYTES)) {
        this.waiting.push({ of, burst, batch, files: part });
        part = [], size = 0;
      }
      part.push(file);
      size += file.size;
    }
    this.waiting.push({ of, burst, batch, files: part });
    this.moved(of);
    while (this.running < REQUESTS && this.waiting.length) this.next();
  }

  async next() {
    const { of, burst, batch, files } = this.waiting.shift(), state = this.progress(of);
    this.running += 1;
    try {
      const answer = await this.post(`/photos?of=${of}&burst=${burst}&batch=${batch}`, { files });
      for (const one of (await answer.json()).results) this.count(state, one.error ? new Problem(one.kind, one.error) : null);
    } catch (error) {
      const known = error instanceof Problem ? error : new Problem("ServerError", "");
      if (known !== error) console.warn(error);
      if (files.length > 1 && known.kind === "TooLarge") {      // together too large; each may be fine
        this.waiting.unshift(...files.map((file) => ({ of, burst, batch, files: [file] })));
      } else for (const file of files) this.count(state, new Problem(known.kind, `${file.name}: ${known.message}`));
    }
    this.running -= 1;
    const { added, failed } = state, finished = state.done === state.all;
    if (finished) state.all = 0;
    this.moved(of);
    while (this.running < REQUESTS && this.waiting.length) this.next();
    await this.done(of, added, failed, finished);
  }

  count(state, problem) {
    state.done += 1;
    state.added += problem ? 0 : 1;
    state.failed += problem ? 1 : 0;
    if (problem && state.errors.length < ERRORS) state.errors.push(problem.detail);
    else if (problem) state.errors[ERRORS] = `and ${state.failed - ERRORS} more`;
  }
}
