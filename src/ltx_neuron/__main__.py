"""python -m ltx_neuron, which is ltx-neuron."""

from ltx_neuron.commands import main

if __name__ == "__main__":
    main()
