"""Kernels compiled by numba that run in torch's own threads.

Other threads would wait for torch's, which after an operation turn in circles on their cores for
milliseconds. A kernel is a C function of an address: of a job, int64 numbers whose first is zero
and counts the pieces that the threads have taken.
"""

import ctypes
from functools import partial

import torch
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from ltx_neuron.host.compiled import compile_or_load

# Through the libraries that torch is made of: None where that is not GNU's OpenMP.
_parallel = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)


@intrinsic
def next_piece(typing_context, address):
    """The number at an address, which is then one more."""

    def emit(context, builder, signature, values):
        counter = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), emit


@intrinsic
def pointer(typing_context, address):
    """An address as what numba.carray takes."""

    def emit(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), emit


@intrinsic
def bits(typing_context, number):
    """Those of a float32."""

    def emit(context, builder, signature, values):
        return builder.bitcast(values[0], ir.IntType(32))

    return types.uint32(types.float32), emit


@intrinsic
def number(typing_context, bits):
    """The float32 of 32 bits."""

    def emit(context, builder, signature, values):
        return builder.bitcast(values[0], ir.FloatType())

    return types.float32(types.uint32), emit


def kernel(function):
    """Compile a kernel, or load what was compiled before."""
    return compile_or_load(partial(cfunc, types.void(types.voidptr)), function)


def run(function, *numbers: int) -> None:
    """Call a kernel in every thread of torch's, with the job 0, *numbers."""
    job = torch.tensor([0, *numbers], dtype=torch.int64)
    if _parallel is None:
        function.ctypes(job.data_ptr())
    else:
        address, threads = ctypes.c_void_p(function.address), torch.get_num_threads()
        _parallel(address, ctypes.c_void_p(job.data_ptr()), threads, 0)
