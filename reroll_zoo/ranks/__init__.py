"""What all strategies need whose ranks hold one model together."""
