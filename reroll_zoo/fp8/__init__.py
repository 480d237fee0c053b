"""Linear layers of the embedded engine in 8-bit floats (`engine.precision: fp8`)."""
