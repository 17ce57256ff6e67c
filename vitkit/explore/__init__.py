"""The explorable page: a static folder in which a real ViT runs in the browser.

`graph.py` is the model as a graph with everything that the page shows as outputs, `sixteen.py` writes it with 16-bit
weights, `examples.py` what the page shows before the model is loaded, and `page/` is the page itself: plain ES modules,
no build step. `vendor/` holds ONNX Runtime Web, compressed; `runtime.py` knows its version, licence and checksums.

What does not belong here: choosing photos and writing the folder (jobs/explore.py), and anything that needs a server.
"""
