"""The proxy of docs/deployment.md, as the real nginx reads it: /v1/fleet/ alone is passed on, however a path is written."""

import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from lightning_fed.deployment.flower.commands import free_port

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
PAGE = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text()

pytestmark = pytest.mark.skipif(NGINX is None or shutil.which("openssl") is None, reason="needs nginx and openssl")

CONTROL = [
    "/v1/control/list-runs",
    "/v1/control/list-runs%3f/../../fleet/x",
    "/v1/control/list-runs%3F/%2e%2e/%2e%2e/fleet/x",
    "/v1/control/list-runs%23/../../fleet/x",
    "/v1/control/list-runs%00/../../fleet/x",
    "/v1/control/list-runs;/../../fleet/x",
    "/v1/control/list-runs/../../fleet/x",
    "/v1/control/list-runs%2f..%2f..%2ffleet/x",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet%2f..%2fcontrol%2flist-runs",
    "/v1/fleet/%3f/../../control/list-runs",
    "/v1/fleet/..;/control/list-runs",
    "/v1/fleet/..%5ccontrol%5clist-runs",
    "/v1/fleet/%252e%252e/control/list-runs",
    "//v1/control/list-runs",
    "/./v1/control/list-runs",
    "http://localhost/v1/control/list-runs%3f/../../fleet/x",
    "*",
]
"""Requests that mean the Control API to somebody who reads them in another way."""


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[tuple[Callable[[str], int], list[str]]]:
    """Asks nginx for something and returns the status; and what arrives behind it."""
    made = re.search(r"```bash\n(mkdir certificates.*?)```", PAGE, re.DOTALL)
    block = re.search(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
    assert made
    assert block
    subprocess.run(["bash", "-ec", made[1]], cwd=tmp_path, check=True, capture_output=True)
    arrived: list[str] = []

    class Behind(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            arrived.append(self.requestline.split(" ")[1])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    behind = ThreadingHTTPServer(("127.0.0.1", 0), Behind)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificates/server.pem", tmp_path / "certificates/server.key")
    behind.socket = context.wrap_socket(behind.socket, server_side=True)
    threading.Thread(target=behind.serve_forever, args=(0.05,), daemon=True).start()

    port, server = free_port(), block[1]
    for written, here in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/study/certificates", str(tmp_path / "certificates")),
        ("127.0.0.1:8000", f"127.0.0.1:{behind.server_port}"),
    ):
        assert written in server
        server = server.replace(written, here)
    aside = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr crit; events {{}} "
        f"http {{ access_log off; {aside} {server} }}"
    )
    nginx = subprocess.Popen([str(NGINX), "-c", str(config), "-e", "stderr"])
    trusting = ssl.create_default_context(cafile=str(tmp_path / "certificates/ca.crt"))

    def asked(path: str) -> int:
        head = f"POST {path} HTTP/1.1\r\nHost: fl.example.org\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        plain = socket.create_connection(("127.0.0.1", port), timeout=10)
        with trusting.wrap_socket(plain, server_hostname="localhost") as line:
            line.sendall(head.encode())
            return int(line.makefile("rb").readline().split()[1])

    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert nginx.poll() is None
                time.sleep(0.05)
        yield asked, arrived
    finally:
        nginx.terminate()
        nginx.wait(30)
        behind.shutdown()
        behind.server_close()


def test_the_control_api_is_not_reached(ask: tuple[Callable[[str], int], list[str]]) -> None:
    asked, arrived = ask
    assert asked("/v1/fleet/register-node") == 200
    assert arrived == ["/v1/fleet/register-node"]
    for path in CONTROL:
        arrived.clear()
        status = asked(path)
        assert status in (200, 400, 404, 405), path
        assert bool(arrived) == (status == 200), path
        for got in arrived:
            assert got.startswith("/v1/fleet/"), path
            assert ".." not in unquote(got).split("/"), path
    assert asked("/v1/control/list-runs") == 404
