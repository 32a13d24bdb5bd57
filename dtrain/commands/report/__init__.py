"""`dtrain report` and `dtrain compare`: runs as one HTML page that needs no network, and in the terminal. No torch.

command, compare    the arguments of the two commands; tables and small plots in the terminal
run_files           a run's directory, which may still be written
results             tables for both commands: the runs, their differences and their results
charts              charts of the metrics: curves and histograms for plotly, thinned
sections            data of the page's sections that are text, for sections.html; pictures of meshes
page                the page: page.html, page.css, page.js, and thumbnails of the images of prompts
live                the page on loopback, updated while the runs continue
"""
