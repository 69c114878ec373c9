// A small dense model in a folder, for tests that quantise it.
#pragma once

#include <cstring>
#include <random>
#include <string>

#include "kernels/base/half.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::testing {

// Normal numbers, [rows, cols].
inline TestTensor DenseTensor(const std::string& dtype, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.02f);
  TestTensor out = {dtype, {rows, cols}, ""};
  for (int64_t i = 0; i < rows * cols; ++i) {
    const float value = normal(random);
    const uint16_t half = dtype == "F16" ? FloatToHalf(value) : FloatToBf16(value);
    const char* from = dtype == "F32" ? reinterpret_cast<const char*>(&value)
                                      : reinterpret_cast<const char*>(&half);
    out.bytes.append(from, dtype == "F32" ? 4 : 2);
  }
  return out;
}

// Two shards with an index; linears of all three types, one with a bias, and tensors that stay
// dense.
inline void WriteDenseModel(const TempDirectory& folder, const std::string& name) {
  const TestTensors first = {{"l.0.up.weight", DenseTensor("F16", 64, 128, 1)},
                             {"l.0.up.bias", {"F16", {64}, std::string(128, '\x11')}},
                             {"l.0.norm.weight", {"F32", {3}, std::string(12, '\x22')}},
                             {"embed_tokens.weight", DenseTensor("F16", 40, 64, 2)}};
  const TestTensors second = {{"l.0.down.weight", DenseTensor("BF16", 128, 64, 3)},
                              {"l.1.up.weight", DenseTensor("F32", 64, 128, 4)},
                              {"l.1.gate.weight", DenseTensor("F32", 8, 128, 5)},
                              {"l.1.odd.weight", DenseTensor("F16", 64, 96, 6)}};
  folder.Write(name + "/one.safetensors", SafetensorsOf(first));
  folder.Write(name + "/two.safetensors", SafetensorsOf(second));
  std::string map;
  for (const auto& [file, tensors] : {std::pair("one", &first), std::pair("two", &second)}) {
    for (const auto& [tensor, unused] : *tensors) {
      absl::StrAppend(&map, map.empty() ? "" : ",", "\"", tensor, "\":\"", file, ".safetensors\"");
    }
  }
  folder.Write(name + "/model.safetensors.index.json",
               absl::StrCat("{\"weight_map\":{", map, "}}"));
  folder.Write(name + "/config.json", R"({"z_first":1,"model_type":"test","a_last":[1,2]})");
  folder.Write(name + "/tokenizer.json", "tokens");
  folder.Write(name + "/pytorch_model.bin", "old");
  folder.Write(name + "/extra/x", "x");
}

}  // namespace awqd::testing
