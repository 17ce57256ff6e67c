"""RECIPE -> WEIGHTS: recipes, optimizer, loss, the training loop, its state, and the run folder.

What does not belong here: reading and augmenting images (data), measuring (evaluation), printing (cli).
"""
