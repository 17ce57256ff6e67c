// Show openapi.json as a page, without scripts from other sites.

const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
const values = (schema = {}) => {
  const one = schema.anyOf?.find((part) => part.type !== "null") ?? schema;
  return one.enum?.join(" | ") ?? one.type ?? one.$ref?.split("/").at(-1) ?? "";
};

function table(head, rows) {
  const line = (kind, cells) => element("tr", {}, ...cells.map((text) => element(kind, { textContent: text })));
  return element("table", {}, element("thead", {}, line("th", head)), element("tbody", {}, ...rows.map((row) => line("td", row))));
}

function example(path, verb, route) {
  const here = new URL(path.slice(1), location.href).href;
  const send = route.requestBody ? "-F files=@photo.jpg " : "";
  const save = route.responses[200]?.content?.["image/png"] ? " -o answer.png" : "";
  const needed = (route.parameters ?? []).filter((p) => p.required).map((p) => `${p.name}=${values(resolve(p.schema)).split(" | ")[0]}`);
  return `curl ${send}'${here}${needed.length ? `?${needed.join("&")}` : ""}'${save}`;
}

let whole = {};
const resolve = (schema) => (schema?.$ref ? whole.components.schemas[schema.$ref.split("/").at(-1)] : schema);

const token = sessionStorage.getItem("token");
const response = await fetch("openapi.json", { headers: token ? { Authorization: `Bearer ${token}` } : {} });
const place = document.getElementById("routes");
if (response.ok) {
  whole = await response.json();
  place.replaceChildren(...Object.entries(whole.paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, route]) => {
    const article = element("article", {},
      element("h2", {}, element("span", { className: "verb", textContent: verb.toUpperCase() }), element("code", { textContent: path })),
      element("p", { textContent: route.description ?? "" }));
    if (route.requestBody) {
      article.append(element("p", { className: "quiet",
        textContent: 'Send images as multipart/form-data in the field "files", or as JSON {"images": [{"name": …, "data": base64}]}.' }));
    }
    if (route.parameters?.length) {
      article.append(table(["parameter", "values", "default"], route.parameters.map((p) =>
        [p.name, values(resolve(p.schema)), p.required ? "required" : String(p.schema.default ?? "–")])));
    }
    article.append(element("pre", {}, element("code", { textContent: example(path, verb, route) })));
    article.append(table(["status", "meaning"], Object.entries(route.responses).map(([code, said]) => [code, said.description])));
    return article;
  })));
} else {
  place.textContent = response.status === 401 ? "This server requires a token: enter it on the home page first." : "openapi.json could not be loaded.";
}
