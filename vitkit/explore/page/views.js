// The views, in the order of the model: what each says, what it lays over the photo, and what it draws next to it.

import { lines, element, strip, thumbnails } from "./charts.js";
import { percent } from "./equations.js";
import { best, norm } from "./result.js";

const flat = (count) => new Float32Array(count).fill(1);
// A few patches often get most of the attention: a power below one makes the others visible.
const seen = (v) => v ** 0.8;

// Attention as brightness. Often a few patches get most of it (sinks, which carry no meaning): those few are drawn less far
// above the others than they are, so that the others show.
function brightness(row, prefix) {
  const values = row.slice(prefix), sorted = values.slice().sort(), largest = sorted[sorted.length - 1];
  const most = Math.max(sorted[Math.floor(sorted.length * 0.97)], 0.3 * largest) || 1;
  return values.map((v) => seen(Math.min(1, v / most)));
}

const scaled = (values) => {
  const most = values.reduce((a, b) => Math.max(a, b), 0) || 1;
  return values.map((v) => Math.max(0, v / most));
};

export const VIEW = {
  photo: {
    tab: "Photo",
    title: "A photo goes in",
    words: ({ model }) => `This is the part of the photo that the model sees: ${model.size[1]} × ${model.size[0]} pixels.`,
    scene: ({ model }) => ({ style: "photo", gap: 0, values: flat(model.patches) }),
  },
  patches: {
    tab: "Patches",
    title: "Cut into patches",
    words: ({ model }) => `The model gets ${model.patches} squares of ${model.patch} × ${model.patch} pixels, in reading order. It never sees the whole photo at once.`,
    scene: ({ model }) => ({ style: "photo", gap: 1, values: flat(model.patches) }),
  },
  projection: {
    tab: "Projection",
    title: "Every patch becomes a vector",
    live: true,
    words: ({ model, dimension }) => `One matrix E turns the ${model.patch ** 2 * model.channels} pixel values of a patch into ${model.width} numbers. The photo shows number ${dimension + 1} of every patch; the strip shows all numbers of the patch you point at. Click a cell of the strip to see another number.`,
    scene: ({ result, model, dimension }) => {
      const values = Float32Array.from({ length: model.patches }, (_, i) => result.embedded(i)[dimension]);
      const most = values.reduce((a, v) => Math.max(a, Math.abs(v)), 0) || 1;
      return { style: "signed", gap: 0.35, values: values.map((v) => v / most) };
    },
    charts: ({ result, patch, dimension, set }) => [
      strip(result.embedded(patch), dimension, `The vector of patch ${patch + 1}`, (place) => set({ dimension: place })),
    ],
  },
  positions: {
    tab: "Positions",
    title: "Where was it?",
    live: true,
    words: ({ model }) => (model.positions
      ? "A vector that says where the patch was is added to it. The photo shows how similar these vectors are to that of the patch you point at: the model has learned that neighbours are neighbours, and what rows and columns are."
      : "This model adds no positions: it does not know where a patch was."),
    scene: ({ result, model, patch }) => {
      const own = result.position(patch), size = norm(own) || 1;
      const values = Float32Array.from({ length: model.patches }, (_, i) => {
        const other = result.position(i);
        return other.reduce((sum, v, d) => sum + v * own[d], 0) / (size * (norm(other) || 1));
      });
      return { style: "heat", gap: 0, values: scaled(values) };
    },
    charts: ({ result, patch }) => [strip(result.position(patch), null, `The position vector of patch ${patch + 1}`)],
  },
  attention: {
    tab: "Attention",
    title: "Every token looks at every other",
    controls: ["layer", "head"],
    words: ({ who, held }) => `The photo shows what ${who} looks at: the brighter, the more. ${held === null ? "Point at a patch to see what it looks at, and click to hold it." : "Point at another patch to see the numbers between the two, or click again to let go."}`,
    scene: ({ result, layer, head, token }) => ({
      style: "heat", gap: 0, values: brightness(result.attention(layer, head, token), result.prefix),
    }),
    charts: ({ result, token, model, layer, head, set }) => [
      thumbnails(result, token, model, { layer, head }, seen, (l, k) => set({ layer: l, head: k })),
      element("p", { class: "quiet" }, "Every layer from left to right, every head from top to bottom. Click one to see it large."),
    ],
  },
  stream: {
    tab: "Stream",
    title: "The residual stream",
    controls: ["layer"],
    words: () => `Each layer adds to a token's vector and never replaces it. The photo shows how long the vectors of its patches are after this layer. A few patches often grow far longer than the others: the model seems to use them as scratch paper.`,
    scene: ({ result, model, layer }) => ({
      style: "heat", gap: 0, values: scaled(Float32Array.from({ length: model.patches }, (_, i) => result.norm(layer + 1, result.prefix + i))),
    }),
    charts: ({ result, model, layer, pointed }) => {
      const over = (token) => Float32Array.from({ length: result.L + 1 }, (_, l) => result.norm(l, token));
      const median = Float32Array.from({ length: result.L + 1 }, (_, l) => {
        const all = Float32Array.from({ length: model.patches }, (_, i) => result.norm(l, result.prefix + i)).sort();
        return all[Math.floor(all.length / 2)];
      });
      const series = [{ name: "half of the patches are shorter", values: median, kind: "median" }];
      if (result.prefix) series.push({ name: "class token", values: over(0), kind: "class" });
      if (pointed !== null) series.push({ name: `patch ${pointed + 1}`, values: over(result.prefix + pointed), kind: "patch" });
      return lines(series, layer + 1, "Length of the vectors after each layer");
    },
  },
  layers: {
    tab: "Answers",
    title: "What each layer would answer",
    controls: ["layer"],
    words: ({ names, chosen }) => `If the model stopped after a layer, this is what its head would answer (a “logit lens”). The bars follow “${names[chosen]}”. Click a row to see where the model looks in that layer.`,
    scene: ({ result, layer, head }) => ({
      style: "heat", gap: 0, values: brightness(result.attention(layer, head, -1), result.prefix),
    }),
    charts: ({ result, layer, names, chosen, set }) => [
      element("ol", { class: "lens" }, ...Array.from({ length: result.L + 1 }, (_, l) => {
        const p = result.lens(l), [top] = best(p, 1), fill = element("span", { class: "fill" });
        fill.style.width = `${100 * p[chosen]}%`;
        return element("li", {}, element("button", { type: "button", "aria-current": l === layer + 1 ? "true" : null, onclick: () => set({ layer: Math.max(0, l - 1) }) },
          element("span", { class: "which" }, l ? `${l}` : "in"), element("span", { class: "name" }, names[top]),
          element("span", { class: "share" }, percent(p[top])), element("span", { class: "track" }, fill)));
      })),
    ],
  },
  erase: {
    tab: "Erase",
    title: "Erase, and watch the answer change",
    controls: ["erase"],
    words: ({ how }) => (how === "mask"
      ? "Paint over patches. An erased patch is masked: no token in any layer can look at it, as if it had never been in the sequence."
      : "Paint over patches. An erased patch is painted in the mean colour before the photo goes in: the model still looks at it, and sees a grey square."),
    scene: ({ model }) => ({ style: "photo", gap: 0, values: flat(model.patches), tool: "erase" }),
  },
};
