"""The report: one view of a result and one list of sections, which the terminal, Markdown and the page render.

write.py      the report and its files
view.py       a result as text, and its speedup breakdown from τ to the speedup
sections.py   the sections in order, each with sentences, a table or a plot
render.py     terminal, Markdown and page
"""
