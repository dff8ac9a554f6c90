"""Where captions go: lines of JSON, parquet, WebDataset tars, files of their own."""
