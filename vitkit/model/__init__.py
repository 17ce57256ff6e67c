"""The paper: configurations (Table 1), the model itself (Eqs. 1-8), resizing of positions, pruning of heads.

What does not belong here: files of weights (checkpoints), images (data), and anything that makes a finished model
faster (speed).
"""
