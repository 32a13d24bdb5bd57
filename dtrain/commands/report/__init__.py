"""`dtrain report` and `dtrain compare`: runs as one page that needs no network, and in the terminal. No torch.

command, compare    the arguments of the two commands; compare's tables and small plots
run_files           a run's directory, read while it may still go
results             the runs, their differences and their results: tables for both commands
charts              the charts that the fields of the metrics make; curves and histograms for plotly, thinned
sections            the data of the parts of the page that are text, in sections.html; the ranks as a picture
page                the page: page.html, page.css, page.js, and thumbnails of the images of prompts
live                the page on loopback, following the runs
"""
