"""Known failures of the Neuron runtime and compiler: patterns, meanings and remedies.

Sources: nrt_status.h and the runtime's troubleshooting page (status numbers and names), the
compiler's error-code pages, and users' reports. A status number appears as "status=4", its name as
NRT_RESOURCE.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ltx_neuron.errors import RunError
from ltx_neuron.invocation import command


class DeviceFailure(RunError):
    """A known failure of the device, its driver or its compiler; the message has the remedy."""


class Known(NamedTuple):
    """A failure: status numbers, a pattern of its texts, its meaning for a user, the remedy."""

    pattern: str
    meaning: str
    advice: str
    statuses: tuple[int, ...] = ()


_RESET = "restart the instance if it comes again (sudo reboot); the core stays unusable until then"
_SMALLER = (
    f"compile a smaller size ({command('plan')} says which fit), or use a profile that holds"
    " one model at a time"
)
# The first row with a matching text counts, else the first with the number: a text is more precise
# than a number, and the same text occurs with different numbers.
TABLE = (
    # The device: in use, absent, or full
    Known(
        r"[Cc]ore\(s\) not available|[Cc]ores?.{0,40}(in use|held by)|NRT_EXEC_NC_BUSY",
        "another process holds the cores",
        "see which: neuron-ls; end it, wait a few seconds and run the command again",
        (1005,),
    ),
    Known(
        "no neuron device|[Nn]euron [Dd]river|Runtime could not be initialized|nrt_init.*failed",
        "the Neuron driver or its devices cannot be opened",
        "check them: neuron-ls; install or reload the driver: sudo modprobe neuron",
    ),
    Known(
        "NRT_RESOURCE|Allocation Failure|[Ff]ailed to alloc(ate)? DEVICE memory|"
        "out of (device )?memory",
        "the device's memory is full",
        _SMALLER + "; close other programs on the cores (neuron-ls)",
        (4,),
    ),
    Known(
        "NRT_FAIL_HOST_MEM_ALLOC|[Ff]ailed to allocate HOST memory",
        "the host's memory is full or fragmented",
        "end other programs, then: echo 1 | sudo tee /proc/sys/vm/compact_memory",
        (11,),
    ),
    # Launching a run
    Known(
        "NRT_TIMEOUT",
        "a run did not end in time",
        "a first run may take minutes: export NEURON_RT_EXEC_TIMEOUT=1800; if it comes again on a"
        " warm run, a rank hangs: end the process, wait a few seconds and run the command again",
        (5,),
    ),
    Known(
        "NRT_QUEUE_FULL|Execution Queue Full",
        "too many launches wait",
        "wait for the device more often: --profile-set drain_every=8",
        (7,),
    ),
    Known(
        "NRT_LOAD_NOT_ENOUGH_NC",
        "fewer cores than the graph was compiled for",
        "count them: neuron-ls; type: unset NEURON_RT_NUM_CORES; check NEURON_RT_VISIBLE_CORES and"
        " NEURON_LOGICAL_NC_CONFIG",
        (9,),
    ),
    # A graph for another installation or machine
    Known(
        "NRT_UNSUPPORTED_NEFF_VERSION",
        "the graph was compiled by another SDK than this runtime's",
        "delete the graph's folder and compile again with the installed SDK",
        (10,),
    ),
    Known(
        "NRT_UNINITIALIZED|NRT_CLOSED",
        "the runtime was closed in this process",
        "start a new process",
        (13, 14),
    ),
    Known(
        "NRT_INVALID|NRT_EXEC_BAD_INPUT",
        "the runtime refused the graph or its inputs",
        "delete the graph's folder, compile again with the installed SDK, and check that"
        " NEURON_LOGICAL_NC_CONFIG is the one it was compiled for",
        (2, 1002),
    ),
    # During a run
    Known(
        "NRT_EXEC_COMPLETED_WITH_NUM_ERR",
        "a run produced NaN",
        f"check the sharded weights: {command('verify')}",
        (1003,),
    ),
    Known(
        "NRT_HW_ERROR|NRT_EXEC_UNIT_UNRECOVERABLE|NRT_EXEC_HW_ERR|"
        "NRT_EXEC_COMPLETED_WITH_ERR|NRT_EXEC_OOB",
        "the core failed",
        "run the command again; " + _RESET,
        (6, 101, 1004, 1006, 1200, 1201, 1202, 1203, 1204, 1205),
    ),
    Known(
        "NRT_NETWORK_PROXY_FAILURE|Failed to bind|Address already in use|ncclInitGlobalComm failed",
        "the cores could not find each other",
        "wait a minute for the last run's ports, and run the command again",
        (1206,),
    ),
    # neuronx-cc: a code identifies the failed pass; the last row matches any other code
    Known(
        "NCC_EXTP004|NCC_EBVF030|NCC_EVRF007|instruction.{0,20}limit",
        "the graph has more instructions than the compiler allows",
        "use smaller graphs: --profile-set blocks_per_graph=2, then 1; or a smaller size, or more"
        " ranks",
    ),
    Known(
        "NCC_ISMP902",
        "the compiler does not work with the installed islpy",
        "pip install 'islpy<2026.2'",
    ),
    Known(
        "NCC_EOOM00[12]|NCC_EVRF009|NCC_EXSP001",
        "the compiled graph would not fit the device's memory",
        _SMALLER,
    ),
    Known(
        "NCC_[A-Z]{4}[0-9]{3}",
        "the compiler refused the graph",
        "look its code up in the compiler's error pages",
    ),
)


def known(text: str) -> Known | None:
    """The table's row for an error's text, or None."""
    statuses = {int(number) for number in re.findall(r"status\s*[=:]\s*(\d+)", text)}
    rows = [row for row in TABLE if re.search(row.pattern, text)]
    return next(iter(rows or [row for row in TABLE if statuses & {*row.statuses}]), None)


def failure(error: BaseException) -> DeviceFailure | None:
    """The known failure of an error or of one of its causes; None if there is none."""
    # The chain of contexts may be a cycle.
    chain, link = [], error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in reversed(chain):  # the first cause is the most specific
        if isinstance(link, RuntimeError | OSError) and (row := known(str(link))):
            lines = str(link).strip().splitlines()
            line = next((line for line in lines if known(line) is row), lines[0])
            return DeviceFailure(f"{row.meaning}: {line.strip()}\nWhat to do: {row.advice}")
    return None


@contextmanager
def explained() -> Iterator[None]:
    """Convert known failures inside the block to DeviceFailure; other errors pass unchanged."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        # A RunError has a message already, which may quote a known text.
        if not isinstance(error, RunError) and (explanation := failure(error)):
            raise explanation from error
        raise
