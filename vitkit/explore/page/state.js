// What is being looked at, and the link that restores it. Layers, heads and patches count from 1 in a link, as on the page.

export const VIEWS = ["photo", "patches", "projection", "positions", "attention", "stream", "layers", "erase"];
export const DEFAULT = {
  photo: 0,            // an example; -1 for your own photo, which no link contains
  view: "photo",
  layer: 0,
  head: -1,            // -1: the mean of all heads
  held: null,          // the patch that was chosen
  dimension: 0,        // of the projection
  erased: [],
  how: "mask",         // what erasing means: "mask" or "grey"
  tour: -1,            // a step of the tour; -1: free play
};

const bits = (erased, count) => {
  const digits = new Array(Math.ceil(count / 4)).fill(0);
  for (const patch of erased) digits[patch >> 2] |= 1 << (patch & 3);
  return digits.map((digit) => digit.toString(16)).join("").replace(/0+$/, "");
};
const patches = (text) => [...text].flatMap((digit, i) => [0, 1, 2, 3].filter((bit) => parseInt(digit, 16) >> bit & 1).map((bit) => 4 * i + bit));

export function toHash(state, model) {
  const found = new URLSearchParams({ view: state.view });      // always there: an empty link starts the tour
  for (const name of ["photo", "layer", "head", "held", "dimension", "tour"]) {
    if (state[name] !== DEFAULT[name]) found.set(name, state[name] + 1);
  }
  if (state.how !== DEFAULT.how) found.set("how", state.how);
  if (state.erased.length) found.set("erased", bits(state.erased, model.patches));
  if (state.photo < 0) found.delete("photo");
  return found.toString();
}

// Anything in a link that this model does not have is left at its default.
export function fromHash(hash, model, steps, photos) {
  const given = new URLSearchParams(hash.replace(/^#/, "")), state = { ...DEFAULT, erased: [] };
  const limits = { photo: photos, layer: model.layers, head: model.heads, held: model.patches, dimension: model.width, tour: steps };
  for (const [name, count] of Object.entries(limits)) {
    const value = Number(given.get(name)) - 1;
    if (given.has(name) && Number.isInteger(value) && value >= 0 && value < count) state[name] = value;
  }
  if (VIEWS.includes(given.get("view"))) state.view = given.get("view");
  if (given.get("how") === "grey") state.how = "grey";
  state.erased = patches(given.get("erased") ?? "").filter((patch) => patch < model.patches);
  return state;
}
