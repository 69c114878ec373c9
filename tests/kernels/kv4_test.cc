// KV4 on the device that AWQD_TEST_DEVICE names, against the definition in double and against
// goldens of an independent script.
#include "kernels/kv4.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/half.h"
#include "tests/kernels/kv4_oracle.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"
#include "tests/testing/npy.h"
#include "tests/testing/places.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/test_device.h"

namespace awqd::testing {
namespace {

using Bytes = std::vector<uint8_t>;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Bytes Elements(const std::vector<float>& values, DType dtype) {
  Bytes out(values.size() * SizeOf(dtype));
  for (size_t i = 0; i < values.size(); ++i) SetElement(&out, dtype, i, values[i]);
  return out;
}

// Stored keys or values: inputs of a test, and outputs of Kv4Store.
struct Stored {
  Kv4Shape shape;
  DType scale_dtype = DType::kFp16;
  Kv4Per per = Kv4Per::kRow;
  Bytes codes, scale, zero;

  float Scale(int64_t i) const { return GetElement(scale, scale_dtype, i); }
  float Zero(int64_t i) const { return GetElement(zero, scale_dtype, i); }
  int Code(int64_t row, int64_t i) const {
    return codes[row * shape.row_bytes() + i / 2] >> (i % 2 * 4) & 15;
  }
};

class Kv4Test : public ::testing::Test {
 protected:
  GuardedBuffer Filled(const Bytes& bytes, int64_t misalign = 0) {
    auto buffer =
        GuardedBuffer::Create(device_, static_cast<int64_t>(bytes.size()), misalign).value();
    EXPECT_THAT(buffer.Fill(bytes), IsOk());
    return buffer;
  }
  GuardedBuffer Empty(int64_t bytes, int64_t misalign = 0) {
    return GuardedBuffer::Create(device_, bytes, misalign).value();
  }
  Bytes Take(const GuardedBuffer& buffer) {
    EXPECT_THAT(buffer.CheckBands(), IsOk());
    return buffer.Read().value();
  }

  // `out` has shape, scale_dtype and per, and given scales if per needs them.
  void Store(const Bytes& x, DType dtype, Stored* out, int64_t misalign = 0) {
    const bool given = out->per != Kv4Per::kRow;
    const int64_t scale_bytes = Kv4Scales(out->shape, out->per) * SizeOf(out->scale_dtype);
    const GuardedBuffer from = Filled(x, misalign);
    const GuardedBuffer codes = Empty(out->shape.code_bytes(), misalign);
    const GuardedBuffer scale = given ? Filled(out->scale) : Empty(scale_bytes);
    const GuardedBuffer zero = given ? Filled(out->zero) : Empty(scale_bytes);
    Kv4StoreArgs args = {.shape = out->shape, .x = from.data(), .x_dtype = dtype};
    args.codes = static_cast<uint8_t*>(codes.data());
    args.scale_dtype = out->scale_dtype;
    args.per = out->per;
    args.scale = given ? nullptr : scale.data();
    args.zero = given ? nullptr : zero.data();
    args.given_scale = given ? scale.data() : nullptr;
    args.given_zero = given ? zero.data() : nullptr;
    ASSERT_THAT(Kv4Store(args, device_, stream_->view()), IsOk());
    ASSERT_THAT(stream_->Synchronize(), IsOk());
    out->codes = Take(codes);
    if (!given) out->scale = Take(scale);
    if (!given) out->zero = Take(zero);
  }

  Bytes Load(const Stored& stored, Kv4Form form, DType dtype, int64_t misalign = 0) {
    const GuardedBuffer codes = Filled(stored.codes, misalign);
    const GuardedBuffer scale = Filled(stored.scale), zero = Filled(stored.zero);
    const int64_t elements = stored.shape.rows() * stored.shape.head_dim;
    const GuardedBuffer out = Empty(elements * SizeOf(dtype), misalign);
    Kv4LoadArgs args = {.shape = stored.shape};
    args.codes = static_cast<const uint8_t*>(codes.data());
    args.scale_dtype = stored.scale_dtype;
    args.per = stored.per;
    args.scale = scale.data();
    args.zero = zero.data();
    args.form = form;
    args.out = out.data();
    args.out_dtype = dtype;
    EXPECT_THAT(Kv4Load(args, device_, stream_->view()), IsOk());
    EXPECT_THAT(stream_->Synchronize(), IsOk());
    return Take(out);
  }

