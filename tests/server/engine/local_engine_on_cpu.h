// A LocalEngine on the CPU backend with one small weight, for tests with both memory models: the
// parameter says whether host and device share memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kernels/base/half.h"
#include "kernels/kernels.h"
#include "server/engine/engine.h"
#include "server/engine/matmul_work.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::engine {

inline constexpr int64_t kK = 64;
inline constexpr int64_t kN = 24;

inline HostWeight RandomWeight() {
  std::mt19937 random(3);
  HostWeight w;
  w.k = kK;
  w.n = kN;
  w.scheme = Asymmetric(4, 32);
  w.codes.resize(w.k * w.row_bytes());
  for (uint8_t& byte : w.codes) byte = random();
  w.zeros.resize(w.groups() * kN);
  for (uint8_t& zero : w.zeros) zero = random() % 16;
  w.scales.resize(w.groups() * kN * 2);
  for (int64_t i = 0; i < w.groups() * kN; ++i) {
    const uint16_t scale = FloatToHalf(0.01f + 0.0001f * (random() % 100));
    std::memcpy(&w.scales[i * 2], &scale, 2);
  }
  for (int64_t i = 0; i < kN; ++i) w.bias.push_back(0.5f * i);
  return w;
}

// The expected x @ W + bias in double, with the weights that Dequantize returns.
inline std::vector<double> Expected(const HostWeight& w, const std::vector<float>& x,
                                    const std::vector<float>& bias) {
  const int64_t tokens = x.size() / kK;
  std::vector<double> y(tokens * kN);
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t n = 0; n < kN; ++n) {
      double sum = bias[n];
      for (int64_t k = 0; k < kK; ++k) {
        const int64_t group = k / w.group_rows();
        const float value = (w.Code(k, n) - w.Zero(group, n)) * w.Scale(group, n);
        sum += x[m * kK + k] * static_cast<double>(HalfToFloat(FloatToHalf(value)));
      }
      y[m * kN + n] = sum;
    }
  }
  return y;
}

inline double Apply(ActivationFunction activation, double x) {
  if (activation == ActivationFunction::kRelu) return std::max(x, 0.0);
  if (activation == ActivationFunction::kSilu) return x / (1 + std::exp(-x));
  return activation == ActivationFunction::kGelu ? x * (1 + std::erf(x / std::sqrt(2.0))) / 2 : x;
}

struct Answer {
  absl::Status status;
  Payload bytes;
  ExecutionReport report;
};

class LocalEngineOnCpu : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    auto cpu = OpenDevice("cpu", {.cpu_threads = 2});
    ASSERT_TRUE(cpu.ok()) << cpu.status();
    device_ = std::make_unique<testing::WrappedDevice>(*std::move(cpu), GetParam());
    auto weight = PrepareWeight(canonical_, device_->inner());
    ASSERT_TRUE(weight.ok()) << weight.status();
    weight_ = *std::move(weight);
    placed_ = model::MakeWhole(weight_);
  }

  void Start(EngineOptions options = {}) {
    auto engine = MakeLocalEngine(device_.get(), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  std::vector<float> RandomRows(int64_t tokens) {
    std::normal_distribution<float> normal;
    std::vector<float> x(tokens * kK);
    for (float& value : x) value = normal(random_);
    return x;
  }

  MatmulWork Product(const std::vector<float>& x) {
    MatmulWork work;
    work.weight = placed_;
    work.x = *engine_->staging().Get(x.size() * 4);
    if (!x.empty()) std::memcpy(work.x.data(), x.data(), x.size() * 4);
    work.x_dtype = work.out_dtype = DType::kFp32;
    work.rows = x.size() / kK;
    return work;
  }

  template <typename AnyWork>
  std::future<Answer> Submit(AnyWork work, const SubmitOptions& options = {}) {
    auto promise = std::make_shared<std::promise<Answer>>();
    auto submitted = engine_->Submit(
        std::make_unique<AnyWork>(std::move(work)), options,
        [promise](const absl::Status& status, Payload bytes, const ExecutionReport& report) {
          promise->set_value({status, std::move(bytes), report});
        });
    if (!submitted.ok()) promise->set_value({submitted.status(), {}, {}});
    return promise->get_future();
  }

  void ExpectProduct(const Answer& answer, const std::vector<float>& x,
                     const std::vector<float>& bias) {
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    const std::vector<double> expected = Expected(canonical_, x, bias);
    ASSERT_EQ(answer.bytes.size(), static_cast<int64_t>(expected.size()) * 4);
    for (size_t i = 0; i < expected.size(); ++i) {
      float got;
      std::memcpy(&got, answer.bytes.data() + i * 4, 4);
      ASSERT_NEAR(got, expected[i], 1e-4 * (1 + std::abs(expected[i]))) << "element " << i;
    }
  }

  const HostWeight canonical_ = RandomWeight();
  std::mt19937 random_{11};
  std::unique_ptr<testing::WrappedDevice> device_;
  std::shared_ptr<const DeviceWeight> weight_;
  std::shared_ptr<const model::PlacedWeight> placed_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace awqd::engine
