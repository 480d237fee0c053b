"""What runs beside an answer in the sandbox. Its modules are shipped there as text: standard library only."""
