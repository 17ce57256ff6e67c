// The model, in a thread of its own: ONNX Runtime Web (compiled to WebAssembly) and the weights, both from this folder.

import * as ort from "./ort.js";
import { download, inflate, useToken } from "./files.js";

let session = null;

async function load({ files, token }) {
  useToken(token);
  const total = files.runtime.bytes + files.model.bytes;
  let done = 0;
  const progress = (bytes) => postMessage({ kind: "progress", share: Math.min(1, (done += bytes) / total) });
  const [runtime, model] = await Promise.all([
    download(files.runtime.name, progress).then(inflate),
    download(files.model.name, progress),
  ]);
  ort.env.wasm.wasmBinary = runtime.buffer;
  // More threads need headers that a plain file server does not send: see docs/explore.md.
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
  session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
  postMessage({ kind: "ready", threads: ort.env.wasm.numThreads });
}

async function run({ id, pixels, shape, keep }) {
  const start = performance.now();
  const found = await session.run({
    pixels: new ort.Tensor("float32", pixels, shape),
    keep: new ort.Tensor("float32", keep, [keep.length]),
  });
  const outputs = Object.fromEntries(Object.entries(found).map(([name, { data }]) => [name, data]));
  const buffers = new Set(Object.values(outputs).map((data) => data.buffer));
  postMessage({ kind: "result", id, outputs, milliseconds: performance.now() - start }, [...buffers]);
}

self.addEventListener("message", async ({ data }) => {
  try {
    await (data.kind === "load" ? load(data) : run(data));
  } catch (error) {
    postMessage({ kind: "error", id: data.id, message: error?.message ?? String(error) });
  }
});
