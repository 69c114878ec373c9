// Every target's tensors, decoded by its format, give the original weight bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/tools/elements.h"
#include "client/tools/encode/target.h"
#include "kernels/checkpoint/linear_rules.h"
#include "kernels/checkpoint/quant_settings.h"
#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/client/tools/made_weight.h"
#include "tests/testing/places.h"

namespace awqd::tools {
namespace {

using ::testing::HasSubstr;

struct Bytes {
  NewTensor tensor;
  std::vector<uint8_t> bytes;
};

absl::StatusOr<std::vector<Bytes>> ReadAll(const EncodedLinear& linear) {
  std::vector<Bytes> out;
  for (const NewTensor& tensor : linear.tensors) {
    std::vector<uint8_t> bytes(tensor.bytes);
    if (auto status = tensor.read(0, absl::MakeSpan(bytes)); !status.ok()) return status;
    out.push_back({tensor, std::move(bytes)});
  }
  return out;
}

// Decodes by the settings that the target writes for the one linear "a.up".
absl::StatusOr<HostWeight> BackFrom(const Target& target, const EncodedLinear& linear) {
  const FolderFacts facts = {.linears = {{"a.up", linear.facts}}, .dense = {"lm_head"}};
  const auto settings = target.settings(facts);
  if (!settings.ok()) return settings.status();
  const auto config = model::ParseConfigJson(
      nlohmann::ordered_json{{std::string(target.settings_key), *settings}}.dump());
  if (!config.ok()) return config.status();
  const auto found = FindFormat((*config)->settings);
  if (!found.ok()) return found.status();
  EXPECT_EQ(found->format->name, target.format);
  const auto rules = model::LinearRules::Make(found->config);
  if (!rules.ok()) return rules.status();
  const LinearRule* const rule = *rules->RuleOf("a.up");
  if (rule == nullptr) return absl::NotFoundError("a.up is not quantised");
  const auto all = ReadAll(linear);
  if (!all.ok()) return all.status();
  LinearTensors tensors;
  for (const Bytes& one : *all) {
    tensors[one.tensor.name] = {one.tensor.dtype, one.tensor.shape, one.bytes};
  }
  return rule->format->Decode(rule->settings, tensors);
}

// The bits of all elements, by in-feature.
std::vector<uint32_t> Bits(const HostWeight& weight) {
  std::vector<uint32_t> out(weight.k * weight.n);
  for (int64_t i = 0; i < weight.k; ++i) {
    const int64_t k = weight.order.empty() ? i : weight.order[i];
    for (int64_t col = 0; col < weight.n; ++col) {
      out[k * weight.n + col] = std::bit_cast<uint32_t>(WeightValue(weight, i, col));
    }
  }
  return out;
}

void ExpectSame(const HostWeight& got, const HostWeight& want, const std::string& what) {
  ASSERT_EQ(got.k, want.k) << what;
  ASSERT_EQ(got.n, want.n) << what;
  EXPECT_TRUE(Bits(got) == Bits(want)) << what;
  EXPECT_EQ(got.bias, want.bias) << what;
}

void ExpectRoundTrip(const Target& target, const HostWeight& weight, const std::string& what) {
  const auto encoded = target.Encode(weight, {.bias_dtype = "F32"});
  ASSERT_TRUE(encoded.ok()) << what << ": " << encoded.status();
  const auto back = BackFrom(target, *encoded);
  ASSERT_TRUE(back.ok()) << what << ": " << back.status();
  ExpectSame(*back, weight, what);
}

std::string Refusal(const Target& target, const HostWeight& weight) {
  const auto encoded = target.Encode(weight, {.dtype = "F16"});
  EXPECT_EQ(encoded.status().code(), absl::StatusCode::kInvalidArgument) << target.name;
  return std::string(encoded.status().message());
}

// The targets that write linear by linear and have settings.
std::vector<const Target*> Readable() {
  std::vector<const Target*> out;
  for (const Target* target : AllTargets()) {
    if (target->settings != nullptr) out.push_back(target);
  }
  return out;
}

TEST(Encode, EveryWidthThatATargetHas) {
  int checked = 0;
  for (const Target* target : Readable()) {
    for (const int bits : target->widths) {
      for (const int64_t group : {0, 32}) {
        for (const bool symmetric : {true, false}) {
          if (!symmetric && !target->asymmetric) continue;
          for (const DType scale : {DType::kFp16, DType::kBf16}) {
            WeightPlanOfTest plan = {.k = 128, .n = 64, .bias = true, .seed = 7};
            plan.scheme =
                symmetric ? Symmetric(bits, group, scale) : Asymmetric(bits, group, scale);
            ExpectRoundTrip(*target, MakeWeight(plan),
                            absl::StrCat(target->name, " ", ToString(plan.scheme)));
            ++checked;
          }
        }
      }
    }
  }
  EXPECT_GE(checked, 80);
}

TEST(Encode, OddShapesOrdersAndShortGroups) {
  WeightPlanOfTest odd = {.k = 75, .n = 13, .scheme = Asymmetric(3, 32), .bias = true};
  ExpectRoundTrip(kGptqTarget, MakeWeight(odd), "gptq 75 x 13");
  ExpectRoundTrip(kGemliteTarget, MakeWeight(odd), "gemlite 75 x 13");
  WeightPlanOfTest act = {.k = 96, .n = 40, .scheme = Asymmetric(4, 32), .order = true};
  ExpectRoundTrip(kGptqTarget, MakeWeight(act), "gptq with an order");
  act.k = 70;
  ExpectRoundTrip(kGptqTarget, MakeWeight(act), "gptq with an order and a short group");
  ExpectRoundTrip(kAwqTarget, MakeWeight({.k = 3, .n = 8, .scheme = Asymmetric(4, 1)}), "awq");
}

// Every golden weight into every target that can hold it; the other targets refuse it by name.
TEST(Encode, EveryGoldenIntoEveryTarget) {
  std::map<std::string, int> fits;
  int refused = 0;
  for (const Format* format : AllFormats()) {
    for (const auto& folder :
         std::filesystem::directory_iterator(DataPath(std::string(format->name)))) {
      if (!std::filesystem::exists(folder.path() / "config.json")) continue;
      const auto model = Model::Open(folder.path());
      ASSERT_TRUE(model.ok()) << model.status();
      for (const auto& linear : model->checkpoint()->linears()) {
        const auto elements = ReadElements(*model, linear.path);
        ASSERT_TRUE(elements.ok());
        for (const Target* target : Readable()) {
          const auto encoded = target->Encode(*elements->weight(), {.bias_dtype = "F32"});
          const std::string what = absl::StrCat(folder.path().string(), " ", linear.path);
          if (!encoded.ok()) {
            EXPECT_THAT(std::string(encoded.status().message()), HasSubstr("expected")) << what;
            ++refused;
            continue;
          }
          if (encoded->facts.dense) {
            EXPECT_EQ(target, &kMlxTarget) << what;
            continue;
          }
          const auto back = BackFrom(*target, *encoded);
          ASSERT_TRUE(back.ok()) << target->name << " " << what << ": " << back.status();
          ExpectSame(*back, *elements->weight(), absl::StrCat(target->name, " ", what));
          ++fits[std::string(target->name)];
        }
      }
    }
  }
  EXPECT_GE(fits["awq"], 12);
  EXPECT_GE(fits["gptq"], 25);
  EXPECT_GE(fits["gemlite"], 25);
  EXPECT_GE(fits["ft"], 4);
  EXPECT_GE(fits["mlx"], 100);
  EXPECT_GE(refused, 50);
}

TEST(Encode, RefusesByThePart) {
  const HostWeight w4 = MakeWeight({.scheme = Asymmetric(4, 32)});
  HostWeight factor = w4;
  factor.factor.assign(factor.k, 2.0f);
  for (const Target* target : AllTargets()) {
    if (target->limits.widths.empty()) continue;  // multiplies by it, or has it dense
    EXPECT_THAT(Refusal(*target, factor), HasSubstr("factor: got one")) << target->name;
  }
  EXPECT_THAT(Refusal(kFasterTransformerTarget, w4), HasSubstr("scheme: got w4g32z"));
  EXPECT_THAT(Refusal(kAwqTarget, MakeWeight({.scheme = Asymmetric(8, 32)})),
              HasSubstr("codes: got w8g32z, expected integers of 4 bits"));
  EXPECT_THAT(Refusal(kAwqTarget, MakeWeight({.n = 12, .scheme = Asymmetric(4, 32)})),
              HasSubstr("N: got 12"));
  EXPECT_THAT(Refusal(kAwqTarget, MakeWeight({.k = 70, .scheme = Asymmetric(4, 32)})),
              HasSubstr("groups: got a short last one"));
  EXPECT_THAT(Refusal(kAwqTarget, MakeWeight({.scheme = Asymmetric(4, 32), .order = true})),
              HasSubstr("order: got rows sorted by group"));
  HostWeight fine = MakeWeight({.scheme = Asymmetric(4, 32, DType::kFp32)});
  const float third = 1.0f / 3;
  std::memcpy(fine.scales.data() + 4 * 35, &third, 4);
  EXPECT_THAT(Refusal(kAwqTarget, fine),
              HasSubstr("scales: got 0.333333 at [1, 3], expected numbers that FP16 or BF16"));
  HostWeight levels = MakeWeight({.scheme = Asymmetric(4, 32)});
  levels.scheme.outer = OuterKind::kOne;
  levels.outer = {2.0f};
  EXPECT_THAT(Refusal(kAwqTarget, levels), HasSubstr("expected one level"));
  HostWeight above = MakeWeight({.scheme = Symmetric(4, 32)});
  above.scheme.zero = 200;
  EXPECT_THAT(Refusal(kGptqTarget, above), HasSubstr("zero: got 200, expected 0 to 15"));
}

TEST(Encode, RealZerosThatAreIntegersAreStored) {
  HostWeight weight = MakeWeight({.scheme = Asymmetric(4, 32)});
  weight.scheme.zero_kind = ZeroKind::kRealBefore;
  weight.scheme.zero_dtype = DType::kFp32;
  std::vector<float> zeros;
  for (uint8_t zero : weight.zeros) zeros.push_back(zero);
  weight.zeros.resize(4 * zeros.size());
  std::memcpy(weight.zeros.data(), zeros.data(), weight.zeros.size());
  ExpectRoundTrip(kAwqTarget, weight, "integers");
  const float half = 7.5f;
  std::memcpy(weight.zeros.data() + 4 * 33, &half, 4);
  EXPECT_THAT(Refusal(kGptqTarget, weight), HasSubstr("zeros: got 7.5 at [1, 1]"));
  ExpectRoundTrip(kGemliteTarget, weight, "real zeros");
  weight.scheme.zero_kind = ZeroKind::kRealAfter;
  EXPECT_THAT(Refusal(kGemliteTarget, weight), HasSubstr("real ones after the scale"));
}

TEST(Encode, OneScaleForAllAndNone) {
  HostWeight all = MakeWeight({.scheme = Symmetric(8, 0, DType::kBf16)});
  all.scheme.block_cols = 0;
  all.scales.resize(2);
  ExpectRoundTrip(kFasterTransformerTarget,
                  MakeWeight({.k = 64, .n = 64, .scheme = Symmetric(8, 0)}), "columns");
  ExpectRoundTrip(kGptqTarget, all, "one scale");
  HostWeight none = MakeWeight({.scheme = Symmetric(8, 0)});
  none.scheme.scale_dtype.reset();
  none.scales.clear();
  ExpectRoundTrip(kGptqTarget, none, "integers");
  none.scheme.outer = OuterKind::kColumn;
  none.outer.assign(none.n, 0.25f);
  ExpectRoundTrip(kGptqTarget, none, "an outer scale alone");
}

// Computed from the layout's scheme: the code of [n, k] is in word k / (32 / bits) of row n,
// the zero of group g in row n / (32 / bits) of column g.
TEST(Encode, CompressedTensorsByAddress) {
  for (const int bits : {2, 4, 8}) {
    const HostWeight weight = MakeWeight({.k = 96, .n = 20, .scheme = Asymmetric(bits, 32)});
    const auto encoded = kCompressedTensorsTarget.Encode(weight, {});
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    const auto all = ReadAll(*encoded);
    ASSERT_TRUE(all.ok());
    std::map<std::string, const Bytes*> by_name;
    for (const Bytes& one : *all) by_name[one.tensor.name] = &one;
    const int in_word = 32 / bits, mask = (1 << bits) - 1;
    const auto field = [&](const char* name, int64_t word, int64_t at) {
      uint32_t value;
      std::memcpy(&value, by_name.at(name)->bytes.data() + 4 * word, 4);
      return static_cast<int>(value >> (at % in_word * bits) & static_cast<uint32_t>(mask));
    };
    int wrong = 0;
    for (int64_t n = 0; n < 20; ++n) {
      for (int64_t k = 0; k < 96; ++k) {
        const int64_t word = n * (96 / in_word) + k / in_word;
        wrong += field("weight_packed", word, k) != weight.Code(k, n) ? 1 : 0;
      }
      for (int64_t g = 0; g < 3; ++g) {
        wrong += field("weight_zero_point", n / in_word * 3 + g, n) != weight.Zero(g, n) ? 1 : 0;
        uint16_t scale;
        std::memcpy(&scale, by_name.at("weight_scale")->bytes.data() + 2 * (n * 3 + g), 2);
        wrong += HalfToFloat(scale) != weight.Scale(g, n) ? 1 : 0;
      }
    }
    EXPECT_EQ(wrong, 0) << bits;
    EXPECT_EQ(by_name.at("weight_shape")->bytes[0], 20);
    EXPECT_EQ(by_name.at("weight_shape")->bytes[8], 96);
    EXPECT_EQ(by_name.at("weight_zero_point")->tensor.shape,
              (std::vector<int64_t>{(20 * bits + 31) / 32, 3}));
  }
  const auto symmetric =
      kCompressedTensorsTarget.Encode(MakeWeight({.scheme = Symmetric(4, 0)}), {});
  ASSERT_TRUE(symmetric.ok());
  for (const NewTensor& tensor : symmetric->tensors) EXPECT_NE(tensor.name, "weight_zero_point");
}

TEST(Encode, DenseIsEachElementRoundedOnce) {
  for (const char* dtype : {"F16", "BF16", "F32"}) {
    HostWeight weight =
        MakeWeight({.k = 70, .n = 21, .scheme = Asymmetric(4, 32, DType::kFp32), .order = true});
    const float fine = 0.1234567f;
    std::memcpy(weight.scales.data(), &fine, 4);
    const auto encoded = kDenseTarget.Encode(weight, {.dtype = dtype});
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    const NewTensor& tensor = encoded->tensors.at(0);
    EXPECT_EQ(tensor.shape, (std::vector<int64_t>{21, 70}));
    std::vector<uint8_t> bytes(tensor.bytes), want(tensor.bytes);
    const DType type = FloatTypeNamed(dtype);
    // Parts that begin in the middle of eight columns.
    for (int64_t row = 0; row < 21; row += 5) {
      const int64_t at = row * tensor.unit, count = std::min<int64_t>(5, 21 - row) * tensor.unit;
      ASSERT_TRUE(tensor.read(at, absl::MakeSpan(bytes).subspan(at, count)).ok());
    }
    for (int64_t i = 0; i < weight.k; ++i) {
      for (int64_t n = 0; n < weight.n; ++n) {
        StoreElement(want.data(), type, n * weight.k + weight.order[i], WeightValue(weight, i, n));
      }
    }
    EXPECT_TRUE(bytes == want) << dtype;
  }
}

TEST(Encode, DenseRefusesWhatWouldBeInfinite) {
  HostWeight weight = MakeWeight({.scheme = Symmetric(8, 0, DType::kFp32)});
  const float large = 1e6f;
  std::memcpy(weight.scales.data() + 4 * 3, &large, 4);
  const auto encoded = kDenseTarget.Encode(weight, {.dtype = "F16"});
  ASSERT_TRUE(encoded.ok());
  std::vector<uint8_t> bytes(encoded->tensors[0].bytes);
  EXPECT_THAT(std::string(encoded->tensors[0].read(0, absl::MakeSpan(bytes)).message()),
              HasSubstr(", 3], expected numbers within the range of F16"));
}

}  // namespace
}  // namespace awqd::tools
