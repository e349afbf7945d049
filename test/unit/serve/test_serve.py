"""The command of the service: its flags, and the end of a supervised worker."""

import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from ltx_neuron.errors import UserError
from ltx_neuron.serve.__main__ import build_parser, check, database, main
from ltx_neuron.service.server import addresses, check_port

LOCAL = "127.0.0.1", "127.0.0.2", "localhost", "::1"


def parsed(*words: str):
    return build_parser().parse_args(list(words))


def test_the_database_is_a_file_however_it_is_spelled():
    assert database(parsed("--data-dir", "/data")) == Path("/data/queue.sqlite")
    for name in ("/fast/q.sqlite", "sqlite:////fast/q.sqlite"):
        assert database(parsed("--database", name)) == Path("/fast/q.sqlite")
    for name in ("q.sqlite", "sqlite:///q.sqlite"):
        assert database(parsed("--database", name)) == Path("q.sqlite").absolute()
    for url in ("postgresql://me@host/jobs", "postgresql:///jobs"):
        with pytest.raises(UserError, match="the queue uses SQLite; type a file's path"):
            database(parsed("--database", url))


@pytest.mark.parametrize("host", [*LOCAL, "0.0.0.0", "192.168.1.7", "::", "my-machine"])
def test_only_this_machine_is_served_without_a_token(tmp_path, host):
    words = ["--checkpoint-path", "CKPT", "--gemma-root", "DIR", "--data-dir", str(tmp_path), "--host", host]
    check(parsed(*words, "--tokens-file", "tokens.json"))
    check(parsed(*words, "--role", "worker"))  # it listens to nobody
    with nullcontext() if host in LOCAL else pytest.raises(UserError, match="--new-token NAME"):
        check(parsed(*words))


def test_a_port_or_host_that_cannot_be_served_is_refused_before_anything_starts(tmp_path):
    words = ["--checkpoint-path", "CKPT", "--gemma-root", "DIR", "--data-dir", str(tmp_path)]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port} of --host 127.0.0.1: Address already in use\n.*--port 0"):
            main([*words, "--port", str(port)])
        assert not [*tmp_path.iterdir()]  # no queue, and no lock
    check_port("127.0.0.1", port)  # now it is free
    for port in ("-1", "65536"):
        with pytest.raises(UserError, match=f"--port {port}: wanted 0 to 65535"):
            check(parsed(*words, "--port", port))
    with pytest.raises(UserError, match="--host no-such-host.invalid: "):
        check_port("no-such-host.invalid", 0)


def test_the_page_has_an_address_and_a_machine_without_a_screen_a_tunnel(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("os.environ", {"USER": "ubuntu", "DISPLAY": ":0"})
    lines = ["serving: http://127.0.0.1:81/v1", "page: http://127.0.0.1:81/"]
    assert addresses("127.0.0.1", 81, True) == lines and addresses("127.0.0.1", 81, False) == lines[:1]
    monkeypatch.setattr("os.environ", {"USER": "ubuntu"})
    assert addresses("127.0.0.1", 81, True)[:2] == lines
    assert "  ssh -L 81:127.0.0.1:81 ubuntu@MACHINE" in addresses("127.0.0.1", 81, True)
    assert "ssh -L 81:[::1]:81 " in "\n".join(addresses("::1", 81, True))
    # Others reach it by its name.
    assert addresses("0.0.0.0", 81, True)[1:] == [f"page: http://{socket.gethostname()}:81/"]


def test_a_worker_that_is_still_importing_ends_with_its_parent():
    command = [sys.executable, "-m", "ltx_neuron.serve.supervised", "--role", "worker"]
    # Its input ends as where the parent is killed; so does it, before the service's modules could handle a signal.
    process = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60)
    assert (process.returncode, process.stderr) == (-signal.SIGTERM, b"")


SUPERVISED = """
import sys, time
from ltx_neuron import errors

def main():
    errors.end_with_parent(0.5)
    print("begun", flush=True)
    try:
        time.sleep(60)
    except errors.Terminated:
        print("tidied up", flush=True)
        time.sleep(60 * ("stubborn" in sys.argv))
        raise

errors.run(main)
"""


@pytest.mark.parametrize(("word", "code"), [("", 143), ("stubborn", 1)])
def test_a_supervised_process_tidies_up_when_its_parent_has_died_and_ends_in_any_case(word, code):
    command = [sys.executable, "-c", SUPERVISED, word]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.2)
    assert process.poll() is None
    process.stdin.close()  # as the system does when the parent is killed
    assert process.wait(20) == code and process.stdout.read() == "tidied up\n"
