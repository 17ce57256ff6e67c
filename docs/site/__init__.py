"""The site that `make docs` builds: pages of docs/, the book, and reference pages made from the code.

What does not belong here: text. A page is a Markdown file in docs/ or a chapter in book/; this package gathers them.
"""
