"""ltx-neuron doctor: finds problems that block a generation on this machine, and prints the command
that fixes each.

`system` reads facts about the machine, `sdk` lists the Neuron SDK's releases, and `neuron` and
`checks` convert facts to findings.
"""