  // One row, stored with computed FP16 scales.
  Stored StoreRow(const std::vector<float>& row, DType dtype, DType scale_dtype = DType::kFp16) {
    Stored out{.shape = {1, 1, static_cast<int64_t>(row.size())}, .scale_dtype = scale_dtype};
    Store(Elements(row, dtype), dtype, &out);
    return out;
  }
  std::vector<float> LoadRow(const Stored& stored, Kv4Form form, DType dtype) {
    const Bytes got = Load(stored, form, dtype);
    std::vector<float> out;
    for (int64_t i = 0; i < stored.shape.head_dim; ++i) out.push_back(GetElement(got, dtype, i));
    return out;
  }

  // Compares the stored codes, and all ways to load them, with the oracle.
  void ExpectAsDefined(const Bytes& x, DType dtype, const Stored& stored) {
    const auto& [shape, scale_dtype, per, codes, scale, zero] = stored;
    for (int64_t row = 0; row < shape.rows(); ++row) {
      const int64_t at = per == Kv4Per::kRow ? row : per == Kv4Per::kHead ? row % shape.heads : 0;
      std::vector<float> values;
      for (int64_t i = 0; i < shape.head_dim; ++i) {
        values.push_back(GetElement(x, dtype, row * shape.head_dim + i));
      }
      if (per == Kv4Per::kRow) {
        const OracleScale want = OracleScaleOf(values, scale_dtype);
        ASSERT_EQ(stored.Scale(at), want.scale) << "row " << row;
        ASSERT_EQ(stored.Zero(at), want.zero) << "row " << row;
      }
      for (int64_t i = 0; i < shape.head_dim; ++i) {
        ASSERT_EQ(stored.Code(row, i), OracleCode(values[i], stored.Scale(at), stored.Zero(at)))
            << "row " << row << " element " << i << ": " << values[i];
      }
      for (int64_t i = shape.head_dim; i < 2 * shape.row_bytes(); ++i) {
        ASSERT_EQ(stored.Code(row, i), 0) << "half a byte too many";
      }
    }
  }
  void ExpectLoads(const Stored& stored, int64_t misalign = 0) {
    const Kv4Shape& shape = stored.shape;
    for (const auto& [form, dtype] : {std::pair{Kv4Form::kExact, DType::kFp16},
                                      {Kv4Form::kExact, DType::kBf16},
                                      {Kv4Form::kExact, DType::kFp32},
                                      {Kv4Form::kFused, DType::kFp16}}) {
      const Bytes got = Load(stored, form, dtype, misalign);
      Bytes want(got.size());
      for (int64_t row = 0; row < shape.rows(); ++row) {
        const int64_t at = stored.per == Kv4Per::kRow    ? row
                           : stored.per == Kv4Per::kHead ? row % shape.heads
                                                         : 0;
        for (int64_t i = 0; i < shape.head_dim; ++i) {
          OracleElement(stored.Code(row, i), stored.Scale(at), stored.Zero(at), form, dtype,
                        row * shape.head_dim + i, &want);
        }
      }
      ASSERT_EQ(FirstDifference(got, want), -1) << Name(dtype) << (form == Kv4Form::kFused);
    }
  }

