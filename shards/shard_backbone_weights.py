"""ltx-neuron shard transformer, as a script of a clone."""

from ltx_neuron.commands import main

if __name__ == "__main__":
    main("shard transformer")
