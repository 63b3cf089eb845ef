"""What measures a model, and what shows it: nothing here trains or uploads."""
