"""The worker that the API process starts. It watches its parent before the imports, which take
seconds."""

from ltx_neuron import errors

_LAST_SECONDS = 30.0  # for a worker to end after its parent has died


def main() -> None:
    errors.end_with_parent(_LAST_SECONDS)
    from ltx_neuron.serve import __main__ as serve

    errors.run(serve.main)


if __name__ == "__main__":
    main()
