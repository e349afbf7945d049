"""ltx-neuron serve: the service's flags, and the roles of its processes."""
