// Valid and invalid GGUF files, built by hand.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace awqd::testing {

inline std::string LittleEndian(uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(i < 8 ? value >> (8 * i) : 0));
  return out;
}

inline std::string GgufText(absl::string_view text) {
  return absl::StrCat(LittleEndian(text.size(), 8), text);
}

// One key of the metadata; `value` has the value's bytes.
inline std::string GgufKey(absl::string_view key, uint32_t type, absl::string_view value) {
  return absl::StrCat(GgufText(key), LittleEndian(type, 4), value);
}

// The bytes of an array: its type, its count, its values.
inline std::string GgufArray(uint32_t type, uint64_t count, absl::string_view values) {
  return absl::StrCat(LittleEndian(type, 4), LittleEndian(count, 8), values);
}

struct GgufTensor {
  std::string name = "a.weight";
  std::vector<uint64_t> dims = {32, 2};  // in the file's order: K first
  uint32_t type = 2;                     // Q4_0
  uint64_t offset = 0;
};

// A legal file with one tensor; tests change something in it.
struct GgufBytes {
  std::string magic = "GGUF";
  uint32_t version = 3;
  std::optional<uint64_t> tensor_count, key_count;  // where they differ from the contents
  std::vector<std::string> keys = {GgufKey("general.architecture", 8, GgufText("llama"))};
  std::vector<GgufTensor> tensors = {{}};
  uint64_t alignment = 32;
  std::string data = std::string(36, '\0');

  std::string Header() const {
    std::string out = absl::StrCat(magic, LittleEndian(version, 4),
                                   LittleEndian(tensor_count.value_or(tensors.size()), 8),
                                   LittleEndian(key_count.value_or(keys.size()), 8));
    for (const std::string& key : keys) out += key;
    for (const GgufTensor& tensor : tensors) {
      absl::StrAppend(&out, GgufText(tensor.name), LittleEndian(tensor.dims.size(), 4));
      for (uint64_t dim : tensor.dims) out += LittleEndian(dim, 8);
      absl::StrAppend(&out, LittleEndian(tensor.type, 4), LittleEndian(tensor.offset, 8));
    }
    return out;
  }
  std::string File() const {
    std::string out = Header();
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    return out + data;
  }
};

}  // namespace awqd::testing
