// SafetensorsHeader: the JSON at the beginning of a safetensors file that a test program writes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace awqd::testing {

// The header for matrices with a name, a dtype, rows, cols and bytes(), which follow one another in
// the file. It is padded with spaces to a multiple of 8 bytes, so that the first matrix is aligned.
template <typename Matrix>
std::string SafetensorsHeader(const std::vector<Matrix>& matrices) {
  std::string out = "{\"__metadata__\":{\"format\":\"pt\"}";
  int64_t offset = 0;
  for (const Matrix& m : matrices) {
    out += ",\"" + m.name + "\":{\"dtype\":\"" + m.dtype + "\",\"shape\":[" +
           std::to_string(m.rows) + "," + std::to_string(m.cols) + "],\"data_offsets\":[" +
           std::to_string(offset) + "," + std::to_string(offset + m.bytes()) + "]}";
    offset += m.bytes();
  }
  out += '}';
  out.resize((out.size() + 7) / 8 * 8, ' ');
  return out;
}

}  // namespace awqd::testing
