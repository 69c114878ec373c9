// libawqd by its C header alone: products against the goldens of a real checkpoint, every refusal by
// its words, many threads.
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/half.h"
#include "kernels/library/awqd.h"
#include "tests/kernels/library/owned.h"
#include "tests/testing/npy.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using testing::CheckpointPtr;
using testing::DevicePtr;
using ::testing::HasSubstr;
using testing::WeightPtr;
using testing::Workspace;

constexpr char kQuery[] = "encoder.layer.0.attention.self.query";
constexpr char kGate[] = "encoder.layer.0.intermediate.dense";
constexpr char kDown[] = "encoder.layer.0.output.dense";

DevicePtr OpenCpu() {
  awqd_device* device = nullptr;
  EXPECT_EQ(awqd_device_open("cpu", nullptr, &device), AWQD_OK) << awqd_error_message();
  return DevicePtr(device);
}

CheckpointPtr OpenGolden() {
  awqd_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(awqd_checkpoint_open(DataPath("awq/all-MiniLM-L6-v2-awq").c_str(), &checkpoint),
            AWQD_OK)
      << awqd_error_message();
  return CheckpointPtr(checkpoint);
}

WeightPtr Load(awqd_device* device, const char* linear) {
  awqd_weight* weight = nullptr;
  EXPECT_EQ(awqd_weight_load(device, OpenGolden().get(), linear, &weight), AWQD_OK)
      << awqd_error_message();
  return WeightPtr(weight);
}

awqd_weight_info Describe(const awqd_weight* weight) {
  awqd_weight_info info = AWQD_INIT(info);
  EXPECT_EQ(awqd_weight_describe(weight, &info), AWQD_OK) << awqd_error_message();
  return info;
}

testing::Npy Golden(const std::string& name) {
  auto npy = testing::ReadNpy(DataPath("awq/goldens/" + name + ".npy"));
  EXPECT_TRUE(npy.ok()) << npy.status();
  return *std::move(npy);
}

class LibraryTest : public ::testing::Test {
 protected:
  LibraryTest() : activations_(Golden("activations_384")) {
    args_.m = activations_.shape[0];
    args_.x = activations_.bytes.data();
    args_.x_dtype = AWQD_FP16;
    args_.y_dtype = AWQD_FP32;
    y_.resize(args_.m * 1536);
    args_.y = y_.data();
  }

  int Multiply(const awqd_weight* weight) {
    int64_t bytes = 0;
    if (const int code = awqd_matmul_workspace(weight, &args_, &bytes); code != AWQD_OK)
      return code;
    return awqd_matmul(weight, &args_, Workspace(bytes).get(), nullptr);
  }

  void ExpectRefused(const awqd_weight* weight, const std::string& message,
                     int code = AWQD_INVALID_ARGUMENT) {
    EXPECT_EQ(Multiply(weight), code) << message;
    EXPECT_THAT(awqd_error_message(), HasSubstr(message));
  }

  const DevicePtr device_ = OpenCpu();
  const testing::Npy activations_;
  awqd_matmul_args args_ = AWQD_INIT(args_);
  std::vector<float> y_;
};

TEST(Library, SaysItsVersions) {
  EXPECT_EQ(awqd_abi_version(), uint32_t{AWQD_ABI_VERSION});
  EXPECT_STREQ(awqd_version(), AWQD_VERSION);
}

// A program that was compiled with this header finds these places in every later library of the
// version.
TEST(Library, StructuresKeepTheirLayout) {
  static_assert(sizeof(void*) != 8 || sizeof(awqd_device_options) == 24);
  static_assert(sizeof(void*) != 8 || sizeof(awqd_tensor) == 48);
  static_assert(sizeof(void*) != 8 || sizeof(awqd_weight_info) == 56);
  static_assert(sizeof(void*) != 8 || sizeof(awqd_workspace) == 16);
  static_assert(sizeof(void*) != 8 || sizeof(awqd_matmul_args) == 72);
  static_assert(sizeof(void*) != 8 || sizeof(awqd_gated_mlp_args) == 88);
  static_assert(sizeof(void*) != 8 || sizeof(awqd_dequantize_args) == 56);
  EXPECT_EQ(offsetof(awqd_matmul_args, path), 64u);
  EXPECT_EQ(offsetof(awqd_gated_mlp_args, linear_beta), 84u);
  static_assert(sizeof(void*) != 8 || sizeof(awqd_grouped_matmul_args) == 72);
  static_assert(sizeof(void*) != 8 || sizeof(awqd_masked_matmul_args) == 64);
  static_assert(sizeof(void*) != 8 || sizeof(awqd_grouped_mlp_args) == 112);
  EXPECT_EQ(offsetof(awqd_grouped_matmul_args, quantization), 68u);
  EXPECT_EQ(offsetof(awqd_masked_matmul_args, quantization), 60u);
  EXPECT_EQ(offsetof(awqd_grouped_mlp_args, quantization), 108u);
}

