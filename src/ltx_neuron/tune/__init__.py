"""ltx-neuron tune measures a profile's settings on this device and saves the fastest correct ones.

Other commands import only tuned_settings.py, which reads the saved settings."""
