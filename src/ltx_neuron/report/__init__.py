"""Where a run's time goes: recorded (recorder), printed and compared (table), drawn (plot)."""
