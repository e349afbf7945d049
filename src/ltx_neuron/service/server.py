"""The API's server process, and the worker that it supervises."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address

import uvicorn

from ltx_neuron.errors import UserError, os_reason
from ltx_neuron.service.database import StorageError
from ltx_neuron.service.queue import Queue

MAX_CONNECTIONS = 200  # uvicorn answers 503 on further ones
_KEEP_ALIVE_SECONDS = 5
_END_SECONDS = 30  # for a worker to end, before it is killed
_LONGEST_WAIT = 30.0  # maximum delay before a worker that crashes at once is restarted
_LONG_ENOUGH = 60.0  # a worker that ran longer is restarted at once


class Server(uvicorn.Server):
    """uvicorn's server. When it listens, it prints its addresses: port 0 is any free port."""

    def __init__(self, config: uvicorn.Config, has_page: bool):
        super().__init__(config)
        self.has_page = has_page

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(*addresses(host, port, self.has_page), sep="\n", flush=True)


def addresses(host: str, port: int, has_page: bool) -> list[str]:
    """The lines that say how to reach a service which listens on an IP address of this machine."""
    name, address = f"[{host}]" if ":" in host else host, ip_address(host)
    site = socket.gethostname() if address.is_unspecified else name
    lines = [f"serving: http://{name}:{port}/v1"]
    lines += [f"page: http://{site}:{port}/"] if has_page else []
    has_screen = sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if address.is_loopback and not has_screen:
        lines += [
            "This machine has no screen. If you did not log in with -L, type on your own computer,"
            "and leave open:",
            f"  ssh -L {port}:{name}:{port} {os.environ.get('USER', 'USER')}@MACHINE",
            f"MACHINE is its name in your ssh. Then open http://127.0.0.1:{port}/ there.",
        ]
    return lines


def check_port(host: str, port: int) -> None:
    """Raise UserError if no server can listen on an address of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
            listener.bind(address)
    except OSError as error:
        raise UserError(
            f"--port {port} of --host {host}: {os_reason(error)}\nType another port, as in"
            " --port 8001, or --port 0 for any free one"
        ) from None


def serve(app: Callable, host: str, port: int, has_page: bool) -> None:
    """Answer requests until a signal ends the process."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_KEEP_ALIVE_SECONDS,
    )
    Server(config, has_page).run()


def worker_name(pid: int) -> str:
    return f"{socket.gethostname()[:40]}:{pid}"


@contextmanager
def supervise_worker(command: list[str], queue: Queue) -> Iterator[None]:
    """Keep a worker running while the block runs. If it dies, its jobs are released at once."""
    ending, process = threading.Event(), None

    def keep() -> None:
        nonlocal process
        wait = 1.0
        while not ending.is_set():
            began = time.monotonic()
            print("the worker starts: the page and the API take jobs already", flush=True)
            # Its stdin closes when this process ends: errors.end_with_parent.
            process = subprocess.Popen(command, stdin=subprocess.PIPE)
            code = process.wait()
            if process.stdin:
                process.stdin.close()
            while True:
                with suppress(StorageError):  # else no worker could start
                    queue.release_worker(worker_name(process.pid), crashed=True)
                    break
                if ending.wait(1.0):
                    break
            if ending.is_set():
                return
            wait = 1.0 if time.monotonic() - began > _LONG_ENOUGH else wait
            print(f"the worker ended with {code}; a new one starts in {wait:g} s", flush=True)
            ending.wait(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    thread = threading.Thread(target=keep, name="worker")
    thread.start()
    try:
        yield
    finally:
        ending.set()
        if process and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            thread.join(_END_SECONDS)
            process.kill()
        thread.join()
