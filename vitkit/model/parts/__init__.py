"""The replaceable parts of the model: norms, activations, residual branches, positions, pools.

Each part is a row of a visible table, chosen by a field of ViTConfig; the first row is the paper's.

What does not belong here: equations (model/vit.py), and anything about files (checkpoints).
"""
