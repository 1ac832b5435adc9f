"""The report as one page of HTML, from the template, styles and script beside it.

build.py  the page's first numbers, and everything filled into the template
"""
