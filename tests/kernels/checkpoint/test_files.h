// Temporary directories and hand-made checkpoints for tests.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace awqd::testing {

// A directory of its own, removed with everything in it.
class TempDirectory {
 public:
  TempDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "awqd-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  TempDirectory(const TempDirectory&) = delete;
  ~TempDirectory() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  std::string At(absl::string_view relative) const { return absl::StrCat(path_, "/", relative); }

  // Creates parent directories as needed.
  void Write(absl::string_view relative, absl::string_view bytes) const {
    const std::filesystem::path path = At(relative);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
  }

 private:
  std::string path_;
};

inline std::string LittleEndian64(uint64_t value) {
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
  return out;
}

// Header and data as a safetensors file.
inline std::string Safetensors(absl::string_view header, absl::string_view data) {
  return absl::StrCat(LittleEndian64(header.size()), header, data);
}

struct TestTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using TestTensors = std::map<std::string, TestTensor>;

// `metadata`: the JSON object of texts under "__metadata__"; empty without.
inline std::string SafetensorsOf(const TestTensors& tensors, absl::string_view metadata = "") {
  std::string data;
  std::vector<std::string> entries;
  if (!metadata.empty()) entries.push_back(absl::StrCat("\"__metadata__\":", metadata));
  for (const auto& [name, tensor] : tensors) {
    entries.push_back(absl::StrCat("\"", name, "\":{\"dtype\":\"", tensor.dtype, "\",\"shape\":[",
                                   absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[",
                                   data.size(), ",", data.size() + tensor.bytes.size(), "]}"));
    data += tensor.bytes;
  }
  return Safetensors(absl::StrCat("{", absl::StrJoin(entries, ","), "}"), data);
}

// One AWQ linear under `path`; every byte of its codes is `fill`.
inline TestTensors AwqLinear(const std::string& path, int64_t k, int64_t n, int64_t group,
                             char fill = 0x21) {
  const std::string scales(2 * (k / group) * n, '\x2c');
  return {{path + ".qweight", {"I32", {k, n / 8}, std::string(k * n / 2, fill)}},
          {path + ".qzeros", {"I32", {k / group, n / 8}, std::string(k / group * n / 2, '\x11')}},
          {path + ".scales", {"F16", {k / group, n}, scales}}};
}

inline TestTensors Merge(TestTensors a, const TestTensors& b) {
  a.insert(b.begin(), b.end());
  return a;
}

// One AWQ linear, K = 64, N = 16, groups of 32; all numbers below 16 give different ones.
inline TestTensors AwqExpert(const std::string& path, int number) {
  TestTensors out = AwqLinear(path, 64, 16, 32, static_cast<char>(0x11 * number));
  out[path + ".qzeros"].bytes.back() = static_cast<char>(0x10 + number);
  out[path + ".scales"].bytes.back() = static_cast<char>(0x20 + number);
  return out;
}

// Combines linears of one path into one whose tensors hold all of them, one after the other.
inline TestTensors AllExperts(const std::vector<TestTensors>& experts) {
  TestTensors out;
  for (const TestTensors& expert : experts) {
    for (const auto& [name, tensor] : expert) {
      TestTensor& all = out[name];
      all.dtype = tensor.dtype;
      all.shape = tensor.shape;
      all.shape.insert(all.shape.begin(), static_cast<int64_t>(experts.size()));
      all.bytes += tensor.bytes;
    }
  }
  return out;
}

inline std::string AwqConfig(int group = 32, absl::string_view extra = "") {
  return absl::StrCat(
      "{\"model_type\":\"test\",\"quantization_config\":{\"quant_method\":\"awq\",\"bits\":4,"
      "\"group_size\":",
      group, ",\"zero_point\":true,\"version\":\"gemm\"", extra, "}}");
}

}  // namespace awqd::testing