TEST_F(LibraryTest, ACheckpointListsItsLinears) {
  const CheckpointPtr checkpoint = OpenGolden();
  const size_t count = awqd_checkpoint_linears(checkpoint.get());
  std::vector<std::string> paths;
  for (size_t i = 0; i < count; ++i) paths.push_back(awqd_checkpoint_linear(checkpoint.get(), i));
  EXPECT_THAT(paths, ::testing::IsSupersetOf({kQuery, kGate, kDown}));
  EXPECT_EQ(awqd_checkpoint_linear(checkpoint.get(), count), nullptr);
  EXPECT_STREQ(awqd_device_name(device_.get()), "cpu");
}

TEST_F(LibraryTest, DescribesAWeight) {
  const WeightPtr weight = Load(device_.get(), kGate);
  const awqd_weight_info info = Describe(weight.get());
  EXPECT_EQ(info.k, 384);
  EXPECT_EQ(info.n, 1536);
  EXPECT_GT(info.bytes, 384 * 1536 / 2);
  EXPECT_STREQ(info.format, "awq");
  EXPECT_STREQ(info.scheme, "w4g128z");
  EXPECT_EQ(info.has_bias, 1);
  EXPECT_EQ(info.transforms_input, 0);
}

TEST_F(LibraryTest, DecodesToTheGoldensBits) {
  const WeightPtr weight = Load(device_.get(), kQuery);
  const testing::Npy golden = Golden(std::string(kQuery) + ".dequantized");
  // The whole, and a block within.
  for (const auto& [row, rows, col, cols] :
       {std::array<int64_t, 4>{0, 384, 0, 384}, {17, 130, 40, 9}}) {
    awqd_dequantize_args args = AWQD_INIT(args);
    std::vector<uint16_t> out(rows * cols);
    args.row = row, args.rows = rows, args.col = col, args.cols = cols;
    args.out = out.data();
    args.dtype = AWQD_FP16;
    int64_t bytes = -1;
    ASSERT_EQ(awqd_dequantize_workspace(weight.get(), &args, &bytes), AWQD_OK);
    ASSERT_EQ(awqd_dequantize(weight.get(), &args, Workspace(bytes).get(), nullptr), AWQD_OK)
        << awqd_error_message();
    for (int64_t i = 0; i < rows * cols; ++i) {
      ASSERT_EQ(out[i], golden.At<uint16_t>((row + i / cols) * 384 + col + i % cols)) << i;
    }
  }
}

TEST_F(LibraryTest, ProductsAreTheGoldens) {
  for (const char* linear : {kQuery, kGate}) {
    const WeightPtr weight = Load(device_.get(), linear);
    const testing::Npy golden = Golden(std::string(linear) + ".matmul");
    for (const int32_t path : {AWQD_PATH_AUTO, AWQD_PATH_FUSED, AWQD_PATH_DEQUANTIZE}) {
      args_.path = path;
      ASSERT_EQ(Multiply(weight.get()), AWQD_OK) << awqd_error_message();
      for (int64_t i = 0; i < args_.m * Describe(weight.get()).n; ++i) {
        ASSERT_NEAR(y_[i], golden.At<double>(i), 2e-3) << linear << " " << i;
      }
    }
  }
}

