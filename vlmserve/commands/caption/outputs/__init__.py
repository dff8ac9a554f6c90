"""The outputs of captions: lines of JSON, parquet, WebDataset tars, and one file per caption."""
