"""What happened: metrics, the ledger, progress, trackers, the curve."""
