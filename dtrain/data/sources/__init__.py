"""Sources of data: files, globs, URLs and datasets of the hub.

sources      a recipe's data to rows: `open_rows`
files        the files of a path; rows of JSON Lines, JSON, CSV and parquet files, in chunks
columns      a file's columns under our names
hub          datasets of the hub: the files of a split, downloaded into the hub's cache
urls         files behind URLs, copied into the data cache
"""
