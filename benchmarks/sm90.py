"""Compile the kernels for an H100 or H200 (sm_90) without one: registers, spills, shared memory.

    python benchmarks/sm90.py            writes benchmarks/sm90.json (about four minutes)
    python benchmarks/sm90.py --quick    the sizes that matter most, no file

Triton lowers the kernels to PTX and ptxas assembles them, as on the machine itself; nothing runs. Exit status 1 if
a kernel does not compile, does not fit into 227 KiB of shared memory, or spills (half precision, chunks of at most
64 keys: the sizes that the goals are about; landmark attention's may spill 128 bytes, and have heads up to 128).
The 128 is what is, so that it does not grow unseen; the goal is none.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trailmark.files import write_json
from trailmark.ops.gca import kernels
from trailmark.ops.gca import triton_path as gca
from trailmark.ops.landmark import kernels as landmark_kernels
from trailmark.ops.landmark import triton_path as landmark
from trailmark.report.tables import markdown_table

_SHARED = 227 << 10  # bytes that one program may use on sm_90
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NAMES = ("forward", "queries", "keys")
_INPUTS = ("q", "k", "v", "grad", "out", "dq", "dk", "dv")
_FLOAT32 = ("weights", "lse", "delta", "lse_grad", "dw", "inner", "dk_parts", "dv_parts", "stats")
_GCA_TABLES = dict.fromkeys(
    ("indices", "lengths", "readers", "starts", "ends", "slots_before", "chunk_of"), "*i64"
)
_LANDMARK_TABLES = {"rows": "*i32"} | dict.fromkeys(("chunks", "far", "ranks", "readers"), "*i64")
_SPILLED = 128  # bytes that landmark attention's spill today at most (float16, D = 80): a record, not a goal


def gca_kernel(
    name: str,
    dtype: torch.dtype,
    rows: int,
    S: int,
    D: int,
    lengths: bool = False,
    tokens: bool = False,
    beside: bool = False,
) -> dict[str, Any]:
    """One kernel of GCA with K = 8 for ``rows`` folded rows.

    ``tokens``: as HiLS' tokens read 32 chunks: the rows are query heads, each with weights of its own. ``beside``: one
    softmax over all that is read, which a window shares.
    """
    kernel, cut = getattr(kernels, f"{name}_kernel"), gca.tiles(rows, S, D, dtype, name)
    constants: dict[str, Any] = {
        "G": rows if tokens else 1, "D": D, "K_PAD": 32 if tokens else 8,
        "BLOCK_R": cut.rows, "BLOCK_S": cut.keys, "BLOCK_D": cut.head,
        "TILES": cut.per_chunk, "WIDE": False, "EXACT": dtype == torch.float32, "OFF_BY_ONE": not (tokens or beside),
        "HAS_LENGTHS": lengths, "KEEP": not beside, "PER_HEAD": tokens, "PER_QUERY_HEAD": tokens,
        "JOINT": beside,
    }  # fmt: skip
    what = {"op": "gca", "lengths": lengths, "tokens": tokens, "beside": beside}
    what |= {"kernel": name, "rows": rows, "S": S, "D": D}
    return what | compile_kernel(kernel, dtype, cut.rows, cut, constants, _GCA_TABLES)


def landmark_kernel(
    name: str,
    dtype: torch.dtype,
    S: int,
    D: int,
    causal: bool = True,
    G: int = 1,
    wide: bool = False,
    lse_grad: bool = False,
) -> dict[str, Any]:
    """One kernel of landmark attention, for 4,096 queries."""
    kernel, cut = getattr(landmark_kernels, f"{name}_kernel"), landmark.tiles(4096, S, D, dtype, name)
    constants: dict[str, Any] = {
        "G": G, "D": D, "BLOCK_Q": cut.queries, "BLOCK_S": cut.keys, "BLOCK_D": cut.head,
        "MANY": cut.per_chunk > 1, "CAUSAL": causal, "WIDE": wide, "EXACT": dtype == torch.float32,
        "HAS_LSE_GRAD": lse_grad,
    }  # fmt: skip
    if not lse_grad:
        constants["lse_grad"] = None
    what = {"op": "landmark", "causal": causal, "G": G, "wide": wide, "lse_grad": lse_grad}
    what |= {"kernel": name, "rows": 4096, "S": S, "D": D}
    return what | compile_kernel(kernel, dtype, cut.queries, cut, constants, _LANDMARK_TABLES)


def compile_kernel(
    kernel: Any,
    dtype: torch.dtype,
    rows: int,
    cut: gca.Tiles | landmark.Tiles,
    constants: dict[str, Any],
    tables: dict[str, str],
) -> dict[str, Any]:
    """With tensors aligned to 16 bytes and contiguous heads; ``rows``: of a tile."""
    signature, aligned = {}, {}
    for number, argument in enumerate(kernel.arg_names):
        if re.fullmatch(r"s_.d", argument):  # the step between the numbers of a head
            constants[argument] = 1
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in _INPUTS or argument in _FLOAT32 or argument in tables:
            of = _TYPES[dtype] if argument in _INPUTS else "fp32"
            signature[argument] = tables.get(argument, f"*{of}")
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
        "dtype": _TYPES[dtype], "tile": [rows, cut.keys, cut.head],
        "num_warps": cut.num_warps, "num_stages": cut.num_stages,
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


Case = partial[dict[str, Any]]


def of_gca(
    dtype: torch.dtype, sizes: Sequence[tuple[int, int]], heads: Sequence[int], **more: Any
) -> list[Case]:
    """All kernels at sizes (rows, S) and heads D."""
    return [
        partial(gca_kernel, name, dtype, rows, S, D, **more)
        for D in heads for rows, S in sizes for name in _NAMES
    ]  # fmt: skip


def of_landmark(dtype: torch.dtype, sizes: Sequence[int], heads: Sequence[int], **more: Any) -> list[Case]:
    """All kernels at sizes S and heads D."""
    return [
        partial(landmark_kernel, name, dtype, S, D, **more) for D in heads for S in sizes for name in _NAMES
    ]


def cases(quick: bool) -> list[Case]:
    half, single = torch.bfloat16, torch.float32
    if quick:
        return [
            *of_gca(half, [(64, 64)], [64]),
            *of_gca(half, [(8, 64)], [64], lengths=True, tokens=True, beside=True),
            partial(gca_kernel, "keys", single, 64, 64, 64),
            *of_landmark(half, [63], [64, 128]),
        ]
    return [
        *of_gca(half, [(64, 64), (64, 63), (256, 64), (1, 64), (64, 128), (64, 200)], [64, 128, 256]),
        *of_gca(half, [(64, 63)], [64, 128], lengths=True),
        *of_gca(half, [(8, 64), (1, 63)], [64, 128], lengths=True, tokens=True),
        *of_gca(half, [(8, 64)], [64, 128], lengths=True, tokens=True, beside=True),
        *of_gca(half, [(64, 64), (64, 128)], [64], lengths=True, beside=True),
        *of_gca(torch.float16, [(64, 64)], [64, 80]),
        *of_gca(single, [(64, 64)], [64, 128, 256]),
        *of_landmark(half, [63, 50, 15, 127], [64, 128, 256]),
        *of_landmark(half, [63], [64, 128], causal=False),
        *of_landmark(half, [63], [64], G=4),
        *of_landmark(half, [63], [64], wide=True),
        partial(landmark_kernel, "queries", half, 63, 64, lse_grad=True),
        *of_landmark(torch.float16, [50], [80]),
        *of_landmark(single, [63], [64, 128, 256]),
    ]


def fits(found: dict[str, Any]) -> bool:
    """Into shared memory; and into registers, at the sizes that the goals are about."""
    goals = found["dtype"] != "fp32" and found["S"] <= 64 and (found["op"] == "gca" or found["D"] <= 128)
    most = _SPILLED if found["op"] == "landmark" else 0
    return found["shared_bytes"] <= _SHARED and not (goals and found["stack_bytes"] > most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("gca", "landmark"), help="the kernels of one op; writes no file")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    results = []
    for compiled in cases(arguments.quick):
        if arguments.only and compiled.func.__name__ != f"{arguments.only}_kernel":
            continue
        results.append(compiled())
        print(results[-1], flush=True)
    wrong = [found for found in results if not fits(found)]
    columns = [
        "op",
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
    if not (arguments.quick or arguments.only):
        about = {"target": "sm_90", "triton": triton.__version__, "torch": torch.__version__}
        about["date"] = date.today().isoformat()
        write_json(arguments.output, about | {"results": results})
        print(f"Numbers: {arguments.output}")
    if wrong:
        sys.exit(f"{len(wrong)} do not fit: {wrong}")


if __name__ == "__main__":
    main()
