// Calls to the server's API, and its errors in words for people.

const HEADLINES = {
  BadImage: "This file could not be read as an image.",
  TooLarge: "That is more than this server accepts.",
  TooSlow: "The upload took too long.",
  Busy: "The server is busy.",
  InputError: "This model cannot do that.",
  Unauthorised: "The token was not accepted.",
  ServerError: "Something went wrong on the server.",
  Offline: "The server is not responding.",
};
const CURES = {
  BadImage: "Try a JPEG, PNG, WebP, GIF, BMP or TIFF file.",
  ServerError: "Try again. If it keeps happening, tell the person who runs the server.",
  Offline: "Check that it is running and that you are connected.",
};

export class Problem extends Error {
  constructor(kind, sentence, retryAfter = 0) {
    super(sentence);
    this.kind = kind;
    this.headline = HEADLINES[kind] ?? "That did not work.";
    // The advice after the reason is for programs; CURES has advice for this page.
    // A truncated file is in a format that is read, and its reason says what to do.
    const cure = sentence.includes(": truncated: ") ? "" : CURES[kind];
    this.detail = [sentence.split(" Send the file again")[0], cure].filter(Boolean).join(" ");
    this.retryAfter = retryAfter;
  }
}

let askForToken = async () => null;
export const onUnauthorised = (ask) => { askForToken = ask; };

// GET a path, or POST one or several files or an object as JSON to it. A busy server is asked again, and a missing token
// is asked for.
export async function call(path, how = {}) {
  const { file, files = file ? [file] : [], json, signal, tries = 3, onWait } = how;
  const headers = { ...how.headers };
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  let body;
  if (json) {
    body = JSON.stringify(json);
    headers["Content-Type"] = "application/json";
  } else if (files.length) {
    body = new FormData();
    for (const one of files) body.append("files", one, one.name || "photo");
  }
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("Offline", "");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({ error: response.statusText, kind: "ServerError" }));
  if (response.status === 401 && tries > 0) {
    const given = await askForToken();
    if (given) {
      sessionStorage.setItem("token", given);
      return call(path, { ...how, tries: tries - 1 });
    }
  }
  const wait = Number(response.headers.get("Retry-After") ?? 0);
  if (response.status === 503 && tries > 0) {
    onWait?.(Math.max(wait, 1));
    await new Promise((resolve) => { setTimeout(resolve, Math.max(wait, 1) * 1000); });
    if (signal?.aborted) throw new DOMException("gone", "AbortError");
    return call(path, { ...how, tries: tries - 1 });
  }
  throw new Problem(said.kind ?? "ServerError", said.error ?? "", wait);
}

// Parse a .npy file of float32 into { shape, values }.
export function npy(buffer) {
  const length = new DataView(buffer).getUint16(8, true);
  const header = new TextDecoder().decode(new Uint8Array(buffer, 10, length));
  if (!header.includes("'<f4'")) throw new Problem("ServerError", "The server sent values of an unexpected type.");
  const shape = header.match(/'shape': \(([^)]*)\)/)[1].split(",").filter((part) => part.trim()).map(Number);
  return { shape, values: new Float32Array(buffer.slice(10 + length)) };
}

export async function numbers(file, choices, signal) {
  const query = new URLSearchParams({ format: "npy", ...choices });
  return npy(await (await call(`v1/explain?${query}`, { file, signal })).arrayBuffer());
}
