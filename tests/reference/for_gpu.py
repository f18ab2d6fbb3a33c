"""Whether kernels compile for a GPU that is not here. The interpreter takes more than the compiler does."""

import os
import subprocess
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(kernel, types: dict[str, str], **constants: object) -> None:
    """Compile one for a Hopper GPU; to be called where Triton does not interpret."""
    names = kernel.arg_names
    assert set(types) | set(constants) == set(names)
    # Compiled torch passes single floats in 64 bits, and what is computed with them is so too, or fits no longer.
    assert not {"fp16", "bf16", "fp32", "fp64"} & set(types.values()), "a float must be a constant, or in memory"
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def many(kind: str, names: str) -> dict[str, str]:
    """The same type for several arguments."""
    return dict.fromkeys(names.split(), kind)


def run_compiled(script: str) -> None:
    """Run lines that call `compiled` in a process of their own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = f"from tests.reference.for_gpu import compiled, many\n{script}\nprint('all compiled')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.strip() == "all compiled", done.stderr[-3000:]
