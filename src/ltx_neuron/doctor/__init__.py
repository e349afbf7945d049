"""What is wrong with this machine, these files and these artifacts, each with the command that
mends it: python -m ltx_neuron.doctor

`system` reads the machine, `sdk` knows the Neuron SDK's releases, `neuron` and `checks` turn facts
into findings.
"""
