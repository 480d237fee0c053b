"""Where code runs: local threads or Ray actors behind one interface; devices and leases."""
