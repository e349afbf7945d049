"""The API process's worker: it watches its parent before its imports, which take seconds."""

from ltx_neuron import errors

if __name__ == "__main__":
    errors.end_with_parent(seconds=30.0)  # for it to end after its parent has died
    from ltx_neuron.serve.__main__ import main

    errors.run(main)
