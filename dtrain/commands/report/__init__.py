"""`dtrain report` and `dtrain compare`: runs as one page that needs no network, and in the terminal. No torch.

command, compare    the arguments of the two commands; compare's tables and small plots
run_files           a run's directory, read while it may still go
measures            the charts that the fields of the metrics make; numbers as text
results             the runs, their differences and their results: tables for both commands
charts              curves and histograms for plotly, thinned
sections            the parts of the page that are text: answers, groups, tables
mesh                the ranks as a picture
page                the whole page; page.css, page.js
live                the page on loopback, following the runs
"""
