"""The report: JSON, Markdown, terminal; read back and put side by side.

page/            the report as one page of HTML
advice.py        what that says, in words and tables
write.py         the report: JSON, Markdown, page, terminal
reading.py       a report read back, or one line that says why not
forms.py         what stands in it beside its rows, part by part
side_by_side.py  several reports in one
breakdown.py     why not more: from τ down to the speedup
sections.py      its later parts: categories, definitions, requests, gates
tables.py        numbers and tables in Markdown
"""
