"""Model + pixels -> arrays -> pictures: what a model is made of, what it does to an image, what it looks at.

What does not belong here: decoding files (data) and text for a terminal (cli). Arrays are computed in their own files;
draw.py alone imports matplotlib.
"""
