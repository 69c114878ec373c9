// Every format decodes the checkpoint under tests/data/<format>/ to the result of an independent
// script.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/half.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/exact.h"
#include "tests/testing/npy.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using ::awqd::testing::Npy;
using ::awqd::testing::ReadNpy;

struct Case {
  std::string folder;
  std::string format;
  nlohmann::json json;

  std::string Folder() const { return DataPath(folder); }
  std::string Text(const char* key) const { return json.at(key).get<std::string>(); }
  std::string Golden(const char* key) const {
    return absl::StrCat(Folder(), "/goldens/", Text(key));
  }
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.folder << " " << c.json.dump(); }

// The cases of a folder. A folder has the name of its format, unless cases.json says otherwise.
std::vector<Case> CasesOf(absl::string_view folder) {
  std::ifstream file(DataPath(absl::StrCat(folder, "/goldens/cases.json")));
  if (!file) return {};
  std::vector<Case> out;
  const nlohmann::json goldens = nlohmann::json::parse(file);
  for (const auto& entry : goldens.at("cases")) {
    out.push_back({std::string(folder), goldens.value("format", std::string(folder)), entry});
  }
  return out;
}

std::vector<Case> AllCases() {
  std::vector<Case> out;
  for (const Format* format : AllFormats()) {
    for (Case& c : CasesOf(format->name)) out.push_back(std::move(c));
  }
  // The small cases of "awq"; its own folder is the demonstration's.
  for (Case& c : CasesOf("awq-gemm")) out.push_back(std::move(c));
  return out;
}

TEST(Goldens, EveryFormatHasSome) {
  for (const Format* format : AllFormats())
    EXPECT_FALSE(CasesOf(format->name).empty()) << format->name;
}

class Golden : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const auto root = model::RepositoryRoot::Open(GetParam().Folder());
    ASSERT_TRUE(root.ok()) << root.status();
    const auto checkpoint = model::Checkpoint::Open(*root, GetParam().Text("model"));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->format().name, GetParam().format);
    for (const model::LinearLocation& linear : checkpoint->linears()) {
      if (linear.path != GetParam().Text("weight")) continue;
      std::vector<uint8_t> scratch;
      auto weight = checkpoint->Read(linear, &scratch);
      ASSERT_TRUE(weight.ok()) << weight.status();
      weight_ = *std::move(weight);
      auto described = checkpoint->Describe(linear, &scratch);
      ASSERT_TRUE(described.ok()) << described.status();
      described_ = *std::move(described);
    }
    ASSERT_TRUE(Validate(weight_).ok()) << Validate(weight_);
    dequantized_.resize(weight_.k * weight_.n);
    values_.resize(weight_.k * weight_.n);
    for (int64_t row = 0; row < weight_.k; ++row) {
      const int64_t in_feature = weight_.order.empty() ? row : weight_.order[row];
      for (int64_t column = 0; column < weight_.n; ++column) {
        const int64_t at = in_feature * weight_.n + column;
        values_[at] = WeightValue(weight_, row, column);
        dequantized_[at] = FloatToHalf(values_[at]);
      }
    }
  }

  HostWeight weight_;
  HostWeight described_;               // without its codes
  std::vector<float> values_;          // [K, N], by in-feature
  std::vector<uint16_t> dequantized_;  // the same, bits of FP16
};

uint64_t Fnv1a64(const void* data, size_t size) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; ++i) {
    hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  }
  return hash;
}

TEST_P(Golden, DequantizesBitForBit) {
  EXPECT_EQ(weight_.k, GetParam().json.at("k"));
  EXPECT_EQ(weight_.n, GetParam().json.at("n"));
  EXPECT_EQ(weight_.format, GetParam().json.value("format", GetParam().format));
  EXPECT_EQ(ToString(weight_.scheme), GetParam().Text("description"));
  EXPECT_EQ(absl::StrFormat("%016x", Fnv1a64(dequantized_.data(), 2 * dequantized_.size())),
            GetParam().Text("dequantized_fnv1a64"));
  if (GetParam().json.contains("fp32_fnv1a64")) {
    EXPECT_EQ(absl::StrFormat("%016x", Fnv1a64(values_.data(), sizeof(float) * values_.size())),
              GetParam().Text("fp32_fnv1a64"));
  }
  if (!GetParam().json.contains("dequantized")) return;
  const auto golden = ReadNpy(GetParam().Golden("dequantized"));
  ASSERT_TRUE(golden.ok()) << golden.status();
  ASSERT_EQ(golden->dtype, "<f2");
  ASSERT_EQ(golden->bytes.size(), 2 * dequantized_.size());
  int64_t wrong = 0;
  for (size_t i = 0; i < dequantized_.size(); ++i) {
    wrong += golden->At<uint16_t>(static_cast<int64_t>(i)) != dequantized_[i];
  }
  EXPECT_EQ(wrong, 0);
}

