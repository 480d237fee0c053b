"""`reroll rewards try`: a reward tried out before it trains anything."""
