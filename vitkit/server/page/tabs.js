// The tabs of the page. A tab is a row here, NAME.js, NAME.html and, if it has its own style, NAME.css.
//
// NAME.js exports start(panel, { model }), called the first time its tab is shown, after NAME.html was put in the panel.
// It returns an object whose functions are all optional: take(files) gets photos that were dropped, pasted or taken with
// the camera while the tab is shown, and show() and hide() are called when the user comes and goes.

import { call } from "./api.js";
import { $, element } from "./dom.js";

const always = () => true;

export const TABS = [
  { name: "photos", title: "Photos", shown: always, load: () => import("./photos.js") },
  { name: "teach", title: "Teach", style: "teach.css", shown: (model) => model.teaches, load: () => import("./teach.js") },
];

const opened = new Map();      // name -> what start() returned, or a promise of it
let active = null;

async function open(tab, context) {
  const panel = $(`panel-${tab.name}`);
  panel.innerHTML = await (await call(`page/${tab.name}.html`)).text();
  return (await (await tab.load()).start(panel, context)) ?? {};
}

async function select(tabs, name, context) {
  const tab = tabs.find((one) => one.name === name) ?? (active ? null : tabs[0]);      // other hashes are places in a tab
  if (!tab || tab.name === active) return;
  if (active) (await opened.get(active)).hide?.();
  active = tab.name;
  for (const one of tabs) {
    const chosen = one === tab, button = $(`tab-${one.name}`);
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
    $(`panel-${one.name}`).hidden = !chosen;
  }
  if (!opened.has(tab.name)) opened.set(tab.name, open(tab, context));
  (await opened.get(tab.name)).show?.();
}

// The tab that is shown, once it is ready.
export const current = async () => opened.get(active) ?? {};

export async function setUpTabs(context) {
  const tabs = TABS.filter((tab) => tab.shown(context.model));
  for (const tab of tabs) {
    if (tab.style) document.head.append(element("link", { rel: "stylesheet", href: `page/${tab.style}` }));
    const button = element("button", { type: "button", id: `tab-${tab.name}`, textContent: tab.title });
    const panel = element("div", { id: `panel-${tab.name}`, hidden: true });
    button.setAttribute("role", "tab");
    button.setAttribute("aria-controls", panel.id);
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", button.id);
    button.addEventListener("click", () => { location.hash = tab.name; });
    $("tabs").append(button);
    $("main").append(panel);
  }
  $("explore").hidden = !context.model.explores;      // a page of its own: the model runs in it
  $("parts").hidden = tabs.length < 2 && !context.model.explores;
  $("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.findIndex((tab) => tab.name === active) + step + tabs.length) % tabs.length];
    $(`tab-${next.name}`).focus();
    location.hash = next.name;
  });
  const go = () => select(tabs, location.hash.slice(1), context);
  window.addEventListener("hashchange", go);
  await go();
}
