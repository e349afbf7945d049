"""ltx-neuron serve: the flags of the service, and which of its processes this one is."""
