// The page around its tabs: the header, photos that are dropped, pasted or taken, and the token.

import { call, Problem } from "./api.js";
import { setUpCamera } from "./camera.js";
import { $, explain } from "./dom.js";
import { current, setUpTabs } from "./tabs.js";
import { setUpToken } from "./token.js";

const take = async (files) => (await current()).take?.(files);

function setUpInputs() {
  let depth = 0;
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  window.addEventListener("dragenter", (event) => {
    if (hasFiles(event)) { depth += 1; $("veil").hidden = false; }
  });
  window.addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); $("veil").hidden = depth === 0; });
  window.addEventListener("dragover", (event) => event.preventDefault());
  window.addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    $("veil").hidden = true;
    take([...event.dataTransfer.files]);
  });
  window.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])].filter((file) => file.type.startsWith("image/"));
    if (files.length) take(files);
  });
}

// The run's name and its classes; the list of them is on the photos tab.
function showHeader(model) {
  const count = model.classes.length, few = model.classes.slice(0, 5).join(", ");
  const classes = count ? [count > 5 ? `${count.toLocaleString("en")} ${model.several_labels ? "labels" : "classes"}: ${few}, …` : few] : [];
  document.title = `${model.name || "vitkit"} · vitkit`;
  $("name").textContent = model.name || "vitkit";
  $("model-name").textContent = [model.variant ?? "ViT", `${(model.parameters / 1e6).toFixed(1)}M parameters`, ...classes].join(" · ");
}

setUpToken();
setUpInputs();
try {
  const model = await (await call("v1/model")).json();
  showHeader(model);
  await setUpTabs({ model, takePhoto: setUpCamera((file) => take([file])) });
} catch (error) {
  if (!(error instanceof Problem)) console.warn(error);
  explain($("trouble"), error instanceof Problem ? error : new Problem("ServerError", ""));
}
document.documentElement.dataset.ready = "true";
