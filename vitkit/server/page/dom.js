// Small helpers for the document.

export const $ = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export const percent = (p) => (p >= 0.9995 ? "> 99.9%" : p < 0.0005 ? "< 0.1%" : `${(100 * p).toFixed(1)}%`);

// Show an error in an element, as a headline and a sentence.
export function explain(place, problem) {
  place.replaceChildren(element("b", { textContent: problem.headline }), element("span", { textContent: problem.detail }));
  place.hidden = false;
}
