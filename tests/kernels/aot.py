"""Ahead-of-time compilation without a GPU, and what the machine code says: access widths, registers, spills.

Triton's wheel carries ptxas and cuobjdump; neither needs a driver. Must run in a process without TRITON_INTERPRET.
"""

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ampkit_kernels.configs import resident_programs

TOOLS = Path(nvidia.__file__).parent / "bin"
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;/]+);")


@dataclass(frozen=True)
class Case:
    """One kernel variant, and what its machine code must look like.

    wide_loads, wide_stores: at least so many 128-bit global accesses (0: nothing is asked). max_registers: per thread.
    lists_read: all of these are loaded before anything is stored, in every turn of a loop; of a single one, which the
    compiler knows not to overlap, most is. programs: of its grid that a multiprocessor should hold at once, from sm_90
    on (0: nothing is asked). bad: words of the fault that must be found.
    """

    name: str
    source: ASTSource
    options: dict[str, Any]
    max_registers: int
    capabilities: Sequence[int]
    wide_loads: int = 0
    wide_stores: int = 0
    lists_read: int = 1
    programs: int = 0
    bad: str = ""


@dataclass(frozen=True)
class Code:
    """Facts about one compiled variant. `loops`: for each innermost loop its global accesses, in order."""

    accesses: Counter
    registers: int
    stack: int
    local: int
    capability: int = 90
    loops: tuple[tuple[str, ...], ...] = ()

    def wide(self, kind: str) -> int:
        """How many 128-bit global loads ("LDG") or stores ("STG") the code holds."""
        return sum(count for name, count in self.accesses.items() if name.startswith(kind) and ".128" in name)


def compile_case(case: Case, capability: int) -> bytes:
    """The binary of one variant for one architecture."""
    return triton.compile(case.source, GPUTarget("cuda", capability, 32), case.options).asm["cubin"]


def read(binaries: Sequence[bytes], capability: int) -> list[Code]:
    """What the machine code of these binaries says.

    The disassembler takes longer to start than to read a kernel, and one file: it is given all of them end to end.
    """
    if not binaries:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code"
        usages = []
        for binary in binaries:
            path.write_bytes(binary)
            usages.append(_output("cuobjdump", "-res-usage", path))
        path.write_bytes(b"".join(map(text_section, binaries)))
        lines = _output("nvdisasm", "-b", f"SM{capability}", path)
    instructions = [(int(at, 16), text) for at, text in INSTRUCTION.findall(lines)]
    found, start = [], 0
    for binary, usage in zip(binaries, usages, strict=True):
        end = start + len(text_section(binary))
        own = [(at, text) for at, text in instructions if start <= at < end]
        resources = re.search(r"REG:(\d+).*?STACK:(\d+).*?LOCAL:(\d+)", usage)
        accesses = Counter(name for _, text in own for name in re.findall(r"\b(?:LDG|STG|LDL|STL)[\w.]*", text))
        if resources is None or not accesses:
            raise RuntimeError(f"no resources or no code were reported: {usage[-300:]}")
        registers, stack, local = map(int, resources.groups())
        found.append(Code(accesses, registers, stack, local, capability, innermost_loops(own)))
        start = end
    return found


def _output(tool: str, *arguments: Any) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def text_section(elf: bytes) -> bytes:
    """The instructions of the one kernel in a binary."""
    (headers,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    # Name, type, flags, address, offset, length.
    sections = [struct.unpack_from("<IIQQQQ", elf, headers + i * size) for i in range(count)]
    (text,) = (section for section in sections if elf.startswith(b".text.", sections[names][4] + section[0]))
    return elf[text[4] : text[4] + text[5]]


def innermost_loops(code: Sequence[tuple[int, str]]) -> tuple[tuple[str, ...], ...]:
    """The global accesses of each loop that holds no other, in the order of its instructions (address and text).

    A loop is what lies between a backward branch and where it goes to.
    """
    branch = re.compile(r"\bBRA(?:\.\w+)* (?:!?U?P\w+, )?(0x[0-9a-f]+)")
    loops = [(int(to, 16), at) for at, text in code for to in branch.findall(text) if int(to, 16) < at]
    innermost = [
        (start, end) for start, end in loops
        if not any(start <= other and last <= end and (other, last) != (start, end) for other, last in loops)
    ]
    return tuple(
        tuple(name for at, text in code if start <= at <= end for name in re.findall(r"\b((?:LDG|STG)[\w.]*)", text))
        for start, end in innermost
    )


def faults(case: Case, code: Code) -> list[str]:
    """What is wrong with the machine code, in sentences; empty when nothing is."""
    wrong = []
    for kind, what, least in (("LDG", "loads", case.wide_loads), ("STG", "stores", case.wide_stores)):
        if code.wide(kind) < least:
            found = ", ".join(f"{count} {name}" for name, count in sorted(code.accesses.items()))
            wrong.append(f"{code.wide(kind)} 128-bit {what}, expected at least {least}: {found}")
    spills = sum(count for name, count in code.accesses.items() if name.startswith(("LDL", "STL")))
    if code.stack or code.local or spills:
        wrong.append(f"spills: stack {code.stack} bytes, local {code.local} bytes, {spills} local accesses")
    for loop in code.loops:
        turn = [name[:3] for name in one_turn(loop)]
        if not {"LDG", "STG"} <= set(turn):
            continue
        n_loads = turn.index("STG")
        late = turn[n_loads:].count("LDG")
        if n_loads < case.lists_read or late > (0 if case.lists_read > 1 else n_loads // 2):
            wrong.append(
                f"a load waits for a store: {n_loads} loads before the first one in a turn of a loop over "
                f"{case.lists_read} lists: {', '.join(one_turn(loop))}"
            )
    resident = resident_programs(code.registers, case.options["num_warps"])
    if code.capability >= 90 and resident < case.programs:
        wrong.append(
            f"{resident} programs of {code.registers} registers fit a multiprocessor, its grid has {case.programs}"
        )
    if code.registers > case.max_registers:
        wrong.append(f"{code.registers} registers per thread, ceiling {case.max_registers}")
    if not case.bad:
        return wrong
    return [] if case.bad in "; ".join(wrong) else [f"nothing says {case.bad!r} of a bad kernel: {wrong}"]


def one_turn(loop: tuple[str, ...]) -> tuple[str, ...]:
    """What is repeated in a loop that the compiler has unrolled; all of it where nothing is."""
    return next((loop[:n] for n in range(1, len(loop)) if loop[:n] * (len(loop) // n) == loop), loop)
