// Ask for the server's token when a request needs it.

import { onUnauthorised } from "./api.js";
import { $, element } from "./dom.js";

export function setUpToken() {
  const input = element("input", { id: "token", type: "password", autocomplete: "off" });
  const form = element("form", { method: "dialog" },
    element("h2", { id: "token-title", textContent: "This server requires a token" }),
    element("label", {}, "Token ", input),
    element("p", { className: "quiet", textContent: "Ask the person who runs the server. The token is kept until you close this tab." }),
    element("div", { className: "buttons" }, element("button", { className: "main", value: "use", textContent: "Continue" })));
  const dialog = element("dialog", { id: "ask-token" }, form);
  dialog.setAttribute("aria-labelledby", "token-title");
  document.body.append(dialog);
  let asked = null;      // several requests may be refused at once; one answer serves all of them
  onUnauthorised(() => {
    asked ??= new Promise((resolve) => {
      dialog.returnValue = "";
      dialog.onclose = () => {
        asked = null;
        resolve(dialog.returnValue === "use" ? $("token").value.trim() : null);
      };
      dialog.showModal();
    });
    return asked;
  });
}
