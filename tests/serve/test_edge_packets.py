"""A device in a network of its own: no IP packet that leaves it holds a private text, nor the tokens of one."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from websockets.frames import Frame, Opcode
from websockets.http11 import Request as Handshake
from websockets.server import ServerProtocol

from moray.drafters.configs import NgramConfig
from moray.edge.link.namespaces import EmulatedLink, emulated_link, why_not
from moray.edge.link.profiles import LinkProfile
from moray.edge.messages import SUBPROTOCOL, Open, decode_up
from serve.config import EdgeEndpointConfig

PROFILE = LinkProfile(name="test", delay_ms=1, rate_mbit=100)
SECRET = "Ada Byron"
_ALL_PROTOCOLS, _TCP = 0x0003, 6


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_private_text_is_in_no_packet(serve_target, chat_target):
    edge, ngram = EdgeEndpointConfig(drafters=("ngram",)), NgramConfig(type="ngram", max_ngram=3)
    with serve_target(drafters={"ngram": ngram}, edge=edge) as api, emulated_link(PROFILE, number=8) as link:
        with passed_on(link.host, int(api.url.rpartition(":")[2])) as port:

            def ask(question: str) -> tuple[list[bytes], dict]:
                device = [sys.executable, "-c", DEVICE, str(chat_target), f"ws://{link.host}:{port}/v1/edge", question]
                with captured(link) as packets:
                    done = subprocess.run(link.command(device), capture_output=True, text=True, timeout=60, check=False)
                assert done.returncode == 0, done.stderr
                return packets, json.loads(done.stdout.splitlines()[-1])

            marked, told = ask(f"Greet <private>{SECRET}</private>, for {SECRET} is here.")
            plain, _ = ask(f"Greet {SECRET}, for {SECRET} is here.")
        secret = api.gateway.tokenizer.encode_text(SECRET, adds_special=False)
    tokens = json.dumps(secret)[1:-1].replace(" ", "").encode()
    assert told["num_tokens"] > 0
    said = said_in(marked, link.device)
    opened = [message for message in map(decode_up, said) if isinstance(message, Open)]
    assert len(opened) == 1
    assert "[P1]" in api.gateway.tokenizer.decode(list(opened[0].request.prompt))
    assert not any(tokens in message or SECRET.encode() in message for message in said)
    assert not any(tokens in packet or SECRET.encode() in packet for packet in marked)
    assert any(tokens in message for message in said_in(plain, link.device)), "without a mark it crosses, and is seen"


@contextmanager
def passed_on(host: str, port: int) -> Iterator[int]:
    """A port of that address whose connections are passed on to a port of the loopback."""
    with socket.create_server((host, 0)) as server:

        def pump(source: socket.socket, sink: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def accept() -> None:
            with suppress(OSError):  # the server is closed at the end
                while True:
                    connection, _ = server.accept()
                    inner = socket.create_connection(("127.0.0.1", port))
                    for pair in ((connection, inner), (inner, connection)):
                        threading.Thread(target=pump, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


@contextmanager
def captured(link: EmulatedLink) -> Iterator[list[bytes]]:
    """All IP packets on this machine's end of the network, until the end of the block."""
    packets: list[bytes] = []
    is_over = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap:
        tap.bind((link.interface, 0))
        tap.settimeout(0.1)

        def read() -> None:
            while True:
                try:
                    packets.append(tap.recv(1 << 16))
                except TimeoutError:
                    if is_over.is_set():
                        return

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield packets
        finally:
            is_over.set()
            thread.join(10)


def said_in(packets: list[bytes], device: str) -> list[bytes]:
    """The text messages that the device has sent over its WebSocket, put together from its TCP segments."""
    segments: dict[int, bytes] = {}
    for packet in packets:
        header = (packet[0] & 15) * 4
        if packet[0] >> 4 != 4 or packet[9] != _TCP or packet[12:16] != socket.inet_aton(device):
            continue
        tcp = packet[header : int.from_bytes(packet[2:4], "big")]
        data = tcp[(tcp[12] >> 4) * 4 :]
        if data:
            segments[int.from_bytes(tcp[4:8], "big")] = data
    place = next(number for number, data in segments.items() if data.startswith(b"GET "))
    protocol = ServerProtocol(subprotocols=[SUBPROTOCOL])  # type: ignore[list-item]
    said: list[bytes] = []
    while place in segments:
        data = segments.pop(place)
        place = (place + len(data)) % (1 << 32)
        protocol.receive_data(data)
        for event in protocol.events_received():
            if isinstance(event, Handshake):
                answer = protocol.accept(event)
                assert answer.status_code == 101
                protocol.send_response(answer)
            elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                said.append(bytes(event.data))
    assert not segments, "every byte that was captured was read"
    return said


DEVICE = """
import json, sys
from moray.config import validate
from moray.edge.config import EdgeRunConfig
from moray.edge.device import loading
from moray.edge.device.events import VerifiedTokens
from moray.edge.device.transport import WebSocketLink

folder, url, question = sys.argv[1:]
loading.check_url = lambda url: None  # a network of our own, which packets are captured on: no TLS
loading.WebSocketLink = lambda *arguments: WebSocketLink(*arguments, allows_plain=True)
config = validate(EdgeRunConfig, {
    "target": {"model": folder, "device": "cpu"}, "drafter": {"type": "ngram", "max_ngram": 3},
    "drafter_name": "ngram", "url": url, "max_new_tokens": 24,
})
device = loading.Device(config)
events = device.answer([{"role": "user", "content": question}])
print(json.dumps({"num_tokens": sum(len(event.tokens) for event in events if isinstance(event, VerifiedTokens))}))
device.client.close()
"""
