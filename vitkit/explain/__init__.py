"""Model + pixels -> arrays -> pictures: what a model consists of, what it does to an image, and what it looks at.

Decoding files belongs in data, and text for a terminal in cli. Each kind of array is computed in its own file; only
draw.py imports matplotlib.
"""
