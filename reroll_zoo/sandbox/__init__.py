"""Where untrusted programs run. `docs/security.md` says what contains them, and what does not."""
