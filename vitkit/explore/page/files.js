// Files of this folder, with progress, inflated where they are compressed.

// `vitkit serve` may require a token, which its own page has asked for.
let token = typeof sessionStorage === "undefined" ? "" : sessionStorage.getItem("token") ?? "";
export const useToken = (given) => { token = given; };
export const givenToken = () => token;

// `wait` is called with a sentence while the server is still making the file.
export async function download(name, progress = () => {}, wait = () => {}) {
  const answer = await fetch(new URL(name, import.meta.url), token ? { headers: { Authorization: `Bearer ${token}` } } : {});
  if (answer.status === 202) {
    wait((await answer.json()).status);
    await new Promise((resolve) => { setTimeout(resolve, 1000 * Number(answer.headers.get("Retry-After") ?? 1)); });
    return download(name, progress, wait);
  }
  if (answer.status === 401) throw new Error("this server requires a token. Enter it on the server's first page, and come back.");
  if (answer.status === 422) throw new Error((await answer.json()).error);
  if (!answer.ok) throw new Error(`${name} could not be loaded (status ${answer.status}).`);
  const parts = [], reader = answer.body.getReader();
  let length = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    length += value.length;
    progress(value.length);
  }
  const whole = new Uint8Array(length);
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

// Some servers send a .gz file with a header that makes the browser inflate it; then there is nothing left to do.
export async function inflate(bytes) {
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return bytes;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
