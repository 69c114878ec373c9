// Dequantize and QuantizedMatmul through the real server and the real client.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "client/files/npy.h"
#include "client/half.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/server_process.h"
#include "tests/e2e/synthetic_awq.h"

namespace awqd {
namespace {

using client::MatmulCall;
using client::Tensor;
using client::WeightName;
using testing::HasSubstr;

constexpr int64_t kBigK = 6144, kBigN = 8192;  // 96 MiB as fp16: more than one message may hold
constexpr char kQuery[] = "encoder.layer.0.attention.self.query";  // 384 x 384
constexpr int64_t kK = 384, kN = 384;

double RelativeError(const std::vector<double>& got, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return got.size() == expected.size() ? std::sqrt(difference / norm) : INFINITY;
}

std::vector<double> Doubles(const Tensor& tensor) {
  const std::vector<float> values = *tensor.ToFloats();
  return {values.begin(), values.end()};
}

std::vector<float> Random(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(engine() % 2001) / 1000 - 1;
  return values;
}

class InferenceTest : public testing::Test {
 protected:
  // One server for all: what is here changes nothing on it.
  static void SetUpTestSuite() {
    repository_ = new TempFolder;
    std::filesystem::copy(DemoRepository() + "/" + kDemoModel, *repository_ / kDemoModel,
                          std::filesystem::copy_options::recursive);
    big_ = new SyntheticAwq(SyntheticAwq::Random(kBigK, kBigN, 128, 7));
    big_->Write(*repository_ / "big");
    server_ = new ServerProcess({"--model_repository=" + repository_->path()});
    ASSERT_TRUE(server_->WaitServing()) << server_->log();
  }
  static void TearDownTestSuite() {
    const ExitReport report = server_->Stop();
    EXPECT_EQ(report.code, 0) << report.log;
    delete server_;
    delete repository_;
    delete big_;
  }

  InferenceTest() : client_(server_->NewClient()) {}

  static MatmulCall Call(int64_t tokens, uint32_t seed = 1, v1::DType dtype = v1::FP16) {
    return {.weight = WeightName{kDemoModel, kQuery},
            .activations = *Tensor::FromFloats(dtype, {tokens, kK}, Random(tokens * kK, seed))};
  }
  absl::Status Error(const MatmulCall& call) { return client_->QuantizedMatmul(call).status(); }

