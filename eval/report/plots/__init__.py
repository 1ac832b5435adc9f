"""The report's plots, as Vega-Lite.

results.py    plots of the rows and of the training
simulated.py  plots of other trees and loads, and of the head along the text
tree.py       a tree, each node with its acceptance
"""
