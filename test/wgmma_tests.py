"""The machine code of the kernels for Hopper: between a WGMMA and the wait for it, nothing may
touch the registers of its sums, or write those of its operand A. The compiler does not see to it:
for A in registers, pin() must stand after the wait (kernels/hopper.cuh).
"""

import glob
import os
import re
import shutil
import subprocess

from check import ROOT, Skip, fails, main, read

CUDA = os.environ.get("CUDA_HOME", "/usr/local/cuda")
NO_RESULT = re.compile(r"BAR|WARPSYNC|\w*SETP|PLOP3|R2P")
JUMP = re.compile(r"BRX|JMX|JMP")
MAX_GROUPS = 6  # in a state
MMA = re.compile(r"[HQ]GMMA\.64x(\d+)x")


def functions(listing):
    """Each function's instructions (address, predicate, name, operands), and where labels stand."""
    all_functions, code = [], None
    for line in listing.splitlines():
        if line.startswith(".text.") and line.endswith(":"):
            code, labels = [], {}
            all_functions.append((line[6:-1], code, labels))
        label = re.match(r"(\.L_x_\d+):", line)
        found = re.search(r"/\*([0-9a-f]{4,5})\*/ +(@!?U?P\w+ +)?([A-Z]\S*) *(.*?) *;", line)
        if code is not None and label:
            labels[label[1]] = len(code)
        elif code is not None and found:
            code.append(found.groups())
    return all_functions


def registers(text, count=1):
    """The registers that a text names, each with this number in a row."""
    return {int(r) + i for r in re.findall(r"\bR(\d+)\b", text) for i in range(count)}


def written(name, operands):
    """The registers that an instruction writes: those of its first operand that is not a
    predicate."""
    first = next((o for o in re.split(", *", operands) if not re.match(r"!?U?P[T\d]", o)), "")
    if NO_RESULT.match(name) or not re.match(r"R\d+", first):
        return set()
    wide = re.search(r"\.(64|128)\b", name)
    pair = ".WIDE" in name or name.startswith("CS2R")
    count = 4 if name.startswith("LDSM") else 2 if pair else int(wide[1]) // 32 if wide else 1
    return registers(first, count)


def faults(code, labels):
    """Follows every path, up to a fault. A state: the groups of WGMMAs in flight, the last of them
    still open; of each WGMMA the registers of A and those of its sums."""
    found, seen, paths = [], set(), [(0, (frozenset(),))]
    while paths and not found:
        at, groups = paths.pop()
        if at >= len(code) or (at, groups) in seen:
            continue
        seen.add((at, groups))
        address, predicate, name, operands = code[at]
        flight = frozenset().union(*groups)
        mma, branch = MMA.match(name), name.startswith("BRA")
        if mma:
            parts = operands.split(",")
            a, sums = registers(parts[1], 4), registers(parts[0], int(mma[1]) // 2)
            bad = [its for its in flight
                   if sums & its[0] or a & its[1] or (sums & its[1] and sums != its[1])]
            groups = (*groups[:-1], groups[-1] | {(frozenset(a), frozenset(sums))})
            if "gsb0" in operands:
                groups += (frozenset(),)
            if len(groups) > MAX_GROUPS:  # a path without waits: the first two as one
                groups = (groups[0] | groups[1], *groups[2:])
        elif name.startswith("WARPGROUP.DEPBAR"):
            bad = groups[-1]  # the wait is not for an open group
            groups = groups[-1 - int(operands.split(",")[1], 16):]
        else:
            writes = written(name, operands)
            touches = writes | registers(operands)
            bad = [its for its in flight if writes & its[0] or touches & its[1]]
        if bad or JUMP.match(name) or (name.startswith("CALL") and flight):
            found.append((address, name, operands))
        if branch:
            paths.append((labels[re.search(r"\.L_x_\d+", operands)[0]], groups))
        if not (branch or name == "EXIT") or predicate or re.match("!?U?P", operands):
            paths.append((at + 1, groups))
    return found


def check(listing):
    """Returns how many WGMMAs it has."""
    count = 0
    for function, code, labels in functions(listing):
        found = faults(code, labels)
        assert not found, f"{function}: in the registers of a WGMMA in flight: {found}"
        count += sum(bool(MMA.match(name)) for _, _, name, _ in code)
    return count


def test_faults_are_seen():
    matmul = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"
    wait, jump = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@P0 BRA `(.L_x_0)"

    def code_of(*lines):
        lines = [".L_x_0:" if x == "L" else f"/*{i:04x}*/ {x} ;" for i, x in enumerate(lines)]
        return ".text.kernel:\n" + "\n".join([*lines, "/*ffff*/ EXIT ;"])

    for good in ([matmul, wait, "MOV R4, R55"], [matmul, "MOV R8, R7", matmul, wait],
                 ["L", matmul, wait, "IADD3 R55, R4, R24, RZ", jump],
                 [matmul, "HGMMA.64x64x16.F32.BF16 R64, R4, gdesc[UR8], RZ, gsb0",
                  "WARPGROUP.DEPBAR.LE gsb0, 0x1", "FADD R55, R55, R8"]):
        check(code_of(*good))
    for bad in (["MOV R7, R8"], ["LDS.128 R1, [R60]"], ["LDS.64 R3, [R60]"],
                ["STG.E desc[UR4][R60.64], R55"], ["IMAD.WIDE R3, R60, R61, R62"],
                ["SHFL.IDX PT, R5, R60, R61, R62"], ["LDSM.16.M88.4 R1, [R60]"],
                ["QGMMA.64x128x32.F32.E4M3.E4M3 R4, gdesc[UR8], RZ, !UPT, gsb0"],
                [matmul.replace("R4", "R24")], [matmul.replace("R24", "R26")],
                [wait.replace("0x0", "0x1"), "MOV R4, R60"], ["CALL.REL `(.L_x_0)"]):
        assert fails(check, code_of("L", matmul, *bad, wait)), bad
    assert fails(check, code_of("L", "MOV R4, R60", matmul, jump)), "by way of a loop"


def test_kernels_wait_for_their_matmuls():
    nvdisasm = shutil.which("nvdisasm", path=f"{CUDA}/bin:{os.environ['PATH']}")
    if nvdisasm is None or not os.path.exists(f"{CUDA}/bin/nvcc"):
        raise Skip("no nvcc with nvdisasm here")
    files = [f for f in glob.glob(f"{ROOT}/kernels/*.cu") if b'"hopper.cuh"' in read(f)]
    assert len(files) >= 3, files
    for file in files:
        subprocess.run([f"{CUDA}/bin/nvcc", "-std=c++17", "-O3", "-gencode",
                        "arch=compute_90a,code=sm_90a", "-cubin", "-o", "cubin", file], check=True)
        listing = subprocess.run([nvdisasm, "-c", "cubin"], check=True, text=True,
                                 capture_output=True).stdout
        assert check(listing) > 0, f"{file}: no WGMMA found"
        without = re.sub(r"WARPGROUP\.DEPBAR.*?;", "NOP ;", listing)
        assert fails(check, without), f"{file}: nothing found where waits are missing"


main()
