"""The warm interpreter and what holds its programs. Standard library alone: it is loaded without site-packages."""
