// AutoAWQ "gemm": the order of nibbles, and every refusal.
#include "kernels/formats/awq.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/half.h"

namespace awqd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::array<int, 8> kPackOrder = {0, 2, 4, 6, 1, 3, 5, 7};

// A linear whose tensors own their bytes, so that tests can spoil one thing at a time.
struct Linear {
  QuantConfig config = {.quant_method = "awq", .version = "gemm", .bits = 4, .group_size = 32};
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<uint8_t> bytes;
  };
  std::map<std::string, Tensor> tensors;

  absl::StatusOr<CanonicalWeight> Decode() const {
    LinearTensors views;
    for (const auto& [name, tensor] : tensors) {
      views.emplace(name, TensorView{tensor.dtype, tensor.shape, tensor.bytes});
    }
    return kAwqFormat.decode(config, views);
  }
  void Reshape(const std::string& name, std::vector<int64_t> shape) {
    Tensor& tensor = tensors[name];
    tensor.shape = std::move(shape);
    int64_t bytes = tensor.dtype == "I32" || tensor.dtype == "F32" ? 4 : 2;
    for (int64_t dim : tensor.shape) bytes *= dim;
    tensor.bytes.assign(bytes, 0);
  }
};

Linear MakeLinear(int64_t k, int64_t n, int64_t group_size) {
  Linear out;
  out.config.group_size = group_size;
  out.tensors = {
      {"qweight", {"I32", {}, {}}}, {"qzeros", {"I32", {}, {}}}, {"scales", {"F16", {}, {}}}};
  out.Reshape("qweight", {k, n / 8});
  out.Reshape("qzeros", {k / group_size, n / 8});
  out.Reshape("scales", {k / group_size, n});
  return out;
}

void Randomise(Linear* linear, uint32_t seed) {
  std::mt19937 random(seed);
  for (auto& [name, tensor] : linear->tensors) {
    for (uint8_t& byte : tensor.bytes) byte = static_cast<uint8_t>(random());
  }
}

uint32_t WordAt(const std::vector<uint8_t>& bytes, int64_t index) {
  uint32_t word;
  std::memcpy(&word, bytes.data() + 4 * index, sizeof(word));
  return word;
}

// The definition: column 8c + kPackOrder[i] of a row is nibble i of word c.
int NibbleOf(const Linear::Tensor& tensor, int64_t row, int64_t column) {
  int nibble = 0;
  while (kPackOrder[nibble] != column % 8) ++nibble;
  return WordAt(tensor.bytes, row * tensor.shape[1] + column / 8) >> (4 * nibble) & 15;
}

TEST(AwqFormat, PinnedWordDecodesToZeroToSeven) {
  Linear linear = MakeLinear(1, 8, 1);
  const uint32_t word = 0x75316420;
  std::memcpy(linear.tensors["qweight"].bytes.data(), &word, 4);
  std::memcpy(linear.tensors["qzeros"].bytes.data(), &word, 4);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  for (int column = 0; column < 8; ++column) {
    EXPECT_EQ(weight->Code(0, column), column);
    EXPECT_EQ(weight->Zero(0, column), column);
  }
}

TEST(AwqFormat, EveryNibbleValueInEveryPosition) {
  for (int nibble = 0; nibble < 8; ++nibble) {
    for (uint32_t value = 0; value < 16; ++value) {
      Linear linear = MakeLinear(1, 8, 1);
      const uint32_t word = value << (4 * nibble);
      std::memcpy(linear.tensors["qweight"].bytes.data(), &word, 4);
      std::memcpy(linear.tensors["qzeros"].bytes.data(), &word, 4);
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      for (int column = 0; column < 8; ++column) {
        const int expected = column == kPackOrder[nibble] ? static_cast<int>(value) : 0;
        EXPECT_EQ(weight->Code(0, column), expected);
        EXPECT_EQ(weight->Zero(0, column), expected);
      }
    }
  }
}

