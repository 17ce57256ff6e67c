// Eqs. 1-8 of the paper with the numbers of what is pointed at.

import { element } from "./charts.js";
import { minus, norm } from "./result.js";

// "z'_{l} = MSA(LN(z_{l-1}))" -> sub- and superscripts; single letters are italic, words are upright.
export function formula(text) {
  const made = element("span", { class: "formula" });
  const letters = (part) => part.split(/([A-Za-zα-ω]+)/).map((piece) => (/^[A-Za-zα-ω]$/.test(piece) ? element("i", {}, piece) : piece));
  for (const [, kind, inner, plain] of text.matchAll(/(?:([_^])\{([^}]*)\})|([^_^]+)/g)) {
    if (kind) made.append(element(kind === "_" ? "sub" : "sup", {}, ...letters(inner)));
    else made.append(...letters(plain));
  }
  return made;
}

export const number = (v) => {
  const size = Math.abs(v);
  const text = size >= 100 ? v.toFixed(0) : size >= 10 ? v.toFixed(1) : size >= 0.01 || v === 0 ? v.toFixed(2) : v.toExponential(0);
  return text.replace("-", "−");
};
export const percent = (v) => {
  if (v > 0 && v < 0.0005) return "< 0.1%";
  return v >= 0.9995 && v < 1 ? "> 99.9%" : `${(100 * v).toFixed(v < 0.0995 || (v >= 0.9905 && v < 1) ? 1 : 0)}%`;
};
export const vector = (values, few = 3) => `[${Array.from(values.slice(0, few), number).join(", ")}, … ]`;

// [equation's number, formula, [[left side, right side], ...]]
const line = (name, text, rows) => ({ name, text, rows });

// What to show: (result, at) -> lines. `at` has patch, token, layer, head, seen (a token that is looked at) and names.
export const EQUATIONS = {
  photo: (r, { model }) => [
    line("x", "x ∈ ℝ^{H × W × C}", [["H, W, C", `${model.size[0]}, ${model.size[1]}, ${model.channels}`]]),
  ],
  patches: (r, { model, patch, numbers }) => [
    line("x_p", "x_{p} ∈ ℝ^{N × (P² · C)}", [
      ["N = HW / P²", `${model.patches}`],
      ["P² · C", `${model.patch ** 2 * model.channels}`],
      [`x_{p}^{${patch + 1}}`, numbers ? vector(numbers) : null],
    ]),
  ],
  projection: (r, { patch, dimension }) => [
    line("Eq. 1", "x_{p}^{i} E,   E ∈ ℝ^{(P² · C) × D}", [
      ["D", `${r.D}`],
      [`x_{p}^{${patch + 1}} E`, vector(r.embedded(patch))],
      [`its number ${dimension + 1}`, number(r.embedded(patch)[dimension])],
    ]),
  ],
  positions: (r, { patch }) => [
    line("Eq. 1", r.prefix ? "z_{0} = [x_{class}; x_{p}^{1} E; … ; x_{p}^{N} E] + E_{pos}" : "z_{0} = [x_{p}^{1} E; … ; x_{p}^{N} E] + E_{pos}", [
      [`x_{p}^{${patch + 1}} E`, vector(r.embedded(patch))],
      [`E_{pos}^{${patch + 1}}`, vector(r.position(patch))],
      [`z_{0}^{${patch + 1}}`, vector(r.state(0, r.prefix + patch))],
    ]),
  ],
  attention: (r, { layer, head, token, seen, label }) => {
    const k = Math.max(head, 0), A = r.row(layer, k, token)[seen], of = head < 0 && r.h > 1 ? ", head 1," : "";
    return [
      line("Eq. 5", "[q, k, v] = LN(z_{l−1}) U_{qkv}", [
        [`q${of} of ${label(token)}`, vector(r.qkv("q", layer, k, token))],
        [`k${of} of ${label(seen)}`, vector(r.qkv("k", layer, k, seen))],
        [`v${of} of ${label(seen)}`, vector(r.qkv("v", layer, k, seen))],
      ]),
      line("Eq. 6", "A = softmax(q k^{⊤} / √d)", [
        ["q k^{⊤} / √d", number(r.score(layer, k, token, seen))],
        ["A", `${percent(A)} of all it gives`],
      ]),
      line("Eq. 7", "SA(z) = A v", [["SA(z)", vector(r.mixed(layer, k, token))]]),
      line("Eq. 8", "MSA(z) = [SA_{1}(z); … ; SA_{h}(z)] U_{msa}", [
        [`h`, `${r.h}`],
        ["MSA(z)", vector(minus(r.middle(layer, token), r.state(layer, token)))],
      ]),
    ];
  },
  stream: (r, { layer, token }) => {
    const before = r.state(layer, token), middle = r.middle(layer, token), after = r.state(layer + 1, token), l = layer + 1;
    return [
      line("Eq. 2", "z'_{l} = MSA(LN(z_{l−1})) + z_{l−1}", [
        [`‖z_{${l - 1}}‖`, number(norm(before))],
        ["‖MSA(…)‖", number(norm(minus(middle, before)))],
        [`‖z'_{${l}}‖`, number(norm(middle))],
      ]),
      line("Eq. 3", "z_{l} = MLP(LN(z'_{l})) + z'_{l}", [
        ["‖MLP(…)‖", number(norm(minus(after, middle)))],
        [`‖z_{${l}}‖`, number(norm(after))],
        [`z_{${l}}`, vector(after)],
      ]),
    ];
  },
  layers: (r, { layer, chosen }) => {
    const l = layer + 1, logits = r.lenses.subarray(l * r.K, (l + 1) * r.K);
    return [
      line("Eq. 4", r.card.model.pool === "cls" ? `y = LN(z_{l}^{0}),   l = ${l}` : `y = mean of LN(z_{l}),   l = ${l}`, [
        ["y", vector(r.read(l))],
        ["its logit", number(logits[chosen])],
        ["softmax", percent(r.lens(l)[chosen])],
      ]),
    ];
  },
  erase: (r, { erased, how }) => [
    how === "mask"
      ? line("Eq. 6", "A = softmax(q k^{⊤} / √d + m),   m = −∞ where erased", [["erased", `${erased} of ${r.T - r.prefix} patches`], ["A of an erased patch", "0"]])
      : line("Eq. 1", "x_{p}^{i} = mean colour where erased", [["erased", `${erased} of ${r.T - r.prefix} patches`], ["pixels after normalising", "0"]]),
  ],
};

export function draw(lines) {
  return lines.map(({ name, text, rows }) => element("div", { class: "equation" },
    element("p", { class: "law" }, element("b", {}, name.startsWith("Eq") ? name : ""), formula(text)),
    element("dl", {}, ...rows.filter(([, right]) => right !== null).map(([left, right]) => element("div", {},
      element("dt", {}, /[_^{]/.test(left) ? formula(left) : left), element("dd", {}, right))))));
}
