"""The report: JSON, Markdown, terminal, page; read back and put side by side.

page/            the report as one page of HTML
plots/           its plots
write.py         the report and its files
view.py          the view that all renderers share: results with their names, tables of cells
columns.py       every table, column by column
sections.py      the sections in their order, with text, tables and plots
text.py          Markdown and terminal
reading.py       a report read back, or one line that says why not
recorded.py      losslessness checks read back
forms.py         what stands in it beside its rows, part by part
side_by_side.py  several reports in one
breakdown.py     why not more: from τ down to the speedup
advice.py        which other tree to take, in words
notes.py         how the numbers are to be read
tables.py        numbers for reading, and tables in Markdown
"""
