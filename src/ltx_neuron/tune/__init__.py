"""Tries on this device what a profile may choose, and keeps what is fastest and right:
ltx-neuron tune

The scripts read what it chose (tuned_settings.py); all else is run by the command alone."""
