"""A random 4-bit weight of K x N with a scale and a zero point for each group of a column, and products in double."""
import numpy

CODES = 16
COLD_BYTES = 96 << 20  # of copies in turn, as awqd_bench has them
COLUMNS = 64           # whose results are checked, of all tokens


def packed(codes):
    """Pairs of 4-bit codes as bytes, the first of a pair in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


class Weight:
    """codes [N, K] and zeros [N, K / group] as uint8 below 16, scales [N, K / group] in FP16: (code - zero) * scale.

    As awqd_bench's, every code and zero is as likely as the others. The same arguments give the same weight.
    """

    def __init__(self, k, n, group):
        self.k, self.n, self.group, self.groups = k, n, group, k // group
        random = numpy.random.default_rng([k, n, group])
        self.codes = random.integers(0, CODES, (n, k), dtype=numpy.uint8)
        self.zeros = random.integers(0, CODES, (n, self.groups), dtype=numpy.uint8)
        self.scales = random.uniform(0.005, 0.02, (n, self.groups)).astype(numpy.float16)
        self.columns = numpy.unique(numpy.linspace(0, n - 1, COLUMNS).astype(int))

    def copy_of_codes(self, i):
        """The codes of copy i; copies differ, so that no library keeps one of them for two."""
        return self.codes ^ numpy.uint8(i % CODES)

    def dense(self, dtype):
        """[N, K], each step in `dtype`."""
        codes = self.codes.reshape(self.n, self.groups, self.group).astype(dtype)
        codes -= self.zeros[:, :, None].astype(dtype)
        codes *= self.scales[:, :, None].astype(dtype)
        return codes.reshape(self.n, self.k)

    def checked(self, scales=None, offsets=None):
        """[columns, K] in double of the columns that are checked.

        As code * scale + offset where offsets [N, K / group] are given, with these scales.
        """
        codes = self.codes[self.columns].reshape(-1, self.groups, self.group).astype(numpy.float64)
        scales = (self.scales if scales is None else scales)[self.columns, :, None].astype(numpy.float64)
        if offsets is None:
            codes = (codes - self.zeros[self.columns, :, None]) * scales
        else:
            codes = codes * scales + offsets[self.columns, :, None]
        return codes.reshape(-1, self.k)


def activations(m, k):
    """[M, K] in FP32, standard normal."""
    return numpy.random.default_rng([m, k]).standard_normal((m, k), dtype=numpy.float32)


def copies(size):
    """How many copies of a weight of `size` bytes are more than a last-level cache holds, at least 2."""
    return max(2, -(-COLD_BYTES // size))


def error(got, x, weight):
    """Relative Frobenius error of got [M, columns] against x [M, K] times weight [columns, K], in double."""
    want = x.astype(numpy.float64) @ weight.T
    return float(numpy.linalg.norm(got - want) / numpy.linalg.norm(want))
