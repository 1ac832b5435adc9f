"""The report as one page of HTML, made from what report.json says and from nothing else."""
