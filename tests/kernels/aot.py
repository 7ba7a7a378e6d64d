"""Ahead-of-time compilation without a GPU, and facts read from the machine code: access widths, registers, spills.

Triton's wheel has ptxas and cuobjdump, which need no driver. Must run in a process without TRITON_INTERPRET.
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
    """One kernel variant, and the requirements on its machine code.

    Args:
        name: unique among the cases.
        source, options: what Triton compiles.
        max_registers: per thread.
        capabilities: to compile for.
        wide_loads, wide_stores: the least number of 128-bit global accesses.
        lists_read: so many lists are loaded before anything is stored, in every iteration of a loop; of a single list,
            which the compiler knows not to overlap, at least half.
        programs: of its grid that a multiprocessor must hold at once, from sm_90 on.
        bad: words of the fault that must be found; empty for a good kernel.
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
    """Facts about one compiled variant; `loops` has the global accesses of each innermost loop, in order."""

    accesses: Counter
    registers: int
    stack: int
    local: int
    capability: int = 90
    loops: tuple[tuple[str, ...], ...] = ()

    def wide(self, kind: str) -> int:
        """How many 128-bit global loads ("LDG") or stores ("STG") the code has."""
        return sum(count for name, count in self.accesses.items() if name.startswith(kind) and ".128" in name)


def compile_case(case: Case, capability: int) -> bytes:
    """The binary of one variant for one architecture."""
    return triton.compile(case.source, GPUTarget("cuda", capability, 32), case.options).asm["cubin"]


def read(binaries: Sequence[bytes], capability: int) -> list[Code]:
    """Facts about the machine code of these binaries.

    The disassembler takes longer to start than to read a kernel, and reads one file: all kernels are concatenated.
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
    codes, start = [], 0
    for binary, usage in zip(binaries, usages, strict=True):
        end = start + len(text_section(binary))
        own = [(at, text) for at, text in instructions if start <= at < end]
        resources = re.search(r"REG:(\d+).*?STACK:(\d+).*?LOCAL:(\d+)", usage)
        accesses = Counter(name for _, text in own for name in re.findall(r"\b(?:LDG|STG|LDL|STL)[\w.]*", text))
        if resources is None or not accesses:
            raise RuntimeError(f"no resources or no code were reported: {usage[-300:]}")
        registers, stack, local = map(int, resources.groups())
        codes.append(Code(accesses, registers, stack, local, capability, innermost_loops(own)))
        start = end
    return codes


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
    """The global accesses of each innermost loop, in the order of its instructions (address and text).

    A loop is the code between a backward branch and its target.
    """
    branch = re.compile(r"\bBRA(?:\.\w+)* (?:!?U?P\w+, )?(0x[0-9a-f]+)")
    loops = [(int(to, 16), at) for at, text in code for to in branch.findall(text) if int(to, 16) < at]
    innermost = [
        (start, end)
        for start, end in loops
        if not any(start <= other and last <= end and (other, last) != (start, end) for other, last in loops)
    ]
    return tuple(
        tuple(name for at, text in code if start <= at <= end for name in re.findall(r"\b((?:LDG|STG)[\w.]*)", text))
        for start, end in innermost
    )


def faults(case: Case, code: Code) -> list[str]:
    """The faults of the machine code, in sentences."""
    wrong = []
    for kind, accesses, least in (("LDG", "loads", case.wide_loads), ("STG", "stores", case.wide_stores)):
        if code.wide(kind) < least:
            counts = ", ".join(f"{count} {name}" for name, count in sorted(code.accesses.items()))
            wrong.append(f"{code.wide(kind)} 128-bit {accesses}, expected at least {least}: {counts}")
    spills = sum(count for name, count in code.accesses.items() if name.startswith(("LDL", "STL")))
    if code.stack or code.local or spills:
        wrong.append(f"spills: stack {code.stack} bytes, local {code.local} bytes, {spills} local accesses")
    for loop in code.loops:
        accesses = [name[:3] for name in one_iteration(loop)]
        if not {"LDG", "STG"} <= set(accesses):
            continue
        n_loads = accesses.index("STG")
        late = accesses[n_loads:].count("LDG")
        if n_loads < case.lists_read or late > (0 if case.lists_read > 1 else n_loads // 2):
            wrong.append(
                f"a load waits for a store: {n_loads} loads before the first store in an iteration of a loop over "
                f"{case.lists_read} lists: {', '.join(one_iteration(loop))}"
            )
    resident = resident_programs(code.registers, case.options["num_warps"])
    if code.capability >= 90 and resident < case.programs:
        wrong.append(
            f"{resident} programs of {code.registers} registers fit a multiprocessor; the grid has {case.programs}"
        )
    if code.registers > case.max_registers:
        wrong.append(f"{code.registers} registers per thread, expected at most {case.max_registers}")
    if not case.bad:
        return wrong
    return [] if case.bad in "; ".join(wrong) else [f"no fault of this bad kernel is {case.bad!r}: {wrong}"]


def one_iteration(loop: tuple[str, ...]) -> tuple[str, ...]:
    """The repeated part of a loop that the compiler has unrolled, or all of the loop."""
    return next((loop[:n] for n in range(1, len(loop)) if loop[:n] * (len(loop) // n) == loop), loop)
