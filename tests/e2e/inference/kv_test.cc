// Keys and values to 4-bit codes and back through the real server, against goldens made by numpy.

#include "client/files/npy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using client::DequantizeKvCall;
using client::QuantizeKvCall;
using client::Tensor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Case {
  const char* name;
  int64_t head_dim;
  v1::DType scale_dtype;
  bool given;  // scales for each head, in the request
};
// The cases whose block has a type in NumPy.
constexpr Case kCases[] = {{"fp16-64", 64, v1::FP16, false},
                           {"fp32-80", 80, v1::FP16, false},
                           {"fp32-33", 33, v1::FP32, false},
                           {"heads-32", 32, v1::FP16, true}};

std::string Npy(const Case& golden, const std::string& name) {
  return DataPath("kv4/goldens/") + golden.name + "/" + name + ".npy";
}
Tensor Read(const Case& golden, const std::string& name) { return ReadTensor(Npy(golden, name)); }

class KvTest : public SharedServerTest {
 protected:
  static QuantizeKvCall Quantize(const Case& golden) {
    QuantizeKvCall call = {.block = Read(golden, "x")};
    if (golden.given) {
      call.scales = Read(golden, "scale");
      call.zeros = Read(golden, "zero");
    } else {
      call.scale_dtype = golden.scale_dtype;
    }
    return call;
  }
  // The goldens have a line for each head of each token.
  static Tensor Codes(const Case& golden) {
    Tensor out = Read(golden, "codes");
    out.shape = Read(golden, "x").shape;
    out.shape[2] = (golden.head_dim + 1) / 2;
    return out;
  }
  static Tensor Scales(const Case& golden, const std::string& name) {
    Tensor out = Read(golden, name);
    const std::vector<int64_t> x = Read(golden, "x").shape;
    if (!golden.given) out.shape = {x[0], x[1]};
    return out;
  }
  static DequantizeKvCall Dequantize(const Case& golden) {
    return {.codes = Codes(golden),
            .scales = Scales(golden, "scale"),
            .zeros = Scales(golden, "zero"),
            .head_dim = golden.head_dim};
  }
  std::string Refused(QuantizeKvCall call) {
    const absl::Status status = client_->QuantizeKv(std::move(call)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  }
  std::string Refused(DequantizeKvCall call) {
    const absl::Status status = client_->DequantizeKv(std::move(call)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  }
};

TEST_F(KvTest, CodesScalesAndZerosAreThoseOfNumpy) {
  for (const Case& golden : kCases) {
    SCOPED_TRACE(golden.name);
    const auto got = client_->QuantizeKv(Quantize(golden));
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->codes.shape, Codes(golden).shape);
    EXPECT_EQ(got->codes.bytes, Codes(golden).bytes);
    ASSERT_EQ(got->scales.has_value(), !golden.given);
    EXPECT_FALSE(got->execution.kernel().empty());
    if (golden.given) continue;
    EXPECT_EQ(got->scales->dtype, golden.scale_dtype);
    EXPECT_EQ(got->scales->bytes, Read(golden, "scale").bytes);
    EXPECT_EQ(got->zeros->bytes, Read(golden, "zero").bytes);
  }
}

TEST_F(KvTest, ElementsAreThoseOfNumpyInBothForms) {
  for (const Case& golden : kCases) {
    SCOPED_TRACE(golden.name);
    DequantizeKvCall call = Dequantize(golden);
    for (const auto& [dtype, form, name] : {std::tuple{v1::FP16, v1::EXACT, "exact_fp16"},
                                            {v1::FP32, v1::EXACT, "exact_fp32"},
                                            {v1::FP16, v1::FMA, "fused_fp16"}}) {
      call.output_dtype = dtype;
      call.form = form;
      const auto got = client_->DequantizeKv(call);
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(got->output.shape, Read(golden, "x").shape);
      EXPECT_EQ(got->output.bytes, Read(golden, name).bytes) << name;
    }
  }
}

TEST_F(KvTest, NoTokens) {
  const auto got = client_->QuantizeKv({.block = {v1::FP16, {0, 2, 8}, ""}});
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_THAT(got->codes.shape, ElementsAre(0, 2, 4));
  EXPECT_THAT(got->scales->shape, ElementsAre(0, 2));
}

TEST_F(KvTest, RefusalsNameTheField) {
  const Case& golden = kCases[0];
  QuantizeKvCall call = Quantize(golden);
  call.block.shape = {15, 64};
  EXPECT_THAT(Refused(call),
              HasSubstr("block.shape: got [15, 64], expected [tokens, heads, head_"));
  call = Quantize(golden);
  call.scale_dtype = v1::BF16;
  EXPECT_THAT(Refused(call), HasSubstr("scale_dtype: got BF16, expected FP16, FP32"));
  call = Quantize(golden);
  call.scales = Read(kCases[3], "scale");
  EXPECT_THAT(Refused(call), HasSubstr("zeros: got nothing"));
  call.zeros = call.scales;
  EXPECT_THAT(Refused(call), HasSubstr("scales.shape: got [4], expected [3] or [1]"));
  DequantizeKvCall back = Dequantize(golden);
  back.head_dim = 62;
  EXPECT_THAT(Refused(back), HasSubstr("head_dim: got 62, expected 63 or 64"));
  back = Dequantize(golden);
  back.form = v1::FMA;
  back.output_dtype = v1::BF16;
  EXPECT_THAT(Refused(back), HasSubstr("form: got FMA, expected EXACT"));
  back = Dequantize(golden);
  back.codes.dtype = v1::INT8;
  EXPECT_THAT(Refused(back), HasSubstr("codes.dtype: got INT8, expected UINT8"));
}

TEST_F(KvTest, AwqctlSaysWhatIsLost) {
  const std::string prefix = *repository_ / "kv";
  const ExitReport report = server_->Awqctl({"quantize-kv", Npy(kCases[0], "x"), "-o", prefix});
  EXPECT_EQ(report.code, 0) << report.log;
  EXPECT_THAT(report.log, HasSubstr("codes [5, 3, 32], scales and zeros FP16 [5, 3]"));
  EXPECT_THAT(report.log, HasSubstr("relative error 0."));  // without NaN and infinities
  EXPECT_EQ(client::ReadNpy(prefix + ".codes.npy")->bytes, Read(kCases[0], "codes").bytes);
  EXPECT_EQ(client::ReadNpy(prefix + ".scales.npy")->bytes, Read(kCases[0], "scale").bytes);
}

}  // namespace
}  // namespace awqd
