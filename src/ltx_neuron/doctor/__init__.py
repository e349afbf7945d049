"""ltx-neuron doctor: finds what blocks a generation here, and prints the command that fixes it.

`system` reads facts about the machine, `sdk` lists the Neuron SDK's releases, and `neuron` and
`checks` convert facts to findings.
"""
