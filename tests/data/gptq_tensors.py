"""GPTQ's tensors in numpy, for the scripts of the formats that have them."""
import numpy as np

from golden import wide

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def pack_dense(codes, bits):
    """[count, columns] -> I32 [words, columns]: the bits of each column one after the other, the lowest first."""
    count, columns = codes.shape
    stream = (codes.astype(np.uint8).T[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(columns, count * bits)
    stream = np.pad(stream, ((0, 0), (0, -count * bits % 32)))
    words = np.ascontiguousarray(np.packbits(stream, axis=1, bitorder="little")).view("<i4")
    return np.ascontiguousarray(words.T)


def pack_planes(codes, bits):
    """The same size, but of 32 codes the low bits first, then the higher ones, plane by plane."""
    out = []
    for block in codes.reshape(-1, 32, codes.shape[1]):
        shift = 0
        for width in PLANES[bits]:
            out.append(pack_dense((block >> shift) & ((1 << width) - 1), width))
            shift += width
    return np.concatenate(out)


def pack_zeros(zeros, bits, pack, less_one):
    """[groups, N] -> I32 [groups, words]. With `less_one` 1 is subtracted from all fields of a word at once, borrows and
    padding included, or from each where fields do not fill a word."""
    if less_one and 32 % bits:
        zeros = (zeros - 1) % (1 << bits)
    words = pack(zeros.T, bits).T
    if less_one and 32 % bits == 0:
        words = (words.view("<u4") - np.uint32(0xFFFFFFFF // ((1 << bits) - 1))).view("<i4")
    return np.ascontiguousarray(words)


def values_of(codes, zeros, scales, group_of):
    """FP16 [K, N]: (code - zero) * scale, exact, then one rounding."""
    integers = (codes.astype(np.int64) - zeros.astype(np.int64)[group_of]).astype(np.float32)
    return (integers * wide(scales)[group_of]).astype(np.float16)
