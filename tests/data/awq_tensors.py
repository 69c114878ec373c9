"""The tensors of AWQ's versions in numpy, from the addresses of their elements."""
import numpy as np

from golden import Bf16
from gptq_tensors import pack_dense

NIBBLE_OF_COLUMN = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # version gemm, of 8 columns


def words_of(nibbles):
    """[..., 8 c] -> I32 [..., c], the first of eight in the lowest bits."""
    parts = nibbles.reshape(*nibbles.shape[:-1], -1, 8).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(parts, axis=-1).view("<i4")


def pack_gemm(codes, bits):
    """[rows, N] -> I32 [rows, words]."""
    if bits != 4:
        return np.ascontiguousarray(pack_dense(codes.T, bits).T)
    nibbles = np.empty_like(codes)
    columns = np.arange(codes.shape[1])
    nibbles[:, columns // 8 * 8 + NIBBLE_OF_COLUMN[columns % 8]] = codes
    return words_of(nibbles)


def padded_groups(groups, size):
    """Scales of a column, where eight zero points fill a word."""
    multiple = 1 if size >= 128 else {64: 2, 32: 4, 16: 8}[size]
    return -(-(-(-groups // 8)) // multiple) * multiple * 8


def pad(values, groups):
    """Zeros behind the rows of `values`."""
    if isinstance(values, Bf16):
        out = Bf16(np.zeros((groups, values.shape[1])))
        out.bits[:values.shape[0]] = values.bits
        return out
    out = np.zeros((groups, values.shape[1]), values.dtype)
    out[:values.shape[0]] = values
    return out


def pack_fast(codes):
    """[K, N] -> I16 [N/4, K]."""
    k, n = codes.shape
    row, column = np.meshgrid(np.arange(k), np.arange(n), indexing="ij")
    within = row % 32
    place = row % 64 // 32 * 32 + within % 8 // 2 * 8 + within % 2 * 4 + within // 8
    number = row // 64 * 64 + column % 4 * 16 + place // 4
    out = np.zeros((n // 4, k), np.uint32)
    np.bitwise_or.at(out, (column // 4, number), codes.astype(np.uint32) << (4 * (place % 4)).astype(np.uint32))
    return out.astype("<u2").view("<i2")


def pack_marlin(codes):
    """[K, N] -> I32 [K/16, 2 N], as the fragments of m16n8k16 products lie in lanes."""
    k, n = codes.shape
    row, column = np.meshgrid(np.arange(k), np.arange(n), indexing="ij")
    lane = column % 8 * 4 + row % 8 // 2
    word = column // 64 * 128 + lane * 4 + column % 64 // 16
    nibble = row % 2 * 4 + column % 16 // 8 * 2 + row % 16 // 8
    out = np.zeros((k // 16, 2 * n), np.uint32)
    np.bitwise_or.at(out, (row // 16, word), codes.astype(np.uint32) << (4 * nibble).astype(np.uint32))
    return out.view("<i4")


def permute_marlin(scales):
    """[groups, N]: of several groups 8 by 8 columns turned, of one 4 by 4 pairs."""
    groups, n = scales.shape
    values = scales.bits if isinstance(scales, Bf16) else scales
    if groups > 1:
        out = values.reshape(groups, -1, 8, 8).transpose(0, 1, 3, 2)
    else:
        out = values.reshape(groups, -1, 4, 4, 2).transpose(0, 1, 3, 2, 4)
    out = np.ascontiguousarray(out).reshape(groups, n)
    if not isinstance(scales, Bf16):
        return out
    wrapped = Bf16(np.zeros((groups, n)))
    wrapped.bits = out
    return wrapped
