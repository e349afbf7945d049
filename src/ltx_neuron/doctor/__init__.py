"""Finds what blocks a generation on this machine, each with the command that corrects it:
python -m ltx_neuron.doctor

`system` reads facts about the machine, `sdk` knows the Neuron SDK's releases, `neuron` and `checks`
turn facts into findings.
"""
