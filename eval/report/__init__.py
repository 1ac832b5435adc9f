"""The report: one view of a result and one list of sections, which the terminal, Markdown and the page render.

write.py      the report and its files; reading it back, several side by side
view.py       a result as people read it
breakdown.py  from τ down to the speedup
sections.py   the sections in their order, each with sentences, a table or a plot
plots.py      the five plots
render.py     terminal, Markdown and page
"""
