// What came out of the model for one photo, by its place: layers and heads from 0, tokens from 0 (the class token, then
// the patches row by row). A stored result knows answers, norms and attention; a live one also every vector.

const dot = (a, b) => a.reduce((sum, v, i) => sum + v * b[i], 0);
export const norm = (a) => Math.sqrt(dot(a, a));
export const minus = (a, b) => a.map((v, i) => v - b[i]);

export function softmax(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity), powers = Array.from(logits, (v) => Math.exp(v - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((v) => v / sum);
}

// The most probable classes, best first; of equal ones the first, as in `vitkit predict`.
export function best(probabilities, count) {
  return probabilities.map((p, k) => [p, k]).sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, count).map(([, k]) => k);
}

class Result {
  constructor(card) {
    this.card = card;
    ({ layers: this.L, heads: this.h, tokens: this.T, width: this.D, head_size: this.d, prefix: this.prefix } = card.model);
    this.K = card.classes.length;
  }

  get probabilities() { return (this.p ??= softmax(this.logits)); }

  // Probabilities if the head read the state after layer l (0: before the first).
  lens(l) { return softmax(this.lenses.subarray(l * this.K, (l + 1) * this.K)); }

  // The tokens that the head reads: the class token, or all patches.
  get readers() {
    return this.card.model.pool === "cls" ? [0] : Array.from({ length: this.T - this.prefix }, (_, i) => this.prefix + i);
  }

  // What a token looks at, [T]: token -1 is what the head reads, head -1 the mean of all heads.
  attention(layer, head, token) {
    const tokens = token < 0 ? this.readers : [token];
    const heads = head < 0 ? Array.from({ length: this.h }, (_, k) => k) : [head];
    if (tokens.length * heads.length === 1) return this.row(layer, heads[0], tokens[0]);
    const mean = new Float32Array(this.T), count = tokens.length * heads.length;
    for (const k of heads) for (const t of tokens) this.row(layer, k, t).forEach((v, i) => { mean[i] += v / count; });
    return mean;
  }
}

export class Live extends Result {
  constructor(card, { outputs, milliseconds }) {
    super(card);
    this.out = outputs;
    this.milliseconds = milliseconds;
    this.logits = outputs.logits;
    this.lenses = outputs.lens;
    this.live = true;
  }

  row(layer, head, token) { return this.slice("attention", (layer * this.h + head) * this.T + token, this.T); }
  slice(name, index, width = this.D) { return this.out[name].subarray(index * width, (index + 1) * width); }
  embedded(patch) { return this.slice("embedded", patch); }
  state(l, token) { return this.slice("states", l * this.T + token); }
  middle(layer, token) { return this.slice("middles", layer * this.T + token); }
  read(l) { return this.slice("read", l); }
  qkv(name, layer, head, token) { return this.slice(name, (layer * this.h + head) * this.T + token, this.d); }
  norm(l, token) { return norm(this.state(l, token)); }

  // E_pos of a patch, as what Eq. 1 adds to x_p E.
  position(patch) { return minus(this.state(0, this.prefix + patch), this.embedded(patch)); }

  // Eq. 6 before the softmax: q k^T / sqrt(d) of two tokens.
  score(layer, head, looking, seen) {
    return dot(this.qkv("q", layer, head, looking), this.qkv("k", layer, head, seen)) / Math.sqrt(this.d);
  }

  // Eq. 7 for one token: the values v, weighted by its attention.
  mixed(layer, head, token) {
    const sum = new Float32Array(this.d);
    this.row(layer, head, token).forEach((a, t) => this.qkv("v", layer, head, t).forEach((v, i) => { sum[i] += a * v; }));
    return sum;
  }
}

// A result computed when the page was built: float32 logits [L + 1, K], norms [L + 1, T], the largest attention of each row
// [L, h, T], then the rows [L, h, T, T] in 8 bits: the square root of each value's share of that largest one.
export class Stored extends Result {
  constructor(card, bytes) {
    super(card);
    const { L, h, T, K } = this, sizes = [(L + 1) * K, (L + 1) * T, L * h * T];
    let at = 0;
    [this.lenses, this.norms, this.most] = sizes.map((size) => new Float32Array(bytes.buffer, 4 * at, (at += size) && size));
    this.small = bytes.subarray(4 * at);
    this.logits = this.lenses.subarray(L * K);
    this.live = false;
  }

  row(layer, head, token) {
    const at = (layer * this.h + head) * this.T + token, most = this.most[at];
    return Float32Array.from(this.small.subarray(at * this.T, (at + 1) * this.T), (v) => (v / 255) ** 2 * most);
  }

  norm(l, token) { return this.norms[l * this.T + token]; }
}