  static TempFolder* repository_;
  static SyntheticAwq* big_;
  static ServerProcess* server_;
  const std::unique_ptr<client::Client> client_;
};
TempFolder* InferenceTest::repository_ = nullptr;
SyntheticAwq* InferenceTest::big_ = nullptr;
ServerProcess* InferenceTest::server_ = nullptr;

TEST_F(InferenceTest, Goldens) {
  const auto manifest = nlohmann::json::parse(std::ifstream(Golden("cases.json")));
  ASSERT_GE(manifest.at("cases").size(), 6u);
  for (const auto& golden : manifest.at("cases")) {
    const WeightName weight{golden.at("model"), golden.at("weight")};
    SCOPED_TRACE(weight.name);
    const auto x = client::ReadNpy(Golden(golden.at("activations")));
    const auto expected = client::ReadNpy(Golden(golden.at("matmul")));
    ASSERT_TRUE(x.ok() && expected.ok());
    for (const v1::Path path : {v1::FUSED, v1::DEQUANTIZE}) {
      const auto y = client_->QuantizedMatmul(
          {.weight = weight, .activations = *client::ToTensor(*x), .path = path});
      ASSERT_TRUE(y.ok()) << y.status();
      EXPECT_EQ(y->output.shape, expected->shape);
      EXPECT_LE(RelativeError(Doubles(y->output), expected->ToDoubles()), 1e-3);
      EXPECT_EQ(y->execution.path(), path);
      EXPECT_FALSE(y->execution.kernel().empty());
    }
    const auto w = client_->Dequantize({.weight = weight});
    ASSERT_TRUE(w.ok()) << w.status();
    uint64_t hash = 14695981039346656037u;
    for (const char c : w->output.bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
    EXPECT_EQ(absl::StrCat(absl::Hex(hash, absl::kZeroPad16)),
              golden.at("dequantized_fnv1a64").get<std::string>());
  }
}

TEST_F(InferenceTest, TokenCountChoosesThePath) {
  for (const auto& [tokens, path] :
       {std::pair{1, v1::FUSED}, {255, v1::FUSED}, {256, v1::DEQUANTIZE}, {257, v1::DEQUANTIZE}}) {
    SCOPED_TRACE(tokens);
    const auto chosen = client_->QuantizedMatmul(Call(tokens));
    ASSERT_TRUE(chosen.ok()) << chosen.status();
    EXPECT_EQ(chosen->execution.path(), path);
    MatmulCall other = Call(tokens);
    other.path = path == v1::FUSED ? v1::DEQUANTIZE : v1::FUSED;
    const auto forced = client_->QuantizedMatmul(other);
    ASSERT_TRUE(forced.ok()) << forced.status();
    EXPECT_EQ(forced->execution.path(), other.path);
    EXPECT_LE(RelativeError(Doubles(chosen->output), Doubles(forced->output)), 1e-3);
  }
}

TEST_F(InferenceTest, ShapesOfActivations) {
  const auto none = client_->QuantizedMatmul(Call(0));
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_THAT(none->output.shape, testing::ElementsAre(0, kN));
  const auto flat = client_->QuantizedMatmul(Call(6));
  MatmulCall cube = Call(6);
  cube.activations.shape = {2, 3, kK};
  const auto y = client_->QuantizedMatmul(cube);
  ASSERT_TRUE(y.ok() && flat.ok()) << y.status();
  EXPECT_THAT(y->output.shape, testing::ElementsAre(2, 3, kN));
  EXPECT_EQ(y->output.bytes, flat->output.bytes);
  cube = Call(1);
  cube.activations.shape = {kK};
  EXPECT_THAT(client_->QuantizedMatmul(cube)->output.shape, testing::ElementsAre(kN));
}

TEST_F(InferenceTest, EveryDTypeInAndOut) {
  const auto reference = client_->QuantizedMatmul(Call(5, 1, v1::FP32));
  ASSERT_TRUE(reference.ok()) << reference.status();
  for (const v1::DType in : {v1::FP16, v1::BF16, v1::FP32}) {
    for (const v1::DType out : {v1::DTYPE_UNSPECIFIED, v1::FP16, v1::BF16, v1::FP32}) {
      MatmulCall call = Call(5, 1, in);
      call.output_dtype = out;
      const auto y = client_->QuantizedMatmul(call);
      ASSERT_TRUE(y.ok()) << y.status();
      EXPECT_EQ(y->output.dtype, out == v1::DTYPE_UNSPECIFIED ? in : out);
      const bool bf16 = in == v1::BF16 || y->output.dtype == v1::BF16;
      EXPECT_LE(RelativeError(Doubles(y->output), Doubles(reference->output)), bf16 ? 8e-3 : 1e-3);
    }
  }
}

TEST_F(InferenceTest, BiasReplacesTheWeightsOwn) {
  MatmulCall call = Call(3, 1, v1::FP32);
  call.bias = *Tensor::FromFloats(v1::FP32, {kN}, std::vector<float>(kN, 0.0f));
  const auto zero = client_->QuantizedMatmul(call);
  call.bias = *Tensor::FromFloats(v1::FP16, {kN}, std::vector<float>(kN, 8.0f));
  const auto eight = client_->QuantizedMatmul(call);
  call.bias.reset();
  const auto own = client_->QuantizedMatmul(call);
  ASSERT_TRUE(zero.ok() && eight.ok() && own.ok()) << zero.status();
  const auto a = Doubles(zero->output), b = Doubles(eight->output);
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(b[i] - a[i], 8, 1e-4);
  EXPECT_NE(own->output.bytes, zero->output.bytes) << "the demo weight has a bias";
}

TEST_F(InferenceTest, NanAndInfStayInTheirRow) {
  const auto clean = client_->QuantizedMatmul(Call(3));
  MatmulCall call = Call(3);
  const uint16_t nan = 0x7e00, inf = 0x7c00;
  std::memcpy(call.activations.bytes.data() + 2 * kK, &nan, 2);
  std::memcpy(call.activations.bytes.data() + 4 * kK, &inf, 2);
  const auto y = client_->QuantizedMatmul(call);
  ASSERT_TRUE(y.ok() && clean.ok()) << y.status();
  EXPECT_EQ(y->output.bytes.substr(0, 2 * kN), clean->output.bytes.substr(0, 2 * kN));
  const auto values = Doubles(y->output);
  for (int64_t i = 0; i < kN; ++i) ASSERT_TRUE(std::isnan(values[kN + i])) << i;
  int64_t not_finite = 0;
  for (int64_t i = 0; i < kN; ++i) not_finite += std::isfinite(values[2 * kN + i]) ? 0 : 1;
  EXPECT_GT(not_finite, kN / 2) << "only a zero weight may keep an infinity out";
}

TEST_F(InferenceTest, RangesOfADequantizedWeight) {
  const auto whole = client_->Dequantize({.weight = WeightName{kDemoModel, kQuery}});
  const auto block = client_->Dequantize({.weight = WeightName{kDemoModel, kQuery},
                                          .row_begin = 3,
                                          .row_end = 131,
                                          .column_begin = 5,
                                          .column_end = 78});
  ASSERT_TRUE(whole.ok() && block.ok()) << block.status();
  EXPECT_THAT(block->output.shape, testing::ElementsAre(128, 73));
  for (int64_t row = 0; row < 128; ++row) {
    ASSERT_EQ(block->output.bytes.substr(row * 146, 146),
              whole->output.bytes.substr(((row + 3) * kN + 5) * 2, 146));
  }
  const auto bf16 = client_->Dequantize(
      {.weight = WeightName{kDemoModel, kQuery}, .output_dtype = v1::BF16, .row_begin = kK - 1});
  ASSERT_TRUE(bf16.ok()) << bf16.status();
  EXPECT_THAT(bf16->output.shape, testing::ElementsAre(1, kN));
}

TEST_F(InferenceTest, BigWeightThroughTheStreamOnly) {
  const WeightName weight{"big", "layer"};
  int64_t rows = 0, blocks = 0, wrong = 0;
  const auto execution =
      client_->DequantizeBlocks({.weight = weight}, [&](const client::DequantizeBlock& block) {
        EXPECT_EQ(block.first_row, rows);
        EXPECT_EQ(block.total_rows, kBigK);
        for (int64_t row = 0; row < block.values.shape[0]; ++row) {
          for (int64_t column = row % 7; column < kBigN; column += 7) {
            uint16_t bits;
            std::memcpy(&bits, block.values.bytes.data() + (row * kBigN + column) * 2, 2);
            wrong += bits == big_->At(rows + row, column) ? 0 : 1;
          }
        }
        rows += block.values.shape[0];
        ++blocks;
        return absl::OkStatus();
      });
  ASSERT_TRUE(execution.ok()) << execution.status();
  EXPECT_EQ(rows, kBigK);
  EXPECT_GT(blocks, 1);
  EXPECT_EQ(wrong, 0);
}

TEST_F(InferenceTest, ManyOnOneStream) {
  const auto stream = client_->QuantizedMatmulStream({.timeout = absl::Seconds(60)});
  std::map<std::string, MatmulCall> sent;
  for (int i = 0; i < 40; ++i) {
    MatmulCall call = Call(1 + i % 5, i);
    call.request_id = absl::StrCat("id", i);
    if (i == 7) call.weight = WeightName{kDemoModel, "nowhere"};
    sent.emplace(call.request_id, call);
    ASSERT_TRUE(stream->Send(call).ok());
  }
  ASSERT_TRUE(stream->CloseSend().ok());
  size_t answers = 0;
  for (auto answer = stream->Receive(); answer.ok() && answer->has_value();
       answer = stream->Receive(), ++answers) {
    const std::string& id = (*answer)->request_id;
    ASSERT_EQ(sent.count(id), 1u) << id;
    if (id == "id7") {
      EXPECT_EQ((*answer)->result.status().code(), absl::StatusCode::kNotFound);
    } else {
      ASSERT_TRUE((*answer)->result.ok()) << (*answer)->result.status();
      const auto alone = client_->QuantizedMatmul(sent.at(id));
      EXPECT_LE(RelativeError(Doubles((*answer)->result->output), Doubles(alone->output)), 1e-3);
    }
  }
  EXPECT_EQ(answers, sent.size());
}

TEST_F(InferenceTest, InlineWeight) {
  const SyntheticAwq weight = SyntheticAwq::Random(64, 24, 32, 3);
  const auto w = client_->Dequantize({.weight = weight.ToPacked()});
  ASSERT_TRUE(w.ok()) << w.status();
  ASSERT_THAT(w->output.shape, testing::ElementsAre(64, 24));
  const std::vector<float> x = Random(2 * 64, 5);
  const auto y = client_->QuantizedMatmul(
      {.weight = weight.ToPacked(), .activations = *Tensor::FromFloats(v1::FP32, {2, 64}, x)});
  ASSERT_TRUE(y.ok()) << y.status();
  std::vector<double> expected(2 * 24, 0.0);
  for (int64_t row = 0; row < 64; ++row) {
    for (int64_t column = 0; column < 24; ++column) {
      uint16_t bits;
      std::memcpy(&bits, w->output.bytes.data() + (row * 24 + column) * 2, 2);
      ASSERT_EQ(bits, weight.At(row, column));
      for (int64_t m = 0; m < 2; ++m) {
        expected[m * 24 + column] += double{x[m * 64 + row]} * client::HalfToFloat(bits);
      }
    }
  }
  EXPECT_LE(RelativeError(Doubles(y->output), expected), 1e-3);
}

TEST_F(InferenceTest, ErrorsNameTheField) {
  using absl::StatusCode;
  const auto expect = [](const absl::Status& status, StatusCode code, const char* text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  MatmulCall call = Call(1);
  call.weight = WeightName{"absent", kQuery};
  expect(Error(call), StatusCode::kNotFound, "absent");
  call.weight = WeightName{kDemoModel, "absent.layer"};
  expect(Error(call), StatusCode::kNotFound, "absent.layer");
  call.weight = WeightName{"../etc", kQuery};
  EXPECT_FALSE(Error(call).ok());
  call.weight = WeightName{"", ""};
  expect(Error(call), StatusCode::kInvalidArgument, "model");
  call = Call(1);
  call.activations.shape = {1, kK - 1};
  expect(Error(call), StatusCode::kInvalidArgument, "activations");
  call.activations = *Tensor::FromFloats(v1::FP16, {1, 8}, Random(8, 1));
  expect(Error(call), StatusCode::kInvalidArgument, "384");
  call.activations = {v1::INT8, {1, kK}, std::string(kK, '\0')};
  expect(Error(call), StatusCode::kInvalidArgument, "activations");
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{-1, kK}, {int64_t{1} << 62, 4, kK}, {}, std::vector<int64_t>(9, 1)}) {
    call.activations = {v1::FP16, shape, ""};
    expect(Error(call), StatusCode::kInvalidArgument, "activations");
  }
  call = Call(1);
  call.bias = *Tensor::FromFloats(v1::FP32, {kN - 1}, Random(kN - 1, 1));
  expect(Error(call), StatusCode::kInvalidArgument, "bias");
  call = Call(1);
  call.output_dtype = v1::INT8;
  expect(Error(call), StatusCode::kInvalidArgument, "output_dtype");
  call = Call(1);
  call.request_id = std::string(257, 'x');
  expect(Error(call), StatusCode::kInvalidArgument, "request_id");
  expect(client_->Dequantize({.weight = WeightName{kDemoModel, kQuery}, .row_begin = 400}).status(),
         StatusCode::kInvalidArgument, "rows");
  expect(client_->LoadModel("../x").status(), StatusCode::kInvalidArgument, "name");
  expect(client_->LoadModel("absent").status(), StatusCode::kNotFound, "absent");
  expect(client_->UnloadModel("absent"), StatusCode::kNotFound, "absent");
  expect(client_->GetModel("absent").status(), StatusCode::kNotFound, "absent");
  expect(client_->IsServing("absent").status(), StatusCode::kNotFound, "");
  // Tens of milliseconds of work: a short product may be answered before gRPC's timer looks.
  const MatmulCall slow = {
      .weight = WeightName{"big", "layer"},
      .activations = *Tensor::FromFloats(v1::FP16, {64, kBigK}, Random(64 * kBigK, 1))};
  const absl::Status late =
      client_->QuantizedMatmul(slow, {.timeout = absl::Milliseconds(1)}).status();
  EXPECT_EQ(late.code(), StatusCode::kDeadlineExceeded) << late;
  EXPECT_TRUE(client_->QuantizedMatmul(Call(1)).ok()) << "after all that it still serves";
}

TEST_F(InferenceTest, OddInlineWeightsAreRefused) {
  const SyntheticAwq weight = SyntheticAwq::Random(64, 16, 32, 3);
  const auto error = [&](auto change) {
    v1::PackedWeight packed = weight.ToPacked();
    change(packed);
    return client_->Dequantize({.weight = packed}).status().code();
  };
  EXPECT_EQ(error([](v1::PackedWeight&) {}), absl::StatusCode::kOk);
  for (const int group : {-2, 5, 128}) {
    EXPECT_EQ(error([group](v1::PackedWeight& p) { p.set_group_size(group); }),
              absl::StatusCode::kInvalidArgument)
        << group;
  }
  EXPECT_EQ(error([](v1::PackedWeight& p) { p.set_bits(3); }), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(error([](v1::PackedWeight& p) { p.clear_qzeros(); }),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(error([](v1::PackedWeight& p) { p.mutable_scales()->mutable_raw()->pop_back(); }),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(error([](v1::PackedWeight& p) { p.mutable_scales()->set_dtype(v1::BF16); }),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace awqd
