"""Finds what blocks a generation on this machine, each with the command that corrects it:
ltx-neuron doctor

`system` reads facts about the machine, `sdk` knows the Neuron SDK's releases, `neuron` and `checks`
turn facts into findings.
"""
