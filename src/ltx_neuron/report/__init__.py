"""Latency reports: recorder.py records a run, table.py prints and compares reports, plot.py draws
them."""
