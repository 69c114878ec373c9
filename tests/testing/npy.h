// Reading of .npy files (version 1.0, C order), for goldens.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace awqd::testing {

struct Npy {
  std::string dtype;  // "<f2", "<f8", ...
  std::vector<int64_t> shape;
  std::string bytes;

  // Element i of an array whose dtype has sizeof(T) bytes.
  template <typename T>
  T At(int64_t i) const {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    return value;
  }
};

// The text between `open` and `close` after `key` in the header's dictionary.
inline absl::string_view NpyField(absl::string_view header, absl::string_view key, char open,
                                  char close) {
  const size_t at = header.find(key);
  if (at == header.npos) return "";
  const size_t begin = header.find(open, at + key.size());
  if (begin == header.npos) return "";
  const size_t end = header.find(close, begin + 1);
  return end == header.npos ? "" : header.substr(begin + 1, end - begin - 1);
}

inline absl::StatusOr<Npy> ReadNpy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  constexpr size_t kPrefix = 10;  // magic, version, length of the header
  if (all.size() < kPrefix || all.compare(0, 8, std::string("\x93NUMPY\x01\x00", 8)) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not an .npy file of version 1.0"));
  }
  const size_t length = static_cast<uint8_t>(all[8]) | static_cast<uint8_t>(all[9]) << 8;
  const absl::string_view header = absl::string_view(all).substr(kPrefix, length);
  Npy out;
  out.dtype = std::string(NpyField(header, "'descr':", '\'', '\''));
  for (absl::string_view part :
       absl::StrSplit(NpyField(header, "'shape':", '(', ')'), ',', absl::SkipWhitespace())) {
    int64_t dim = 0;
    if (!absl::SimpleAtoi(part, &dim)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": bad shape"));
    }
    out.shape.push_back(dim);
  }
  out.bytes = all.substr(kPrefix + length);
  return out;
}

}  // namespace awqd::testing
