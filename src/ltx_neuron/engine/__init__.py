"""Runs jobs: checks, models on the ranks, stages and their steps, decoding, outputs."""
