"""The head of a request as it came, checked for what two programs may read in two ways."""

from __future__ import annotations

import re

MAX_BYTES = 64 << 10
MAX_LINES = 200
_END = re.compile(rb"\n\r?\n")


def fault(buffered: bytes) -> tuple[int, str] | None:
    """Status and sentence for a head that is refused (RFC 9112, sections 5.2, 6.1 and 6.3).

    buffered: what has come of it, or more. Whether the head is valid otherwise is left to h11.
    """
    end = _END.search(buffered)
    head = buffered[: end.start()] if end else buffered
    lines = head.split(b"\n")
    if len(head) > MAX_BYTES or len(lines) > MAX_LINES:
        return 431, f"The head has more than {MAX_BYTES >> 10} KiB or {MAX_LINES} lines."
    if end is None:
        return None
    version = lines[0].rstrip().rpartition(b" ")[2]
    if version not in (b"HTTP/1.0", b"HTTP/1.1"):
        return 400, "The request is not of HTTP/1.1 or HTTP/1.0."
    if any(line[:1] in (b" ", b"\t") for line in lines):
        return 400, "A header goes on in the next line."
    names = [line.partition(b":")[0].strip().lower() for line in lines[1:]]
    for name in (b"host", b"content-length", b"transfer-encoding"):
        if names.count(name) > 1:
            return 400, f"The header {name.decode()} comes twice."
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            return 400, "The request has both content-length and transfer-encoding."
        if version != b"HTTP/1.1":
            return 400, "Only a request of HTTP/1.1 can have transfer-encoding."
    return None
