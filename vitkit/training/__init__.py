"""RECIPE -> WEIGHTS: recipes, optimizer, loss, the training loop, its state, and the run folder.

Not here: reading and augmenting images (data), measuring (evaluation), printing (cli).
"""