// The steps of a gated MLP one by one give its bits.
TEST_F(LibraryTest, AGatedMlpIsItsSteps) {
  const WeightPtr gate = Load(device_.get(), kGate), up = Load(device_.get(), kGate),
                  down = Load(device_.get(), kDown);
  std::vector<float> halves[2], expected(args_.m * 384), got(args_.m * 384);
  args_.activation = AWQD_RELU;  // max(gate, 0) in FP32 is exact
  ASSERT_EQ(Multiply(gate.get()), AWQD_OK) << awqd_error_message();
  halves[0] = y_;
  args_.activation = AWQD_NONE;
  ASSERT_EQ(Multiply(up.get()), AWQD_OK) << awqd_error_message();
  halves[1] = y_;
  for (size_t i = 0; i < y_.size(); ++i) halves[0][i] *= halves[1][i];
  awqd_matmul_args last = args_;
  last.x = halves[0].data();
  last.x_dtype = AWQD_FP32;
  last.y = expected.data();
  int64_t bytes = 0;
  ASSERT_EQ(awqd_matmul_workspace(down.get(), &last, &bytes), AWQD_OK);
  ASSERT_EQ(awqd_matmul(down.get(), &last, Workspace(bytes).get(), nullptr), AWQD_OK);

  awqd_gated_mlp_args mlp = AWQD_INIT(mlp);
  mlp.gate = gate.get(), mlp.up = up.get(), mlp.down = down.get();
  mlp.m = args_.m, mlp.x = args_.x, mlp.y = got.data();
  mlp.x_dtype = AWQD_FP16, mlp.y_dtype = AWQD_FP32;
  mlp.activation = AWQD_RELU;
  ASSERT_EQ(awqd_gated_mlp_workspace(&mlp, &bytes), AWQD_OK) << awqd_error_message();
  ASSERT_EQ(awqd_gated_mlp(&mlp, Workspace(bytes).get(), nullptr), AWQD_OK) << awqd_error_message();
  EXPECT_EQ(got, expected);

  mlp.down = gate.get();
  EXPECT_EQ(awqd_gated_mlp_workspace(&mlp, &bytes), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(), HasSubstr("args->down: got [384, 1536], expected [1536, N]"));
  const DevicePtr other = OpenCpu();
  const WeightPtr elsewhere = Load(other.get(), kDown);
  mlp.down = elsewhere.get();
  EXPECT_EQ(awqd_gated_mlp_workspace(&mlp, &bytes), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(), HasSubstr("the same awqd_device as args->gate"));
}

TEST_F(LibraryTest, ExactIntegersAndQuantisedActivations) {
  // W = [[1, 2], [3, -4]], by one scale of 0.5 a column: codes 2 W + 8.
  const uint8_t codes[] = {10, 12, 14, 0};
  const int64_t square[] = {2, 2}, row[] = {1, 2};
  const float scales[] = {0.5f, 0.5f};
  const awqd_tensor tensors[] = {{"codes", "U8", square, 2, codes, sizeof(codes)},
                                 {"scales", "F32", row, 2, scales, sizeof(scales)}};
  const awqd_setting settings[] = {{"bits", "4"}, {"symmetric", "true"}};
  awqd_weight* packed = nullptr;
  ASSERT_EQ(awqd_weight_pack(device_.get(), "plain", settings, 2, tensors, 2, &packed), AWQD_OK)
      << awqd_error_message();
  const WeightPtr weight(packed);
  const int8_t x[] = {5, -7};
  const float scale[] = {0.25f};
  args_.m = 1;
  args_.x = x;
  args_.x_dtype = AWQD_INT8;
  args_.scales = scale;
  ASSERT_EQ(Multiply(weight.get()), AWQD_OK) << awqd_error_message();
  EXPECT_EQ(y_[0], 0.25f * (5 * 1 - 7 * 3));
  EXPECT_EQ(y_[1], 0.25f * (5 * 2 + 7 * 4));
  args_.scales = nullptr;
  ExpectRefused(weight.get(), "activations dtype: got INT8");  // it has scales, so no integers
}

TEST_F(LibraryTest, AWorkspaceHasRoomForADecodedWeightWhereOneIsDecoded) {
  const WeightPtr weight = Load(device_.get(), kGate);
  const auto bytes_on = [&](int32_t path) {
    int64_t bytes = 0;
    args_.m = 1, args_.path = path;
    EXPECT_EQ(awqd_matmul_workspace(weight.get(), &args_, &bytes), AWQD_OK) << awqd_error_message();
    return bytes;
  };
  EXPECT_EQ(bytes_on(AWQD_PATH_AUTO), bytes_on(AWQD_PATH_FUSED));
  EXPECT_LT(bytes_on(AWQD_PATH_AUTO), 384 * 1536);
  EXPECT_GE(bytes_on(AWQD_PATH_DEQUANTIZE), 384 * 1536 * 2);
}

