// Colour scales. Brighter means more, also for colour-blind eyes; signed values go from blue through grey to orange.

const HEAT = [[11, 7, 38], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]];
const SIGNED = [[36, 74, 160], [92, 132, 206], [212, 212, 218], [236, 158, 86], [196, 84, 16]];

function scale(stops, v) {
  const at = Math.min(Math.max(v, 0), 0.9999) * (stops.length - 1), i = Math.floor(at), f = at - i;
  return stops[i].map((c, k) => Math.round(c + f * (stops[i + 1][k] - c)));
}

export const heat = (v) => scale(HEAT, v);                                  // 0..1
export const signed = (v) => scale(SIGNED, (v + 1) / 2);                    // -1..1
export const css = (colour) => `rgb(${colour.join(" ")})`;
