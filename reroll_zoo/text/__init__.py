"""Answers in words: multiple choice, overlap with a reference, JSON of a form."""