TEST(AwqFormat, ShapesAndGroups) {
  struct Shape {
    int64_t k, n, group;
  };
  for (const Shape& s :
       {Shape{32, 8, 16}, Shape{64, 64, 32}, Shape{96, 72, 96}, Shape{128, 128, 128},
        Shape{10944, 8, 64}, Shape{33, 192, 11}, Shape{7, 8, 1}}) {
    Linear linear = MakeLinear(s.k, s.n, s.group);
    Randomise(&linear, 7);
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    EXPECT_EQ(weight->format, "awq");
    EXPECT_EQ(weight->scheme, (QuantScheme{.bits = 4, .group_size = s.group}));
    EXPECT_EQ(weight->scales, linear.tensors["scales"].bytes);
    int64_t wrong = 0;
    for (int64_t row = 0; row < s.k; ++row) {
      for (int64_t column = 0; column < s.n; ++column) {
        wrong += weight->Code(row, column) != NibbleOf(linear.tensors["qweight"], row, column);
      }
    }
    for (int64_t group = 0; group < s.k / s.group; ++group) {
      for (int64_t column = 0; column < s.n; ++column) {
        wrong += weight->Zero(group, column) != NibbleOf(linear.tensors["qzeros"], group, column);
      }
    }
    EXPECT_EQ(wrong, 0) << s.k << " x " << s.n << " g " << s.group;
  }
}

TEST(AwqFormat, UnalignedBytes) {
  Linear linear = MakeLinear(32, 16, 32);
  Randomise(&linear, 3);
  const auto expected = linear.Decode();
  LinearTensors views;
  std::vector<std::vector<uint8_t>> shifted;
  for (const auto& [name, tensor] : linear.tensors) {
    shifted.push_back({0xff});
    shifted.back().insert(shifted.back().end(), tensor.bytes.begin(), tensor.bytes.end());
    views.emplace(name, TensorView{tensor.dtype, tensor.shape,
                                   absl::MakeConstSpan(shifted.back()).subspan(1)});
  }
  const auto weight = kAwqFormat.decode(linear.config, views);
  ASSERT_TRUE(weight.ok() && expected.ok());
  EXPECT_EQ(weight->codes, expected->codes);
  EXPECT_EQ(weight->zeros, expected->zeros);
  EXPECT_EQ(weight->scales, expected->scales);
}

TEST(AwqFormat, GroupSizeMinusOneIsAllOfK) {
  Linear linear = MakeLinear(96, 8, 96);
  linear.config.group_size = -1;
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->scheme.group_size, 96);
}

TEST(AwqFormat, UnsaidGroupSizeFollowsFromScales) {
  Linear linear = MakeLinear(96, 8, 32);
  linear.config.group_size = 0;
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->scheme.group_size, 32);
}

TEST(AwqFormat, UnsaidBitsAndVersionAreFourAndGemm) {
  Linear linear = MakeLinear(32, 8, 32);
  linear.config.bits = 0;
  linear.config.version = "";
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->scheme.bits, 4);
}

TEST(AwqFormat, BiasOfEachFloatingType) {
  const std::vector<float> values = {0.0f, 1.5f, -2.25f, 65504.0f, -0.0f, 0.125f, 3.0f, -1.0f};
  for (const std::string dtype : {"F16", "BF16", "F32"}) {
    Linear linear = MakeLinear(32, 8, 32);
    linear.tensors["bias"].dtype = dtype;
    linear.Reshape("bias", {8});
    std::vector<float> expected;
    for (int i = 0; i < 8; ++i) {
      uint8_t* at = linear.tensors["bias"].bytes.data() + i * (dtype == "F32" ? 4 : 2);
      const uint16_t half = dtype == "F16" ? FloatToHalf(values[i]) : FloatToBf16(values[i]);
      std::memcpy(at, dtype == "F32" ? static_cast<const void*>(&values[i]) : &half,
                  dtype == "F32" ? 4 : 2);
      expected.push_back(dtype == "BF16" ? Bf16ToFloat(half) : values[i]);
    }
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->bias, expected) << dtype;
  }
}

