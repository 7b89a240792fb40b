"""Which system calls a program in the sandbox is refused: a filter that the kernel runs (seccomp).

Namespaces leave it alone with an empty file system. What they do not bound is refused here: other processes, sockets of
kinds that a network namespace does not hold, memory that does not count as the process's own, and the kernel's own
ways round such a filter.
"""

from __future__ import annotations

import platform
import struct

MACHINES = ("x86_64", "aarch64")
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "socket": (41, 198),
    "shmget": (29, 194),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
}
"""Numbers on the two machines, from Linux's tables; the program gets `EPERM`."""
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_THREAD = 0x00010000  # CLONE_THREAD
_OTHER_ABI = 0x40000000  # x32's numbers begin here
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def seccomp_filter(machine: str = platform.machine()) -> bytes | None:
    """The filter as classic BPF, one `struct sock_filter` per instruction; None for an architecture not known here."""
    if machine not in MACHINES:
        return None
    number, architecture, flags = 0, 4, 16  # offsets in `struct seccomp_data`
    code = [
        (_LOAD, 0, 0, architecture),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, number),
        (_AT_LEAST, 0, 1, _OTHER_ABI),
        (_RETURN, 0, 0, _KILL),
        (_EQUAL, 0, 1, _CLONE3),  # C libraries use clone then, whose flags can be looked at
        (_RETURN, 0, 0, _ENOSYS),
    ]
    for numbers in REFUSED.values():
        refused = numbers[MACHINES.index(machine)]
        if refused is not None:
            code += [(_EQUAL, 0, 1, refused), (_RETURN, 0, 0, _EPERM)]
    code += [
        (_EQUAL, 1, 0, _CLONE[machine]),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, flags),
        (_ANY_BIT, 0, 1, _THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *one) for one in code)
