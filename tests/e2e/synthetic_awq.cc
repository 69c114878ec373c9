// Random AutoAWQ weights: created, decoded by definition, and written as a checkpoint.
#include "tests/e2e/synthetic_awq.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "kernels/base/half.h"

namespace awqd {
namespace {

// The nibble that holds column 0..7 of a word: the inverse of the packing order 0 2 4 6 1 3 5 7.
constexpr int kNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

int Code(uint32_t word, int64_t column) { return (word >> (4 * kNibble[column % 8])) & 15; }

template <typename T>
std::string Raw(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

void Fill(v1::Tensor* tensor, v1::DType dtype, int64_t rows, int64_t columns, std::string raw) {
  tensor->set_dtype(dtype);
  tensor->add_shape(rows);
  tensor->add_shape(columns);
  tensor->set_raw(std::move(raw));
}

}  // namespace

SyntheticAwq SyntheticAwq::Random(int64_t k, int64_t n, int64_t group, uint32_t seed) {
  std::mt19937 engine(seed);
  SyntheticAwq weight{k, n, group};
  weight.qweight.resize(k * n / 8);
  weight.qzeros.resize(k / group * n / 8);
  weight.scales.resize(k / group * n);
  for (uint32_t& word : weight.qweight) word = engine();
  for (uint32_t& word : weight.qzeros) word = engine();
  for (uint16_t& scale : weight.scales) {
    scale = FloatToHalf(0.001f + 0.02f * static_cast<float>(engine() % 1000) / 1000);
  }
  return weight;
}

uint16_t SyntheticAwq::At(int64_t row, int64_t column) const {
  const int64_t words = n / 8, scale_row = row / group;
  const int q = Code(qweight[row * words + column / 8], column);
  const int z = Code(qzeros[scale_row * words + column / 8], column);
  // 5 bits by 11 bits: the float product is exact, so this rounds once.
  return FloatToHalf(static_cast<float>(q - z) * HalfToFloat(scales[scale_row * n + column]));
}

v1::PackedWeight SyntheticAwq::ToPacked() const {
  v1::PackedWeight packed;
  packed.set_group_size(static_cast<int32_t>(group));
  Fill(packed.mutable_qweight(), v1::INT32, k, n / 8, Raw(qweight));
  Fill(packed.mutable_qzeros(), v1::INT32, k / group, n / 8, Raw(qzeros));
  Fill(packed.mutable_scales(), v1::FP16, k / group, n, Raw(scales));
  return packed;
}

void SyntheticAwq::Write(const std::string& folder) const {
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json") << absl::StrCat(
      R"({"model_type": "synthetic", "quantization_config": {"quant_method": "awq", "bits": 4, )",
      R"("group_size": )", group, R"(, "zero_point": true, "version": "gemm"}})");
  const size_t a = qweight.size() * 4, b = a + qzeros.size() * 4, c = b + scales.size() * 2;
  std::string header = absl::StrCat(
      R"({"layer.qweight":{"dtype":"I32","shape":[)", k, ",", n / 8, R"(],"data_offsets":[0,)", a,
      R"(]},"layer.qzeros":{"dtype":"I32","shape":[)", k / group, ",", n / 8,
      R"(],"data_offsets":[)", a, ",", b, R"(]},"layer.scales":{"dtype":"F16","shape":[)",
      k / group, ",", n, R"(],"data_offsets":[)", b, ",", c, "]}}");
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  std::string prefix(8, '\0');
  std::memcpy(prefix.data(), &length, 8);
  std::ofstream(folder + "/model.safetensors", std::ios::binary)
      << prefix << header << Raw(qweight) << Raw(qzeros) << Raw(scales);
}

}  // namespace awqd
