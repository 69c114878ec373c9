// NumPy's .npy files: the strict part that awqctl needs.
//
// Read: format versions 1 and 2, C order, little-endian f2 f4 f8 i4 i1 u1 (u1 and i1 carry '|').
// Everything else, big-endian, Fortran order, structured and object arrays among it, is refused
// with what was found. Written: version 1, the same types.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/tensor.h"

namespace awqd::client {

enum class NpyType { kF2, kF4, kF8, kI4, kI1, kU1 };

int64_t SizeOf(NpyType type);
// "<f2" and so on, as in the header.
absl::string_view Descr(NpyType type);

struct NpyHeader {
  NpyType type = NpyType::kF4;
  std::vector<int64_t> shape;
  int64_t data_bytes = 0;   // product(shape) * SizeOf(type)
  int64_t data_offset = 0;  // from the start of the file
};

struct NpyArray {
  NpyType type = NpyType::kF4;
  std::vector<int64_t> shape;
  std::string bytes;

  // Element `i` of the flat array as double, which is exact for every type.
  double ValueAt(size_t i) const;
  std::vector<double> ToDoubles() const;
};

// `start`: the first bytes of a file; 12 + 65535 are always enough. INVALID_ARGUMENT says what is
// wrong.
absl::StatusOr<NpyHeader> ParseNpyHeader(absl::string_view start);

// The header of a version 1 file, padded so that data start at a multiple of 64.
std::string MakeNpyHeader(NpyType type, const std::vector<int64_t>& shape);

// The size must be exactly what the header says. RESOURCE_EXHAUSTED when memory does not hold it.
// Errors name the file.
absl::StatusOr<NpyArray> ReadNpy(const std::string& path);

// F2, F4, I4, I1 and U1 to the dtype of the same name; F8 is refused: no request carries it.
absl::StatusOr<Tensor> ToTensor(NpyArray array);
// BF16 is refused: NumPy has no such type.
absl::StatusOr<NpyType> NpyTypeOf(DType dtype);

}  // namespace awqd::client