  Device& device_ = TestDevice();
  std::unique_ptr<Stream> stream_ = device_.CreateStream().value();
};

// Realistic keys: most channels small, some large, each row away from zero.
Bytes Keys(const Kv4Shape& shape, DType dtype) {
  const Bytes normal = RandomMatrix(shape.rows(), shape.head_dim, DType::kFp32, shape.head_dim);
  std::vector<float> out;
  for (int64_t i = 0; i < shape.rows() * shape.head_dim; ++i) {
    const int64_t row = i / shape.head_dim, channel = i % shape.head_dim;
    const float value = GetElement(normal, DType::kFp32, i);
    out.push_back(value * (channel % 7 == 3 ? 9.0f : 0.5f) + static_cast<float>(row % 5) - 2);
  }
  return Elements(out, dtype);
}

TEST_F(Kv4Test, EveryTypeAndHeadDim) {
  for (int64_t head_dim : {1, 2, 7, 8, 63, 64, 80, 128, 256, 264, 1024, 1032, 1040}) {
    for (DType dtype : {DType::kFp16, DType::kBf16, DType::kFp32}) {
      for (DType scale_dtype : {DType::kFp16, DType::kFp32}) {
        SCOPED_TRACE(absl::StrCat(Name(dtype), " ", head_dim, " ", Name(scale_dtype)));
        Stored stored{.shape = {7, 5, head_dim}, .scale_dtype = scale_dtype};
        const Bytes x = Keys(stored.shape, dtype);
        Store(x, dtype, &stored);
        ExpectAsDefined(x, dtype, stored);
        ExpectLoads(stored);
      }
    }
  }
}

// More rows than a launch has threads.
TEST_F(Kv4Test, ManyRows) {
  Stored stored{.shape = {3001, 8, 16}};
  const Bytes x = Keys(stored.shape, DType::kFp16);
  Store(x, DType::kFp16, &stored);
  ExpectAsDefined(x, DType::kFp16, stored);
  ExpectLoads(stored);
}

TEST_F(Kv4Test, PointersThatNoVectorInstructionTakes) {
  for (DType dtype : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    Stored stored{.shape = {5, 3, 128}};
    const Bytes x = Keys(stored.shape, dtype);
    Store(x, dtype, &stored, /*misalign=*/4);
    ExpectAsDefined(x, dtype, stored);
    ExpectLoads(stored, /*misalign=*/4);
  }
}

// Larger than a cache; the CPU then bypasses it.
TEST_F(Kv4Test, LargeBlocks) {
  Stored stored{.shape = {1025, 32, 128}};
  const Bytes x = Keys(stored.shape, DType::kFp16);
  Store(x, DType::kFp16, &stored);
  const Bytes got = Load(stored, Kv4Form::kExact, DType::kFp16);
  for (int64_t row = 0; row < stored.shape.rows(); ++row) {
    const float bound = stored.Scale(row) * 0.53f;  // half a code, and roundings to FP16
    for (int64_t i = row * 128; i < (row + 1) * 128; ++i) {
      ASSERT_NEAR(GetElement(got, DType::kFp16, i), GetElement(x, DType::kFp16, i), bound) << i;
    }
  }
}

TEST_F(Kv4Test, GivenScales) {
  for (Kv4Per per : {Kv4Per::kHead, Kv4Per::kTensor}) {
    for (DType scale_dtype : {DType::kFp16, DType::kFp32}) {
      for (int64_t head_dim : {7, 80, 128}) {
        Stored stored{.shape = {9, 4, head_dim}, .scale_dtype = scale_dtype, .per = per};
        std::vector<float> scale = {0.25f, 0.03f, 1.0f, 0.5f}, zero = {7.5f, 3.0f, 20.0f, -4.25f};
        scale.resize(Kv4Scales(stored.shape, per));
        zero.resize(scale.size());
        stored.scale = Elements(scale, scale_dtype);
        stored.zero = Elements(zero, scale_dtype);
        const Bytes x = Keys(stored.shape, DType::kFp16);
        Store(x, DType::kFp16, &stored);
        ExpectAsDefined(x, DType::kFp16, stored);
        ExpectLoads(stored);
      }
    }
  }
}

// QServe keeps the lower four bits of 16 to 255.
TEST_F(Kv4Test, CodesSaturate) {
  Stored stored{.shape = {1, 1, 8}, .per = Kv4Per::kTensor};
  stored.scale = Elements({1}, DType::kFp16);
  stored.zero = Elements({8}, DType::kFp16);
  Store(Elements({-100, -9, -8, 0, 7, 8, 9, 30000}, DType::kFp16), DType::kFp16, &stored);
  EXPECT_EQ(stored.codes, (Bytes{0x00, 0x80, 0xff, 0xff}));
}

TEST_F(Kv4Test, TiesGoToEven) {
  Stored stored{.shape = {1, 1, 6}, .per = Kv4Per::kTensor};
  stored.scale = Elements({1}, DType::kFp16);
  stored.zero = Elements({0}, DType::kFp16);
  Store(Elements({0.5f, 1.5f, 2.5f, 13.5f, 14.5f, 15.5f}, DType::kFp16), DType::kFp16, &stored);
  EXPECT_EQ(stored.codes, (Bytes{0x20, 0xe2, 0xfe}));
}

TEST_F(Kv4Test, NansAndInfinities) {
  for (DType dtype : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    for (int64_t head_dim : {8, 9, 64}) {
      std::vector<float> row(head_dim, 0.0f);
      row[1] = -kInf;
      row[2] = kNan;
      row[3] = kInf;
      row[4] = -7.5f;
      row[5] = 7.5f;
      const Stored stored = StoreRow(row, dtype);
      EXPECT_EQ(stored.Scale(0), 1);
      EXPECT_EQ(stored.Zero(0), 7.5f);
      EXPECT_EQ((std::vector{stored.Code(0, 0), stored.Code(0, 1), stored.Code(0, 2),
                             stored.Code(0, 3), stored.Code(0, 4), stored.Code(0, 5)}),
                (std::vector{8, 0, 0, 15, 0, 15}));
      ExpectLoads(stored);
    }
    const Stored none = StoreRow({kNan, kInf, -kInf, kNan}, dtype);
    EXPECT_EQ(none.Scale(0), 1);
    EXPECT_EQ(none.Zero(0), 0);
    EXPECT_EQ(none.codes, (Bytes{0xf0, 0x00}));
  }
}

TEST_F(Kv4Test, AConstantRowComesBackAsItWas) {
  for (float c : {0.0f, 1.0f, -1.0f, 3.140625f, -0.0009765625f, 448.0f, 65504.0f, -65504.0f,
                  0x1p-24f, -0x1p-24f}) {
    for (int64_t head_dim : {1, 8, 63, 128}) {
      const Stored stored = StoreRow(std::vector<float>(head_dim, c), DType::kFp16);
      for (Kv4Form form : {Kv4Form::kExact, Kv4Form::kFused}) {
        EXPECT_THAT(LoadRow(stored, form, DType::kFp16), ::testing::Each(c)) << head_dim;
      }
    }
  }
  for (float c : {1e-30f, -1e30f, 3e38f, 0x1p-126f, 1e-44f}) {
    const Stored stored = StoreRow(std::vector<float>(16, c), DType::kFp32, DType::kFp32);
    const float want = std::fabs(c) < 0x1p-126f ? 0 : c;
    EXPECT_THAT(LoadRow(stored, Kv4Form::kExact, DType::kFp32), ::testing::Each(want)) << c;
  }
}

// Elements of types with a larger range than FP16 scales.
TEST_F(Kv4Test, WhatFp16ScalesCannotHold) {
  const Stored large = StoreRow({1e6f, 2e5f, -3e5f, 0}, DType::kFp32);
  EXPECT_EQ(large.Scale(0), HalfToFloat(FloatToHalf((491280.0f + 3e5f) / 15)));
  EXPECT_EQ(large.Code(0, 0), 15) << "beyond the reach";
  const std::vector<float> back = LoadRow(large, Kv4Form::kExact, DType::kFp32);
  for (int i = 1; i < 4; ++i) {
    EXPECT_NEAR(back[i], (std::vector<float>{0, 2e5f, -3e5f, 0})[i], large.Scale(0) * 0.53f);
  }
  for (float c : {1e5f, -4e5f}) {
    const Stored stored = StoreRow({c, c, c}, DType::kFp32);
    EXPECT_NEAR(LoadRow(stored, Kv4Form::kExact, DType::kFp32)[0], c, 4e5f * 0x1p-11f);
  }
  const Stored farthest = StoreRow({2e6f, 3e6f}, DType::kFp32);
  EXPECT_THAT(LoadRow(farthest, Kv4Form::kExact, DType::kFp32), ::testing::Each(15 * 65504.0f));
  // Nearly constant: its zero would be beyond FP16.
  const Stored near = StoreRow({1000, 1000.01f, 1000.02f}, DType::kFp32);
  for (float v : LoadRow(near, Kv4Form::kExact, DType::kFp32)) EXPECT_NEAR(v, 1000, 0.5);
  const Stored small = StoreRow({1e-12f, -1e-12f}, DType::kFp32);
  for (float v : LoadRow(small, Kv4Form::kExact, DType::kFp32)) EXPECT_NEAR(v, 0, 0x1p-24f);
}

// Loaded elements that are stored again keep their codes.
TEST_F(Kv4Test, LoadedElementsHaveTheirCodesAgain) {
  Stored once{.shape = {16, 4, 128}, .scale_dtype = DType::kFp32};
  Store(Keys(once.shape, DType::kFp32), DType::kFp32, &once);
  Stored again{.shape = {64, 1, 128}, .scale_dtype = DType::kFp32, .per = Kv4Per::kTensor};
  const Bytes loaded = Load(once, Kv4Form::kExact, DType::kFp32);
  for (int64_t row = 0; row < once.shape.rows(); ++row) {
    again.shape.tokens = 1;
    again.scale = Elements({once.Scale(row)}, DType::kFp32);
    again.zero = Elements({once.Zero(row)}, DType::kFp32);
    Store(Bytes(loaded.begin() + row * 512, loaded.begin() + (row + 1) * 512), DType::kFp32,
          &again);
    const auto begin = once.codes.begin() + row * 64;
    EXPECT_EQ(again.codes, Bytes(begin, begin + 64)) << row;
  }
}

TEST_F(Kv4Test, NoTokensAreFine) {
  EXPECT_THAT(Kv4Store({.shape = {0, 8, 128}}, device_, stream_->view()), IsOk());
  EXPECT_THAT(Kv4Load({.shape = {0, 8, 128}}, device_, stream_->view()), IsOk());
}

TEST_F(Kv4Test, RefusalsNameTheField) {
  const auto store = [&](const Kv4StoreArgs& args) {
    const absl::Status status = Kv4Store(args, device_, stream_->view());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const auto load = [&](const Kv4LoadArgs& args) {
    const absl::Status status = Kv4Load(args, device_, stream_->view());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(store({.shape = {-1, 8, 64}}), "kv4 tokens: got -1, expected 0 or more");
  EXPECT_EQ(store({.shape = {1, 0, 64}}), "kv4 heads: got 0, expected 1 or more");
  EXPECT_EQ(store({.shape = {1, 8, 0}}), "kv4 head_dim: got 0, expected 1 or more");
  EXPECT_EQ(store({.shape = {int64_t{1} << 40, 1 << 20, 64}}),
            "kv4 shape: got [1099511627776, 1048576, 64], expected 2^56 elements or fewer");
  EXPECT_EQ(store({.shape = {1, 8, 64}, .x_dtype = DType::kInt8}),
            "kv4 x dtype: got INT8, expected FP16, BF16 or FP32");
  EXPECT_EQ(store({.shape = {1, 8, 64}, .scale_dtype = DType::kBf16}),
            "kv4 scale dtype: got BF16, expected FP16 or FP32");
  EXPECT_EQ(store({.shape = {1, 8, 64}}), "kv4 x: got null, expected memory of the device");
  EXPECT_EQ(load({.shape = {1, 8, 64}, .form = Kv4Form::kFused, .out_dtype = DType::kBf16}),
            "kv4 output dtype: got BF16, expected FP16 for the fused form");
  EXPECT_EQ(load({.shape = {1, 8, 64}, .out_dtype = DType::kInt32}),
            "kv4 output dtype: got INT32, expected FP16, BF16 or FP32");
}

TEST_F(Kv4Test, Goldens) {
  const std::string folder = DataPath("kv4/goldens/");
  std::ifstream file(folder + "cases.json");
  ASSERT_TRUE(file.good()) << folder;
  const nlohmann::json goldens = nlohmann::json::parse(file);
  for (const auto& json : goldens.at("cases")) {
    const std::string name = json.at("name").get<std::string>();
    SCOPED_TRACE(name);
    const auto array = [&](const std::string& key) {
      const auto npy = ReadNpy(absl::StrCat(folder, name, "/", key, ".npy"));
      EXPECT_TRUE(npy.ok()) << npy.status();
      return npy.ok() ? Bytes(npy->bytes.begin(), npy->bytes.end()) : Bytes();
    };
    const auto dtype = [&](const char* key) {
      const std::string text = json.at(key).get<std::string>();
      return text == "FP16" ? DType::kFp16 : text == "BF16" ? DType::kBf16 : DType::kFp32;
    };
    const std::string per = json.at("per").get<std::string>();
    Stored stored{.shape = {json.at("tokens").get<int64_t>(), json.at("heads").get<int64_t>(),
                            json.at("head_dim").get<int64_t>()},
                  .scale_dtype = dtype("scale_dtype"),
                  .per = per == "row"    ? Kv4Per::kRow
                         : per == "head" ? Kv4Per::kHead
                                         : Kv4Per::kTensor};
    if (per != "row") stored.scale = array("scale");
    if (per != "row") stored.zero = array("zero");
    Store(array("x"), dtype("x_dtype"), &stored);
    EXPECT_EQ(stored.scale, array("scale"));
    EXPECT_EQ(stored.zero, array("zero"));
    EXPECT_EQ(stored.codes, array("codes"));
    EXPECT_EQ(Load(stored, Kv4Form::kExact, DType::kFp16), array("exact_fp16"));
    EXPECT_EQ(Load(stored, Kv4Form::kExact, DType::kBf16), array("exact_bf16"));
    EXPECT_EQ(Load(stored, Kv4Form::kExact, DType::kFp32), array("exact_fp32"));
    EXPECT_EQ(Load(stored, Kv4Form::kFused, DType::kFp16), array("fused_fp16"));
  }
}

}  // namespace
}  // namespace awqd::testing
