"""Requests of awqd as bytes, written without generated code, so that they can be wrong in every way."""
import struct

FP16 = 1


def varint(number):
    """Protocol Buffers' variable-length integer."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def _read_varint(data, at):
    number, shift = 0, 0
    while True:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return number, at


def fields_of(answer):
    """(number, contents) of each field of a framed message; contents of those without a length are None."""
    at = 5
    while at < len(answer):
        tag, at = _read_varint(answer, at)
        kind, contents = tag & 7, None
        if kind == 0:
            _, at = _read_varint(answer, at)
        elif kind == 2:
            length, at = _read_varint(answer, at)
            contents, at = answer[at:at + length], at + length
        else:
            at += 8 if kind == 1 else 4
        yield tag >> 3, contents


def field_of(answer, wanted):
    """The contents of a length-delimited field of a framed message; None without the field."""
    return next((contents for number, contents in fields_of(answer) if number == wanted), None)


def number_field(field, number):
    return varint(field << 3) + varint(number)


def bytes_field(field, contents):
    contents = contents.encode() if isinstance(contents, str) else contents
    return varint(field << 3 | 2) + varint(len(contents)) + contents


def weight_ref(model, weight):
    return bytes_field(1, bytes_field(1, model) + bytes_field(2, weight))


def tensor(shape, raw):
    """An FP16 tensor; `shape` is packed."""
    return number_field(1, FP16) + bytes_field(2, b"".join(map(varint, shape))) + bytes_field(3, raw)


def matmul(model, tokens, in_features):
    """A product of ones."""
    ones = struct.pack("<H", 0x3C00) * (tokens * in_features)
    return weight_ref(model, "layer") + bytes_field(3, tensor([tokens, in_features], ones))


def matmul_of_long_shape(size):
    """Activations whose shape is `size` dimensions of one: 8 bytes each once they are parsed, of one byte here."""
    return weight_ref("m", "layer") + bytes_field(3, number_field(1, FP16) + bytes_field(2, b"\x01" * size))


def matmul_of_int_values(size):
    """An inline weight whose codes are `size` integers in one byte each."""
    values = number_field(1, 6) + bytes_field(2, varint(8) + varint(size // 8)) + bytes_field(5, bytes_field(1, b"\x01" * size))
    return bytes_field(2, bytes_field(3, values)) + bytes_field(3, tensor([1, 8], b"\0" * 16))


def matmul_of_one_row(columns):
    """An inline weight [1, columns] of 4 bits: 3 bytes for each column, which a kernel's layout makes 68 of."""
    def packed(kind, width, size):
        return number_field(1, kind) + bytes_field(2, varint(1) + varint(width)) + bytes_field(3, bytes(size))
    int32, codes = 6, columns // 2
    words = packed(int32, columns // 8, codes)
    weight = bytes_field(3, words) + bytes_field(4, words) + bytes_field(5, packed(FP16, columns, 2 * columns))
    return bytes_field(2, weight) + bytes_field(3, tensor([1, 1], b"\0\0"))


def matmul_of_absent(model, weight):
    """A product with a weight that the model does not have."""
    return weight_ref(model, weight) + bytes_field(3, tensor([1, 64], bytes(128)))


def dequantize(model):
    return weight_ref(model, "layer")


def named(name):
    """LoadModel and UnloadModel."""
    return bytes_field(1, name)


def page(name, token):
    """A page of GetModel."""
    return bytes_field(1, name) + bytes_field(3, token)


def framed(message, claimed=None):
    """As gRPC sends it: not compressed, and how many bytes follow, or are said to."""
    return struct.pack(">BI", 0, len(message) if claimed is None else claimed) + message
