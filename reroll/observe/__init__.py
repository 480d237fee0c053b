"""What happened: metrics, the journal, progress, trackers."""
