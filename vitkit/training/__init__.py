"""RECIPE -> WEIGHTS: recipes, schedule, optimiser, loss, averaging, the loop, its state, and the run folder.

What does not belong here: how an image is read or varied (data), how a number is measured (evaluation), printing (cli).
"""
