"""Rows of tables: Parquet files, and data sets of the Hugging Face hub."""
