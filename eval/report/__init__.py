"""The report: JSON, Markdown, terminal, page; reading and combining.

page.py          the report as one page of HTML, from the template, styles and script beside it
write.py         the report and its files
view.py          the view that all renderers share: results with their names, tables of cells
columns.py       every table, column by column
sections.py      the sections in their order, with text, tables and plots
prose.py         the texts on sections and numbers
plots.py         the page's plots
tree_plot.py     the page's plot of a tree
text.py          Markdown and terminal
reading.py       reading a report.json back
side_by_side.py  several reports in one
operating.py     all users' tokens a second against one's, by load
breakdown.py     speedup breakdown: from τ down to the speedup
"""
