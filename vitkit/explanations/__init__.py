"""Model + pixels -> arrays -> pictures: what a model consists of, what it does to an image, and what it looks at.

What does not belong here: decoding files (data) and terminal output (cli). Arrays are computed in their own files;
only draw.py imports matplotlib.
"""