TEST(AwqFormat, OddScalesPassUnchanged) {
  Linear linear = MakeLinear(32, 8, 32);
  const uint16_t bits[8] = {0x7e00, 0x7c00, 0xfc00, 0x0001, 0x8001, 0x0000, 0x8000, 0x7bff};
  std::memcpy(linear.tensors["scales"].bytes.data(), bits, sizeof(bits));
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(std::memcmp(weight->scales.data(), bits, sizeof(bits)), 0);
}

struct Refusal {
  std::string name;
  std::function<void(Linear*)> spoil;
  std::vector<std::string> says;
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

class AwqRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(AwqRefusal, NamesTensorFoundAndExpected) {
  Linear linear = MakeLinear(64, 16, 32);
  ASSERT_TRUE(linear.Decode().ok());
  GetParam().spoil(&linear);
  const auto weight = linear.Decode();
  EXPECT_EQ(weight.status().code(), absl::StatusCode::kInvalidArgument);
  for (const std::string& text : GetParam().says) {
    EXPECT_THAT(std::string(weight.status().message()), HasSubstr(text));
  }
}

std::vector<Refusal> Refusals() {
  const auto dtype = [](const std::string& tensor, const std::string& to) {
    return [=](Linear* l) { l->tensors[tensor].dtype = to; };
  };
  const auto shape = [](const std::string& tensor, std::vector<int64_t> to) {
    return [=](Linear* l) { l->Reshape(tensor, to); };
  };
  const auto erase = [](const std::string& tensor) {
    return [=](Linear* l) { l->tensors.erase(tensor); };
  };
  const auto group = [](int64_t size) { return [=](Linear* l) { l->config.group_size = size; }; };
  const auto version = [](const std::string& to) {
    return [=](Linear* l) { l->config.version = to; };
  };
  return {
      {"QweightMissing", erase("qweight"), {"\"qweight\": got nothing, expected I32 [K, N/8]"}},
      {"ScalesMissing", erase("scales"), {"\"scales\": got nothing, expected F16"}},
      {"QzerosMissing", erase("qzeros"), {"\"qzeros\": got nothing, expected I32"}},
      {"QzerosMissingBecauseSymmetric",
       [](Linear* l) {
         l->config.zero_point = false;
         l->tensors.erase("qzeros");
       },
       {"\"qzeros\": got nothing (zero_point is false), expected I32"}},
      {"QweightDtype", dtype("qweight", "U32"), {"\"qweight\": got dtype U32, expected I32"}},
      {"QzerosDtype", dtype("qzeros", "F16"), {"\"qzeros\": got dtype F16, expected I32"}},
      {"ScalesDtype", dtype("scales", "BF16"), {"\"scales\": got dtype BF16, expected F16"}},
      {"QweightRank", shape("qweight", {128}), {"\"qweight\": got shape [128], expected rank 2"}},
      {"ScalesRank",
       shape("scales", {1, 2, 16}),
       {"\"scales\": got shape [1, 2, 16], expected rank 2"}},
      {"QzerosRank", shape("qzeros", {}), {"\"qzeros\": got shape [], expected rank 2"}},
      {"QweightNoRows", shape("qweight", {0, 2}), {"\"qweight\": got shape [0, 2]", "at least 1"}},
      {"ScalesNegative",
       [](Linear* l) {
         l->tensors["scales"].shape = {-2, 16};
       },
       {"\"scales\": got shape [-2, 16]", "at least 1"}},
      {"QweightOverflow",
       [](Linear* l) {
         l->tensors["qweight"].shape = {int64_t{1} << 32, int64_t{1} << 32};
       },
       {"\"qweight\": got shape [4294967296, 4294967296]", "2^63"}},
      {"QweightOneByteShort",
       [](Linear* l) { l->tensors["qweight"].bytes.pop_back(); },
       {"\"qweight\": got 511 bytes, expected 512 for I32 [64, 2]"}},
      {"ScalesOneByteLong",
       [](Linear* l) { l->tensors["scales"].bytes.push_back(0); },
       {"\"scales\": got 65 bytes, expected 64"}},
      {"NNotMultipleOfEight",
       shape("scales", {2, 12}),
       {"\"scales\": got N = 12", "multiple of 8"}},
      {"ScalesColumns",
       shape("scales", {2, 24}),
       {"\"qweight\": got shape [64, 2], expected [64, 3]", "N = 24 of tensor \"scales\""}},
      {"ScalesRows",
       shape("scales", {3, 16}),
       {"\"scales\": got 3 rows, expected 2 (K = 64 by group_size 32)"}},
      {"QzerosRows", shape("qzeros", {1, 2}), {"\"qzeros\": got shape [1, 2], expected [2, 2]"}},
      {"QzerosColumns", shape("qzeros", {2, 3}), {"\"qzeros\": got shape [2, 3], expected [2, 2]"}},
      {"GroupDoesNotDivide", group(48), {"group_size: got 48", "a divisor of K = 64"}},
      {"GroupPastK", group(128), {"group_size: got 128", "a divisor of K = 64"}},
      {"GroupBelowMinusOne", group(-2), {"group_size: got -2", "expected -1 or a divisor"}},
      {"GroupOfAllKDisagrees", group(-1), {"\"scales\": got 2 rows, expected 1"}},
      {"UnsaidGroupRagged",
       [](Linear* l) {
         l->config.group_size = 0;
         l->Reshape("scales", {3, 16});
       },
       {"\"scales\": got 3 rows, expected a divisor of K = 64"}},
      {"UnsaidGroupMoreRowsThanK",
       [](Linear* l) {
         l->config.group_size = 0;
         l->Reshape("scales", {128, 16});
       },
       {"\"scales\": got 128 rows, expected a divisor of K = 64"}},
      {"BiasDtype",
       [](Linear* l) {
         l->Reshape("bias", {16});
         l->tensors["bias"].dtype = "I32";
       },
       {"\"bias\": got dtype I32, expected F16, BF16 or F32"}},
      {"BiasRank",
       [](Linear* l) {
         l->tensors["bias"].dtype = "F16";
         l->Reshape("bias", {1, 16});
       },
       {"\"bias\": got shape [1, 16], expected rank 1"}},
      {"BiasLength",
       [](Linear* l) {
         l->tensors["bias"].dtype = "F32";
         l->Reshape("bias", {8});
       },
       {"\"bias\": got shape [8], expected [16]"}},
      {"EightBits", [](Linear* l) { l->config.bits = 8; }, {"bits: got 8, expected 4"}},
      {"Method",
       [](Linear* l) { l->config.quant_method = "gptq"; },
       {"quant_method: got \"gptq\", expected \"awq\""}},
      {"Gemv", version("gemv"), {"version: got \"gemv\", expected \"gemm\"", "along K"}},
      {"GemvFast", version("gemv_fast"), {"version: got \"gemv_fast\"", "16-bit"}},
      {"Marlin", version("marlin"), {"version: got \"marlin\"", "kernel's order"}},
      {"UnknownVersion", version("gemm2"), {"version: got \"gemm2\"", "knows"}},
  };
}

INSTANTIATE_TEST_SUITE_P(All, AwqRefusal, ::testing::ValuesIn(Refusals()),
                         [](const auto& info) { return info.param.name; });

TEST(AwqFormat, RefusesAConfigWithTheSameWords) {
  EXPECT_EQ(kAwqFormat.refuses({.quant_method = "awq", .version = "gemm", .bits = 4}), "");
  EXPECT_THAT(kAwqFormat.refuses({.quant_method = "awq", .version = "gemm", .bits = 3}),
              HasSubstr("bits: got 3"));
}

}  // namespace
}  // namespace awqd
