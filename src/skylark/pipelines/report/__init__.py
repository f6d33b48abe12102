"""What happens in topics and consumer groups, as figures: on the terminal, as Parquet files, as a page with charts.

`gathering` lets Spark count and makes one `figures.Report` of it; `terminal`, `page` and `tables` show it.
"""
