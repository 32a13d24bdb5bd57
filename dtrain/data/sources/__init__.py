"""Sources of data: files, globs, URLs and datasets of the hub.

sources      from the `data` section of a recipe to rows: `open_rows`
files        the files of a path; rows of JSON Lines, JSON, CSV and parquet files, in chunks
columns      renaming of a file's columns, and suggestions for rows of unknown format
reading      renaming of columns and a user's function, in the order in which a row passes them
hub          datasets of the hub: the files of a split, downloaded into the hub's cache
urls         files behind URLs, copied into the data cache
"""
