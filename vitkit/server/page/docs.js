// Show openapi.json as a page, without scripts from other sites: every route with examples, and a form that tries it.

import { call, Problem } from "./api.js";
import { $, element, explain } from "./dom.js";
import { setUpToken } from "./token.js";

let whole = {};      // openapi.json
const resolve = (schema) => (schema?.$ref ? whole.components.schemas[schema.$ref.split("/").at(-1)] : schema);
const values = (schema = {}) => {
  const one = resolve(schema.anyOf?.find((part) => part.type !== "null") ?? schema);
  return one.enum?.join(" | ") ?? one.type ?? "";
};

function table(head, rows) {
  const line = (kind, cells) => element("tr", {}, ...cells.map((text) => element(kind, { textContent: text })));
  return element("div", { className: "scroll" },
    element("table", {}, element("thead", {}, line("th", head)), element("tbody", {}, ...rows.map((row) => line("td", row)))));
}

// Text whose `words` are code.
const prose = (text) => text.split("`").map((part, i) => (i % 2 ? element("code", { textContent: part }) : part));

// JSON in which what fits on a line has one.
function compact(value, pad = "") {
  const flat = JSON.stringify(value, null, 1).replace(/\n\s*/g, " ");
  if (flat.length + pad.length <= 96 || typeof value !== "object") return flat;
  const list = Array.isArray(value), inner = `${pad}  `;
  const parts = list ? value.map((one) => compact(one, inner)) : Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${compact(one, inner)}`);
  return `${list ? "[" : "{"}\n${parts.map((part) => inner + part).join(",\n")}\n${pad}${list ? "]" : "}"}`;
}

function code(text, label) {
  const block = element("pre", { tabIndex: 0 }, element("code", { textContent: text }));
  block.setAttribute("aria-label", label);
  return block;
}

// The parameters that a route cannot do without, with their first value.
const needed = (route) => (route.parameters ?? []).filter((p) => p.required)
  .map((p) => [p.name, values(p.schema).split(" | ")[0]]);

const picture = (route) => Boolean(route.responses[200]?.content?.["image/png"]);

function address(path, route) {
  const query = needed(route).filter(([name]) => !path.includes(`{${name}}`));
  return new URL(path.slice(1).replace(/\{\w+\}/, "0"), location.href).href + (query.length ? `?${new URLSearchParams(query)}` : "");
}

// The ways to send a request from a terminal and from Python.
function examples(path, route) {
  const secret = sessionStorage.getItem("token") ? "-H \"Authorization: Bearer $VITKIT_TOKEN\" " : "";
  const curl = (send) => `curl ${secret}${send}'${address(path, route)}'${picture(route) ? " -o answer.png" : ""}`;
  if (!route.requestBody) return [code(curl(""), "Example for a terminal")];
  const several = path.endsWith("predict") || path.endsWith("embed") || path.endsWith("similar");
  const lines = [curl("-F files=@photo.jpg "), ...(several ? [curl("-F files=@one.jpg -F files=@two.jpg ")] : []),
    curl("-H 'Content-Type: image/jpeg' --data-binary @photo.jpg ")];
  const python = ["import json, os, urllib.request", "",
    `headers = {"Content-Type": "image/jpeg"${secret ? ", \"Authorization\": f\"Bearer {os.environ['VITKIT_TOKEN']}\"" : ""}}`,
    `request = urllib.request.Request("${address(path, route)}", open("photo.jpg", "rb").read(), headers)`,
    picture(route) ? "open(\"answer.png\", \"wb\").write(urllib.request.urlopen(request).read())" : "print(json.load(urllib.request.urlopen(request)))"];
  return [element("h3", { textContent: "From a terminal" }), code(lines.join("\n"), "Examples for a terminal"),
    element("h3", { textContent: "From Python" }), code(python.join("\n"), "Example for Python")];
}

// A form that sends the request and shows the answer.
function trial(path, route) {
  const said = element("div", { className: "said" }), inputs = [];
  said.setAttribute("role", "status");
  const form = element("form", { className: "try" });
  let file = null;
  if (route.requestBody) {
    file = element("input", { type: "file", accept: "image/*", required: true });
    form.append(element("label", {}, "image", file));
  }
  for (const p of route.parameters ?? []) {
    const schema = resolve(p.schema.anyOf?.find((part) => part.type !== "null") ?? p.schema);
    const optional = p.required ? [] : [new Option(p.schema.default === undefined ? "–" : String(p.schema.default), "")];
    const input = schema.enum ? element("select", {}, ...optional, ...schema.enum.map((one) => new Option(one, one)))
      : element("input", { placeholder: p.required ? "" : String(p.schema.default ?? "–"), required: p.required, size: 8 });
    inputs.push([p.name, input]);
    form.append(element("label", {}, p.name, input));
  }
  form.append(element("button", { className: "main", textContent: "Send" }));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const query = new URLSearchParams(inputs.filter(([name, input]) => input.value && !path.includes(`{${name}}`)).map(([name, input]) => [name, input.value]));
    const place = inputs.reduce((found, [name, input]) => found.replace(`{${name}}`, encodeURIComponent(input.value)), path.slice(1));
    said.textContent = "Waiting…";
    try {
      const answer = await call(query.size ? `${place}?${query}` : place, { file: file?.files[0] });
      const blob = await answer.blob();
      if (blob.type.startsWith("image/")) said.replaceChildren(element("img", { src: URL.createObjectURL(blob), alt: `The answer of ${path}` }));
      else {
        const text = blob.type.startsWith("application/x-") ? `${blob.size} bytes of ${blob.type}` : await blob.text();
        said.replaceChildren(code(blob.type.startsWith("application/json") ? compact(JSON.parse(text)).slice(0, 20_000) : text, "The answer"));
      }
    } catch (error) {
      said.replaceChildren(code(error.message || error.headline || "That did not work.", "The error"));
    }
  });
  return element("details", {}, element("summary", { textContent: "Try it" }), form, said);
}

function show(path, verb, route) {
  const article = element("article", {},
    element("h2", {}, element("span", { className: "verb", textContent: verb.toUpperCase() }), element("code", { textContent: path })),
    ...(route.description ?? "").split("\n\n").map((text) => element("p", {}, ...prose(text))));
  article.id = path.slice(1);
  if (route.parameters?.length) {
    article.append(table(["parameter", "values", "default", ""], route.parameters.map((p) =>
      [p.name, values(p.schema), p.required ? "required" : String(p.schema.default ?? "–"), p.description ?? ""])));
  }
  article.append(...examples(path, route));
  const example = route.responses[200]?.content?.["application/json"]?.example;
  if (example) article.append(element("h3", { textContent: "Answer" }), code(compact(example), "Example of an answer"));
  article.append(trial(path, route), element("details", {}, element("summary", { textContent: "Statuses" }),
    table(["status", "meaning"], Object.entries(route.responses).map(([status, about]) => [status, about.description]))));
  return article;
}

setUpToken();
try {
  whole = await (await call("openapi.json")).json();
  $("about").textContent = `${whole.info.description} Send images as multipart/form-data in the field "files", which you can `
    + "repeat, as JSON in base64, or one image as the whole body. An error is a JSON object with one sentence, \"error\", and its \"kind\".";
  $("list").replaceChildren(...Object.keys(whole.paths).map((path) =>
    element("li", {}, element("a", { href: `#${path.slice(1)}`, textContent: path }))));
  $("routes").replaceChildren(...Object.entries(whole.paths).flatMap(([path, verbs]) =>
    Object.entries(verbs).map(([verb, route]) => show(path, verb, route))));
} catch (error) {
  $("routes").replaceChildren(element("div", { className: "message" }));
  explain($("routes").firstChild, error instanceof Problem ? error : new Problem("ServerError", ""));
}
document.documentElement.dataset.ready = "true";
