"""Latency reports: recorder.py records a run, table.py prints reports, plot.py draws them."""