TEST_F(LibraryTest, ManyThreadsMultiplyByOneWeight) {
  const WeightPtr weight = Load(device_.get(), kQuery);
  ASSERT_EQ(Multiply(weight.get()), AWQD_OK);
  const std::vector<float> expected(y_.begin(), y_.begin() + args_.m * 384);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (int& mine : wrong) {
    threads.emplace_back([&, this] {
      awqd_matmul_args args = args_;
      std::vector<float> y(expected.size());
      args.y = y.data();
      int64_t bytes = 0;
      awqd_matmul_workspace(weight.get(), &args, &bytes);
      Workspace workspace(bytes);
      for (int i = 0; i < 50; ++i) {
        mine += awqd_matmul(weight.get(), &args, workspace.get(), nullptr) != AWQD_OK;
        mine += y != expected;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(wrong, ::testing::Each(0));
}

TEST_F(LibraryTest, AWeightOutlivesItsDeviceAndItsCheckpoint) {
  DevicePtr device = OpenCpu();
  const WeightPtr weight = Load(device.get(), kQuery);
  device.reset();
  EXPECT_EQ(Multiply(weight.get()), AWQD_OK) << awqd_error_message();
  args_.m = 0;
  args_.x = args_.y = nullptr;
  EXPECT_EQ(Multiply(weight.get()), AWQD_OK) << "no tokens: " << awqd_error_message();
}

TEST_F(LibraryTest, RefusesWhatAProductCannotTake) {
  const WeightPtr weight = Load(device_.get(), kQuery);
  const awqd_matmul_args good = args_;
  const auto refused = [&](auto change, const std::string& message) {
    args_ = good;
    change();
    ExpectRefused(weight.get(), message);
  };
  refused([&] { args_.size -= 8; }, "args->size: got 64, expected 72");
  refused([&] { args_.m = -1; }, "args->m: got -1");
  refused([&] { args_.m = int64_t{1} << 40; },
          "args->m: got 1099511627776, expected 0 to 2147483647");
  refused([&] { args_.x_dtype = 0; }, "args->x_dtype: got 0, expected an awqd_dtype");
  refused([&] { args_.y_dtype = 77; }, "args->y_dtype: got 77");
  refused([&] { args_.y_dtype = AWQD_INT32; }, "does not write INT32");
  refused([&] { args_.activation = 99; }, "args->activation: got 99");
  refused([&] { args_.activation = AWQD_SITU; }, "args->activation: got situ");
  refused([&] { args_.quantization = 9; }, "args->quantization: got 9");
  refused([&] { args_.quantization = AWQD_INT8_STATIC; }, "activation scales: got none");
  refused([&] { args_.path = 9; }, "args->path: got 9");
  refused([&] { args_.x = nullptr; }, "args->x: got NULL");
  refused([&] { args_.y = nullptr; }, "args->y: got NULL");
  refused([&] { args_.x_dtype = AWQD_INT8; }, "activations dtype: got INT8");
  args_ = good;
  EXPECT_EQ(Multiply(nullptr), AWQD_INVALID_ARGUMENT);
  EXPECT_STREQ(awqd_error_message(), "weight: got NULL, expected an address");

  int64_t bytes = 0;
  args_.x_dtype = AWQD_FP32;
  args_.activation = AWQD_GELU;  // its sums are in the workspace
  ASSERT_EQ(awqd_matmul_workspace(weight.get(), &args_, &bytes), AWQD_OK);
  ASSERT_GT(bytes, 0);
  Workspace workspace(bytes + 8);
  awqd_workspace small = workspace.get();
  small.bytes = bytes - 1;
  EXPECT_EQ(awqd_matmul(weight.get(), &args_, small, nullptr), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(), HasSubstr("workspace.bytes: got "));
  awqd_workspace odd = workspace.get();
  odd.data = static_cast<char*>(odd.data) + 8;
  EXPECT_EQ(awqd_matmul(weight.get(), &args_, odd, nullptr), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(), HasSubstr("workspace.data: "));
  EXPECT_EQ(awqd_matmul(weight.get(), &args_, workspace.get(), &bytes), AWQD_INVALID_ARGUMENT);
  EXPECT_STREQ(awqd_error_message(), "stream: got one, expected NULL for a CPU");
  EXPECT_EQ(awqd_workspace_init(device_.get(), {nullptr, 0}, nullptr), AWQD_OK)
      << "a CPU prepares nothing";
}

TEST_F(LibraryTest, RefusesWhatIsNoBlockOfAWeight) {
  const WeightPtr weight = Load(device_.get(), kQuery);
  uint16_t out[4];
  awqd_dequantize_args args = AWQD_INIT(args);
  args.row = 383, args.rows = 2, args.cols = 1, args.out = out, args.dtype = AWQD_FP16;
  EXPECT_EQ(awqd_dequantize(weight.get(), &args, {nullptr, 0}, nullptr), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(), HasSubstr("rows 383 + 2"));
  args.rows = 1;
  args.dtype = AWQD_INT8;
  EXPECT_EQ(awqd_dequantize(weight.get(), &args, {nullptr, 0}, nullptr), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(),
              HasSubstr("args->dtype: got INT8, expected FP16, BF16 or FP32"));
}

TEST_F(LibraryTest, RefusesDevicesCheckpointsAndTensors) {
  awqd_device* device = nullptr;
  EXPECT_EQ(awqd_device_open("tpu", nullptr, &device), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(), HasSubstr("device: got \"tpu\", expected auto, cpu"));
  awqd_device_options options = AWQD_INIT(options);
  options.cpu_threads = -1;
  EXPECT_EQ(awqd_device_open("cpu", &options, &device), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(), HasSubstr("options->cpu_threads: got -1"));
  options.cpu_threads = 1;
  options.memory_budget = 4096;
  ASSERT_EQ(awqd_device_open("cpu", &options, &device), AWQD_OK) << awqd_error_message();
  const DevicePtr small(device);

  awqd_checkpoint* opened = nullptr;
  EXPECT_EQ(awqd_checkpoint_open("/nowhere", &opened), AWQD_NOT_FOUND);
  EXPECT_THAT(awqd_error_message(), HasSubstr("/nowhere"));
  EXPECT_EQ(awqd_checkpoint_open(nullptr, &opened), AWQD_INVALID_ARGUMENT);
  awqd_weight* weight = nullptr;
  const CheckpointPtr checkpoint = OpenGolden();
  EXPECT_EQ(awqd_weight_load(device_.get(), checkpoint.get(), "lm_head", &weight), AWQD_NOT_FOUND);
  EXPECT_THAT(awqd_error_message(), HasSubstr("linear \"lm_head\": not in "));
  EXPECT_EQ(awqd_weight_load(small.get(), checkpoint.get(), kQuery, &weight),
            AWQD_RESOURCE_EXHAUSTED);

  const uint8_t codes[4] = {};
  const float scales[2] = {};
  const int64_t square[] = {2, 2}, row[] = {1, 2};
  awqd_tensor tensors[] = {{"scales", "F32", row, 2, scales, sizeof(scales)},
                           {"codes", "U8", square, 2, codes, sizeof(codes)}};
  const awqd_setting odd = {"colour", "red"};
  const auto pack = [&](const char* format, const awqd_setting* setting, const awqd_tensor* from) {
    return awqd_weight_pack(device_.get(), format, setting, setting != nullptr, from, 2, &weight);
  };
  EXPECT_EQ(pack("zip", nullptr, tensors), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(), HasSubstr("format: got \"zip\", expected "));
  EXPECT_EQ(pack("plain", &odd, tensors), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(), HasSubstr("settings[0].name: got \"colour\""));
  EXPECT_EQ(pack("plain", nullptr, nullptr), AWQD_INVALID_ARGUMENT);
  EXPECT_STREQ(awqd_error_message(), "tensors: got NULL, expected an address");
  const auto refused = [&](auto change, const char* message) {
    const awqd_tensor good = tensors[1];
    change(&tensors[1]);
    EXPECT_EQ(pack("plain", nullptr, tensors), AWQD_INVALID_ARGUMENT);
    EXPECT_THAT(awqd_error_message(), HasSubstr(message));
    tensors[1] = good;
  };
  refused([](awqd_tensor* tensor) { tensor->bytes = 3; }, "tensor \"codes\": got 3 bytes");
  refused([](awqd_tensor* tensor) { tensor->data = nullptr; }, "tensors[1].data: got NULL");
  refused([](awqd_tensor* tensor) { tensor->shape = nullptr; }, "tensors[1].shape: got NULL");
  refused([](awqd_tensor* tensor) { tensor->dtype = "I4"; }, "tensor \"codes\": got dtype I4");
  refused([](awqd_tensor* tensor) { tensor->suffix = "scales"; }, "each suffix once");
  refused([](awqd_tensor* tensor) { tensor->suffix = "weights"; },
          "tensors[1].suffix: got \"weights\"");
  EXPECT_EQ(weight, nullptr);
}

}  // namespace
}  // namespace awqd