// Only codes are missing: the size of a weight is known before they are read.
TEST_P(Golden, IsDescribedWithoutItsCodes) {
  EXPECT_TRUE(described_.codes.empty());
  EXPECT_EQ(described_.k, weight_.k);
  EXPECT_EQ(described_.n, weight_.n);
  EXPECT_EQ(described_.scheme, weight_.scheme);
  EXPECT_EQ(described_.table, weight_.table);
  EXPECT_EQ(described_.outer, weight_.outer);
  EXPECT_EQ(described_.order, weight_.order);
  EXPECT_EQ(described_.factor, weight_.factor);
  EXPECT_EQ(described_.hadamard, weight_.hadamard);
  EXPECT_EQ(described_.bias, weight_.bias);
  if (GetParam().format == "gguf") return;  // its scales lie among the codes
  EXPECT_EQ(described_.scales, weight_.scales);
  EXPECT_EQ(described_.zeros, weight_.zeros);
}

TEST_P(Golden, ProductWithBiasAgreesInDouble) {
  const auto x = ReadNpy(GetParam().Golden("activations"));
  const auto y = ReadNpy(GetParam().Golden("matmul"));
  ASSERT_TRUE(x.ok() && y.ok()) << x.status() << y.status();
  ASSERT_EQ(x->dtype, "<f2");
  ASSERT_EQ(y->dtype, "<f8");
  const int64_t m = x->shape.at(0);
  ASSERT_THAT(x->shape, ::testing::ElementsAre(m, weight_.k));
  ASSERT_THAT(y->shape, ::testing::ElementsAre(m, weight_.n));
  const int64_t size = weight_.hadamard.size;
  EXPECT_EQ(size, GetParam().json.value("hadamard_size", 0));
  double error = 0, norm = 0;
  std::vector<double> scaled(weight_.k), token(weight_.k);
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t k = 0; k < weight_.k; ++k) {
      const double factor = weight_.factor.empty() ? 1.0 : weight_.factor[k];
      token[k] = scaled[k] = factor * HalfToFloat(x->At<uint16_t>(row * weight_.k + k));
    }
    for (int64_t k = 0; k < weight_.k && size > 0; ++k) {
      token[k] = 0;
      for (int64_t i = 0; i < size; ++i) {
        const double value = scaled[k - k % size + i] * weight_.hadamard.scale;
        token[k] += std::popcount(static_cast<uint64_t>(k % size & i)) % 2 == 0 ? value : -value;
      }
    }
    for (int64_t column = 0; column < weight_.n; ++column) {
      double sum = weight_.bias.empty() ? 0.0 : weight_.bias[column];
      for (int64_t k = 0; k < weight_.k; ++k) {
        const int64_t at = k * weight_.n + column;
        sum += token[k] * (size > 0 ? values_[at] : HalfToFloat(dequantized_[at]));
      }
      const double golden = y->At<double>(row * weight_.n + column);
      error += (sum - golden) * (sum - golden);
      norm += golden * golden;
    }
  }
  ASSERT_GT(norm, 0);
  // Both in double: only the order of sums differs. The scale of a transform is FP32 here.
  EXPECT_LT(std::sqrt(error / norm), size > 0 ? 0x1p-24 : 1e-12);
}

INSTANTIATE_TEST_SUITE_P(All, Golden, ::testing::ValuesIn(AllCases()), [](const auto& info) {
  std::string name = absl::StrCat(info.param.folder, "_", info.param.Text("model"), "_",
                                  info.param.Text("weight"));
  for (char& c : name) c = absl::ascii_isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
});

}  // namespace
}  // namespace awqd
