"""The replaceable parts of the model: norms, activations, residual branches, positions, pools.

Each part is a row of a visible table, chosen by a field of ViTConfig; the first row is the paper's. Equations do not
belong here (model/vit.py), nor does anything about files (checkpoints).
"""
