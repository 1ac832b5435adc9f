"""The report as one page of HTML.

build.py       its sections, filled into the template
names.py       what it calls a row, and how it writes numbers
tables.py      tables: text for the eye, values for sorting and CSV
plots.py       plots of the rows, as Vega-Lite
load.py        what it says of requests that came at a rate
more_plots.py  plots of training
tree_plot.py   a tree, each node with its acceptance
simulated.py   plots of other trees and loads, and of the head along the text
"""
