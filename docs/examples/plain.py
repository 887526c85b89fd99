"""Follows decisions on the bus with nothing but a socket: what a client in any language would do.

    python plain.py 127.0.0.1 4222 [how many decisions]

NATS speaks lines of text: the server says INFO and PING, we say CONNECT, SUB and PONG, and a
message comes as `MSG subject id size` with so many bytes after it. Payloads are msgpack, of which
the bus uses maps, arrays, strings, binary, numbers, booleans and nil. docs/schemas says what the
fields mean.
"""

import json
import socket
import struct
import sys
from typing import Any, BinaryIO


def unpack(data: bytes, at: int = 0) -> tuple[Any, int]:
    """Return the msgpack value that begins at a byte, and where the next one begins."""
    code = data[at]
    at += 1
    if code <= 0x7F:
        return code, at
    if code >= 0xE0:
        return code - 256, at
    if code <= 0x8F:
        return unpack_map(data, at, code & 0x0F)
    if code <= 0x9F:
        return unpack_array(data, at, code & 0x0F)
    if code <= 0xBF:
        return data[at : at + (code & 0x1F)].decode(), at + (code & 0x1F)
    if code in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[code], at
    kind, form = LONG[code]
    size = struct.calcsize(form)
    (number,) = struct.unpack_from(form, data, at)
    at += size
    if kind == "number":
        return number, at
    if kind == "map":
        return unpack_map(data, at, number)
    if kind == "array":
        return unpack_array(data, at, number)
    raw = data[at : at + number]
    return (raw.decode() if kind == "text" else raw), at + number


# Code → what it begins, and the form of its number: a value, or a size.
LONG = {
    0xC4: ("binary", ">B"),
    0xC5: ("binary", ">H"),
    0xC6: ("binary", ">I"),
    0xCA: ("number", ">f"),
    0xCB: ("number", ">d"),
    0xCC: ("number", ">B"),
    0xCD: ("number", ">H"),
    0xCE: ("number", ">I"),
    0xCF: ("number", ">Q"),
    0xD0: ("number", ">b"),
    0xD1: ("number", ">h"),
    0xD2: ("number", ">i"),
    0xD3: ("number", ">q"),
    0xD9: ("text", ">B"),
    0xDA: ("text", ">H"),
    0xDB: ("text", ">I"),
    0xDC: ("array", ">H"),
    0xDD: ("array", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}


def unpack_array(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    """Return so many values, and where they end."""
    found = []
    for _ in range(count):
        value, at = unpack(data, at)
        found.append(value)
    return found, at


def unpack_map(data: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    """Return so many keys with their values, and where they end."""
    pairs, at = unpack_array(data, at, 2 * count)
    return dict(zip(pairs[::2], pairs[1::2], strict=True)), at


def messages(host: str, port: int, subject: str) -> Any:
    """Yield the payloads of a subject."""
    with socket.create_connection((host, port)) as connection:
        stream: BinaryIO = connection.makefile("rwb")
        json.loads(stream.readline().removeprefix(b"INFO "))
        options = {"verbose": False, "pedantic": False, "lang": "plain", "version": "1"}
        stream.write(b"CONNECT " + json.dumps(options).encode() + b"\r\n")
        stream.write(f"SUB {subject} 1\r\nPING\r\n".encode())
        stream.flush()
        while line := stream.readline():
            words = line.split()
            if words[0] == b"PING":
                stream.write(b"PONG\r\n")
                stream.flush()
            elif words[0] == b"PONG":
                print("following", flush=True)
            elif words[0] == b"MSG":
                yield stream.read(int(words[-1]) + 2)[:-2]
            elif words[0] == b"-ERR":
                raise ConnectionError(line.decode().strip())


def main(host: str, port: int, wanted: int) -> None:
    """Print decisions and how requests ended, until there were enough decisions."""
    for payload in messages(host, port, "mp.v1.route.>"):
        batch, _ = unpack(payload)
        for event in batch.get("events", []):
            if event["type"] == "routed":
                cached, prompt = event.get("hit_tokens", 0), event.get("prompt_tokens") or 0
                where = f"{event['request_id']} -> {event['instance_id']}"
                print(f"{where}: {cached} of {prompt} tokens cached, by {batch['router_id']}")
                wanted -= 1
            elif event["type"] == "finished":
                print(f"{event['request_id']} ended: {event['outcome']}")
        if wanted <= 0:
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else sys.maxsize)
