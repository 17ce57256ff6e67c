"""ONNX Runtime Web, as it is in `vendor/`: https://www.npmjs.com/package/onnxruntime-web, MIT licence.

The smallest build that runs the model: WebAssembly only, no WebGPU. `ort.js` is `dist/ort.wasm.bundle.min.mjs`,
unchanged; `ort.wasm.gz` is `dist/ort-wasm-simd-threaded.wasm`, compressed, which the page inflates. To update, replace
the files and this table; a test compares them.
"""

from __future__ import annotations

from importlib import resources

VERSION = "1.30.0"
WASM = "ort.wasm.gz"
SHA256 = {  # of what npm has: ort.wasm.gz is inflated first
    "ort.js": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    WASM: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
    "ort-LICENSE.txt": "2f07c72751aed99790b8a4869cf2311df85a860b22ded05fa22803587a48922c",
}


def files() -> dict[str, bytes]:
    """Return the files of the runtime, by name."""
    folder = resources.files("vitkit.explore").joinpath("vendor")
    return {name: folder.joinpath(name).read_bytes() for name in SHA256}
