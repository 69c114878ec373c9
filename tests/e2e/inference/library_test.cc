// libawqd and the server give the same bits.
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/library/awqd.h"
#include "tests/e2e/server_test.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using client::Tensor;

constexpr char kFolder[] = "all-MiniLM-L6-v2-awq";
constexpr char kGate[] = "encoder.layer.0.intermediate.dense";
constexpr char kDown[] = "encoder.layer.0.output.dense";

class LibraryServerTest : public SharedServerTest {
 protected:
  void SetUp() override {
    const std::string source = DataPath(std::string("awq/") + kFolder);
    if (!std::filesystem::exists(*repository_ / kFolder)) {
      std::filesystem::copy(source, *repository_ / kFolder);
      ASSERT_TRUE(client_->LoadModel(kFolder).ok());
    }
    ASSERT_EQ(awqd_device_open("cpu", nullptr, &device_), AWQD_OK) << awqd_error_message();
    ASSERT_EQ(awqd_checkpoint_open(source.c_str(), &checkpoint_), AWQD_OK) << awqd_error_message();
  }
  void TearDown() override {
    for (awqd_weight* weight : weights_) awqd_weight_free(weight);
    awqd_checkpoint_close(checkpoint_);
    awqd_device_close(device_);
  }

  awqd_weight* Load(const char* linear) {
    awqd_weight* weight = nullptr;
    EXPECT_EQ(awqd_weight_load(device_, checkpoint_, linear, &weight), AWQD_OK)
        << awqd_error_message();
    weights_.push_back(weight);
    return weight;
  }

  static Tensor Activations(int64_t m, int64_t k) {
    std::vector<float> values(m * k);
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(i * 7919 % 2003) / 1001 - 1;
    return Tensor::FromFloats(v1::FP16, {m, k}, values).value();
  }

  // Memory for a workspace, until the next.
  awqd_workspace Workspace(int64_t bytes) {
    memory_.reset(std::aligned_alloc(256, (bytes / 256 + 1) * 256));
    return {memory_.get(), bytes};
  }

  awqd_device* device_ = nullptr;
  awqd_checkpoint* checkpoint_ = nullptr;
  std::vector<awqd_weight*> weights_;
  std::unique_ptr<void, decltype(&std::free)> memory_{nullptr, &std::free};
};

TEST_F(LibraryServerTest, Products) {
  const awqd_weight* const weight = Load(kGate);
  for (const int64_t m : {1, 2, 16, 33, 300}) {
    const Tensor x = Activations(m, 384);
    const auto answer = client_->QuantizedMatmul({.weight = client::WeightName{kFolder, kGate},
                                                  .activations = x,
                                                  .activation_function = v1::GELU});
    ASSERT_TRUE(answer.ok()) << answer.status();
    std::string y(m * 1536 * 2, '\0');
    awqd_matmul_args args = AWQD_INIT(args);
    args.m = m, args.x = x.bytes.data(), args.y = y.data();
    args.x_dtype = args.y_dtype = AWQD_FP16;
    args.activation = AWQD_GELU;
    int64_t bytes = 0;
    ASSERT_EQ(awqd_matmul_workspace(weight, &args, &bytes), AWQD_OK) << awqd_error_message();
    ASSERT_EQ(awqd_matmul(weight, &args, Workspace(bytes), nullptr), AWQD_OK)
        << awqd_error_message();
    EXPECT_TRUE(y == answer->output.bytes) << m << " tokens";
  }
}

TEST_F(LibraryServerTest, GatedMlps) {
  awqd_gated_mlp_args args = AWQD_INIT(args);
  args.gate = Load(kGate), args.up = Load(kGate), args.down = Load(kDown);
  v1::GatedMlpRef names;
  names.set_model(kFolder);
  names.set_gate(kGate);
  names.set_up(kGate);
  names.set_down(kDown);
  for (const int64_t m : {1, 16, 300}) {
    const Tensor x = Activations(m, 384);
    v1::ActivationParameters parameters;
    parameters.set_limit(0.5f);
    const auto answer =
        client_->GatedMlp({.mlp = names, .activations = x, .activation_parameters = parameters});
    ASSERT_TRUE(answer.ok()) << answer.status();
    std::string y(m * 384 * 2, '\0');
    args.m = m, args.x = x.bytes.data(), args.y = y.data();
    args.x_dtype = args.y_dtype = AWQD_FP16;
    args.activation = AWQD_SILU;
    args.limit = 0.5f;
    int64_t bytes = 0;
    ASSERT_EQ(awqd_gated_mlp_workspace(&args, &bytes), AWQD_OK) << awqd_error_message();
    ASSERT_EQ(awqd_gated_mlp(&args, Workspace(bytes), nullptr), AWQD_OK) << awqd_error_message();
    EXPECT_TRUE(y == answer->output.bytes) << m << " tokens";
  }
}

}  // namespace
}  // namespace awqd
