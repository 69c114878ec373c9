// InferenceTest: one server with the demo model and a big weight, and products of the demo model.
#pragma once

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {

class InferenceTest : public SharedServerTest {
 protected:
  // 96 MiB as fp16: more than one message may hold.
  static constexpr int64_t kBigK = 6144, kBigN = 8192;
  static constexpr char kQuery[] = "encoder.layer.0.attention.self.query";  // 384 x 384
  static constexpr int64_t kK = 384, kN = 384;

  // One server for all tests, because they do not change its state.
  static void SetUpTestSuite() {
    repository_ = new TempFolder;
    std::filesystem::copy(DemoRepository() + "/" + kDemoModel, *repository_ / kDemoModel,
                          std::filesystem::copy_options::recursive);
    big_ = new SyntheticAwq(SyntheticAwq::Random(kBigK, kBigN, 128, 7));
    big_->Write(*repository_ / "big");
    StartServer();
  }
  static void TearDownTestSuite() {
    SharedServerTest::TearDownTestSuite();
    delete big_;
  }

  static std::vector<double> Doubles(const client::Tensor& tensor) {
    const std::vector<float> values = *tensor.ToFloats();
    return {values.begin(), values.end()};
  }

  static std::vector<float> Random(int64_t count, uint32_t seed) {
    std::mt19937 engine(seed);
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(engine() % 2001) / 1000 - 1;
    return values;
  }

  static client::MatmulCall Call(int64_t tokens, uint32_t seed = 1, v1::DType dtype = v1::FP16) {
    return {
        .weight = client::WeightName{kDemoModel, kQuery},
        .activations = *client::Tensor::FromFloats(dtype, {tokens, kK}, Random(tokens * kK, seed))};
  }
  absl::Status Error(const client::MatmulCall& call) {
    return client_->QuantizedMatmul(call).status();
  }

  inline static SyntheticAwq* big_ = nullptr;
};

}  // namespace awqd
