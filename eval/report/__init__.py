"""The report: JSON, Markdown, terminal, page; reading and combining.

page/            the report as one page of HTML
plots/           its plots
write.py         the report and its files
view.py          the view that all renderers share: results with their names, tables of cells
columns.py       every table, column by column
sections.py      the sections in their order, with text, tables and plots
text.py          Markdown and terminal
reading.py       reading a report.json back
recorded.py      reading losslessness checks back
forms.py         the form of the extras beside its rows
side_by_side.py  several reports in one
breakdown.py     speedup breakdown: from τ down to the speedup
advice.py        which other tree to take, in words
notes.py         notes on how to read the numbers
tables.py        numbers for reading, and tables in Markdown
"""
