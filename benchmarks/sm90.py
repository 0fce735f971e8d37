"""Compile the kernels for an H100 or H200 (sm_90) without one: registers, spills, shared memory.

    python benchmarks/sm90.py            writes benchmarks/sm90.json (about two minutes)
    python benchmarks/sm90.py --quick    the sizes that matter most, no file

Triton lowers the kernels to PTX and ptxas assembles them, as on the machine itself; nothing runs. Exit status 1 if
a kernel does not compile, does not fit into 227 KiB of shared memory, or spills (half precision, chunks of at most
64 keys: the sizes that the goals are about).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trailmark.ops import grouped_cross_attention_kernels as kernels
from trailmark.ops import grouped_cross_attention_triton as gca
from trailmark.report.tables import markdown_table

_SHARED = 227 << 10  # bytes that one program may use on sm_90
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_KERNELS = {"forward": kernels.forward_kernel, "queries": kernels.queries_kernel, "keys": kernels.keys_kernel}
_INPUTS = ("q", "k", "v", "grad", "out", "dq", "dk", "dv")
_FLOAT32 = ("weights", "lse", "dw", "inner", "dk_parts", "dv_parts")
_INT64 = ("indices", "lengths", "readers", "starts", "ends", "slots_before", "chunk_of")


def compile_kernel(
    name: str, dtype: torch.dtype, rows: int, S: int, D: int, lengths: bool = False
) -> dict[str, Any]:
    """One kernel with K = 8 for ``rows`` folded rows, tensors aligned to 16 bytes and contiguous heads."""
    kernel, cut = _KERNELS[name], gca.tiles(rows, S, D, dtype, name)
    constants: dict[str, Any] = {
        "G": 1, "D": D, "K_PAD": 8, "BLOCK_R": cut.rows, "BLOCK_S": cut.keys, "BLOCK_D": cut.head,
        "TILES": cut.per_chunk, "WIDE": False, "EXACT": dtype == torch.float32, "OFF_BY_ONE": True,
        "HAS_LENGTHS": lengths, "KEEP": True, "PER_HEAD": False,
    }  # fmt: skip
    signature, aligned = {}, {}
    for number, argument in enumerate(kernel.arg_names):
        if re.fullmatch(r"s_.d", argument):  # the step between the numbers of a head
            constants[argument] = 1
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in _INPUTS or argument in _FLOAT32 or argument in _INT64:
            of = _TYPES[dtype] if argument in _INPUTS else "fp32" if argument in _FLOAT32 else "i64"
            signature[argument] = f"*{of}"
            aligned[(number,)] = [["tt.divisibility", 16]]
        elif argument in ("scale", "scale_e"):
            signature[argument] = "fp32"
        else:
            signature[argument] = "i32"
            if argument.startswith("s_"):
                aligned[(number,)] = [["tt.divisibility", 16]]
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": cut.num_warps, "num_stages": cut.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, stack = _resources(compiled.asm["cubin"])
    return {
        "lengths": lengths, "kernel": name, "dtype": _TYPES[dtype], "rows": rows, "S": S, "D": D,
        "tile": [cut.rows, cut.keys, cut.head], "num_warps": cut.num_warps, "num_stages": cut.num_stages,
        "registers": registers, "stack_bytes": stack, "shared_bytes": compiled.metadata.shared,
        "multiplies": "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else "fma",
    }  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack: what was spilled)."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])


def cases(quick: bool) -> list[tuple[Any, ...]]:
    if quick:
        return [(name, torch.bfloat16, 64, 64, 64) for name in _KERNELS] + [
            ("keys", torch.float32, 64, 64, 64)
        ]
    sizes = [(64, 64), (64, 63), (256, 64), (1, 64), (64, 128), (64, 200)]  # (rows, S)
    half = [
        (name, torch.bfloat16, rows, S, D) for D in (64, 128, 256) for rows, S in sizes for name in _KERNELS
    ]
    with_lengths = [(name, torch.bfloat16, 64, 63, D, True) for D in (64, 128) for name in _KERNELS]
    float16 = [(name, torch.float16, 64, 64, D) for D in (64, 80) for name in _KERNELS]
    single = [(name, torch.float32, 64, 64, D) for D in (64, 128, 256) for name in _KERNELS]
    return half + with_lengths + float16 + single


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    results, wrong = [], []
    for case in cases(arguments.quick):
        found = compile_kernel(*case)
        results.append(found)
        spills = found["stack_bytes"] and found["dtype"] != "fp32" and found["S"] <= 64
        if found["shared_bytes"] > _SHARED or spills:
            wrong.append(found)
        print(found, flush=True)
    columns = [
        "kernel",
        "dtype",
        "rows",
        "S",
        "D",
        "tile",
        "num_warps",
        "registers",
        "stack_bytes",
        "shared_bytes",
        "multiplies",
    ]
    print(markdown_table(columns, [[str(r[c]) for c in columns] for r in results]))
    if not arguments.quick:
        versions = {
            "triton": triton.__version__,
            "torch": torch.__version__,
            "date": date.today().isoformat(),
        }
        arguments.output.write_text(
            json.dumps({"target": "sm_90"} | versions | {"results": results}, indent=1) + "\n"
        )
        print(f"Numbers: {arguments.output}")
    if wrong:
        sys.exit(f"{len(wrong)} do not fit: {wrong}")


if __name__ == "__main__":
    main()
