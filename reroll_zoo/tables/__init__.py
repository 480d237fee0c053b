"""Rows of tables that other libraries read: Parquet files, data sets of the Hugging Face hub."""
