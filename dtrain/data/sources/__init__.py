"""Sources of data: files, globs, URLs and datasets of the hub.

sources      a recipe's data to rows: `open_rows`
files        the files of a path; rows of JSON Lines, JSON and CSV files
parquet      rows of parquet files
chunk        rows of a file that are read together
columns      a file's columns under our names
hub          datasets of the hub, downloaded into its cache
hub_splits   the files of a split in a repository of the hub
urls         files behind URLs, copied into the data cache
"""
