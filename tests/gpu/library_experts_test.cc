// Experts of libawqd on a GPU: goldens, the bits that tables of the host give, a CUDA graph that
// meets other ids, ids of no expert, and masked rows.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/kernels.h"
#include "kernels/library/objects.h"
#include "tests/gpu/library_check.h"
#include "tests/testing/npy.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

constexpr int64_t kWorkspace = int64_t{512} << 20;

testing::Npy GoldenOfExperts(const std::string& name) {
  auto npy = testing::ReadNpy(DataPath("experts/goldens/" + name + ".npy"));
  EXPECT_TRUE(npy.ok()) << npy.status();
  return *std::move(npy);
}

// The experts of an MLP on one device: 4 bits, groups of 128, no bias.
struct Mixture {
  static constexpr int64_t kExperts = 16, kK = 512, kMiddle = 768, kN = 384, kTopK = 4;

  explicit Mixture(const char* name, bool batch_invariant = false) {
    awqd_device_options options = AWQD_INIT(options);
    options.batch_invariant = batch_invariant;
    Check(awqd_device_open(name, &options, &device));
    gate = Make(kK, kMiddle, 1);
    up = Make(kK, kMiddle, 2);
    down = Make(kMiddle, kN, 3);
  }
  ~Mixture() {
    for (awqd_stack* stack : {gate, up, down}) awqd_stack_free(stack);
    awqd_device_close(device);
  }
  Mixture(const Mixture&) = delete;
  Mixture& operator=(const Mixture&) = delete;

  awqd_stack* Make(int64_t k, int64_t n, unsigned seed) const {
    std::mt19937 random(seed);
    std::vector<awqd_weight*> weights(kExperts);
    for (awqd_weight*& weight : weights) {
      std::vector<uint8_t> codes(k * n);
      for (uint8_t& code : codes) code = random() % 16;
      std::vector<uint16_t> scales(k / 128 * n);
      for (uint16_t& scale : scales) scale = 0x2000 + random() % 0x400;  // 0.008 to 0.016
      const int64_t codes_shape[] = {k, n}, scales_shape[] = {k / 128, n};
      const awqd_tensor tensors[] = {
          {"codes", "U8", codes_shape, 2, codes.data(), codes.size()},
          {"scales", "F16", scales_shape, 2, scales.data(), scales.size() * 2}};
      const awqd_setting settings[] = {{"bits", "4"}, {"group_size", "128"}, {"symmetric", "true"}};
      Check(awqd_weight_pack(device, "plain", settings, 3, tensors, 2, &weight));
    }
    awqd_stack* out = nullptr;
    Check(awqd_stack_make(weights.data(), weights.size(), &out));
    for (awqd_weight* weight : weights) awqd_weight_free(weight);
    return out;
  }

  // E4M3 with a scale per column, [kK, kMiddle].
  awqd_stack* MakeFloat8() const {
    std::mt19937 random(4);
    std::vector<awqd_weight*> weights(kExperts);
    for (awqd_weight*& weight : weights) {
      std::vector<uint8_t> codes(kMiddle * kK);
      for (uint8_t& code : codes) code = random() % 2 << 7 | (0x30 + random() % 0x10);  // 0.5 to 2
      std::vector<float> scales(kMiddle);
      for (float& scale : scales) scale = 0.01f * static_cast<float>(1 + random() % 4);
      const int64_t codes_shape[] = {kMiddle, kK}, scales_shape[] = {kMiddle};
      const awqd_tensor tensors[] = {
          {"weight", "F8_E4M3", codes_shape, 2, codes.data(), codes.size()},
          {"weight_scale", "F32", scales_shape, 1, scales.data(), scales.size() * 4}};
      Check(awqd_weight_pack(device, "fp8", nullptr, 0, tensors, 2, &weight));
    }
    awqd_stack* out = nullptr;
    Check(awqd_stack_make(weights.data(), weights.size(), &out));
    for (awqd_weight* weight : weights) awqd_weight_free(weight);
    return out;
  }

  awqd_device* device = nullptr;
  awqd_stack *gate = nullptr, *up = nullptr, *down = nullptr;
};

std::vector<uint16_t> RandomTokens(int64_t m) {
  std::mt19937 random(7);
  std::vector<uint16_t> out(m * Mixture::kK);
  for (uint16_t& x : out) x = (random() % 2 << 15) | (0x3400 + random() % 0x800);  // 0.25 to 1
  return out;
}
std::vector<int32_t> RandomIds(int64_t m, int seed, int64_t below = Mixture::kExperts) {
  std::mt19937 random(seed);
  std::vector<int32_t> out(m * Mixture::kTopK);
  for (int32_t& id : out) id = static_cast<int32_t>(random() % below);
  return out;
}
std::vector<float> RandomRouter(int64_t m) {
  std::mt19937 random(9);
  std::vector<float> out(m * Mixture::kTopK);
  for (float& weight : out) weight = static_cast<float>(random() % 1000) / 1000;
  return out;
}

class GpuExpertsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    name_ = std::getenv("AWQD_TEST_DEVICE");
    if (name_ == nullptr || std::string(name_).find("cuda") != 0) {
      GTEST_SKIP() << "AWQD_TEST_DEVICE names no GPU";
    }
    mixture_.emplace(name_);
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    workspace_ = {Allocate(kWorkspace), kWorkspace};
    Check(awqd_workspace_init(mixture_->device, workspace_, stream_));
  }
  void TearDown() override {
    if (stream_ != nullptr) Check(cudaStreamSynchronize(stream_));
    for (void* memory : memory_) Check(cudaFree(memory));
    if (stream_ != nullptr) Check(cudaStreamDestroy(stream_));
  }

  void* Allocate(int64_t bytes) {
    void* out = nullptr;
    Check(cudaMalloc(&out, bytes));
    memory_.push_back(out);
    return out;
  }
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    void* const out = Allocate(static_cast<int64_t>(values.size() * sizeof(T)));
    Check(cudaMemcpy(out, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    // A copy from pageable memory may return before other streams see it.
    Check(cudaDeviceSynchronize());
    return static_cast<T*>(out);
  }
  std::vector<float> Fetch(const void* y, int64_t count) {
    std::vector<float> out(count);
    Check(cudaStreamSynchronize(stream_));
    Check(cudaMemcpy(out.data(), y, count * 4, cudaMemcpyDeviceToHost));
    return out;
  }

  template <typename Args>
  Args TokensOf(int64_t m, const void* x, const int32_t* ids, const float* router, void* y) {
    Args args = AWQD_INIT(args);
    args.m = m, args.top_k = Mixture::kTopK;
    args.x = x, args.y = y, args.expert_ids = ids, args.router_weights = router;
    args.x_dtype = AWQD_FP16, args.y_dtype = AWQD_FP32;
    return args;
  }
  void Multiply(const Mixture& mixture, const awqd_grouped_matmul_args& args) {
    int64_t bytes = 0;
    Check(awqd_grouped_matmul_workspace(mixture.gate, &args, &bytes));
    ASSERT_LE(bytes, kWorkspace);
    Check(awqd_grouped_matmul(mixture.gate, &args, workspace_, stream_));
  }
  awqd_grouped_mlp_args MlpOf(const Mixture& mixture, int64_t m, const void* x, const int32_t* ids,
                              const float* router, void* y) {
    auto args = TokensOf<awqd_grouped_mlp_args>(m, x, ids, router, y);
    args.gate = mixture.gate, args.up = mixture.up, args.down = mixture.down;
    args.activation = AWQD_SILU;
    return args;
  }
  void RunMlp(const awqd_grouped_mlp_args& args) {
    int64_t bytes = 0;
    Check(awqd_grouped_mlp_workspace(&args, &bytes));
    ASSERT_LE(bytes, kWorkspace);
    Check(awqd_grouped_mlp(&args, workspace_, stream_));
  }

  // As the server does it: the host sorts, and makes the table.
  std::vector<float> ByTablesOfTheHost(const Mixture& mixture, const void* x, int64_t m,
                                       const std::vector<int32_t>& ids, const float* router) {
    constexpr int64_t kK = Mixture::kK, kN = Mixture::kMiddle, kTopK = Mixture::kTopK;
    const auto rows = static_cast<int64_t>(ids.size());
    std::vector<int64_t> ends;
    std::vector<int32_t> tokens, order(rows);
    for (int64_t e = 0; e < Mixture::kExperts; ++e) {
      for (int64_t i = 0; i < rows; ++i) {
        if (ids[i] != e) continue;
        order[i] = static_cast<int32_t>(tokens.size());
        tokens.push_back(static_cast<int32_t>(i / kTopK));
      }
      ends.push_back(static_cast<int64_t>(tokens.size()));
    }
    std::vector<const DeviceWeight*> experts;
    for (const auto& expert : mixture.gate->experts) experts.push_back(expert.get());
    Device& device = *mixture.device->device;
    const auto stream = device.CreateStream().value();
    void* const sorted = Allocate(rows * kK * 2);
    void* const sums = Allocate(rows * kN * 4);
    void* const y = Allocate(m * kN * 4);
    Check(GatherRows(
        {.in = x, .rows = Upload(tokens), .count = rows, .row_bytes = kK * 2, .out = sorted},
        device, stream->view()));
    GroupedArgs args = {.experts = experts,
                        .ends = ends,
                        .x = {sorted, DType::kFp16, rows, kK},
                        .y = {sums, DType::kFp32, rows, kN}};
    const KernelRow* const row = GroupedRow(args);
    EXPECT_NE(row, nullptr);
    if (row == nullptr) return {};
    const std::string table = row->grouped_table(args);
    args.table = Upload(std::vector<char>(table.begin(), table.end()));
    args.workspace = Allocate(GroupedWorkspaceBytes(args, *row) + 1);
    Check(GroupedMatmul(args, *row, stream->view()));
    Check(CombineRows({.in = sums,
                       .cols = kN,
                       .rows = Upload(order),
                       .weights = router,
                       .count = m,
                       .terms = kTopK,
                       .y = y,
                       .y_dtype = DType::kFp32},
                      device, stream->view()));
    Check(stream->Synchronize());
    return Fetch(y, m * kN);
  }

  const char* name_ = nullptr;
  std::optional<Mixture> mixture_;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> memory_;
  awqd_workspace workspace_ = {};
};

// Root of the mean square of differences, over that of the expected.
double Error(const std::vector<float>& got, const std::vector<float>& expected) {
  double off = 0, all = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    off += std::pow(double{got[i]} - expected[i], 2);
    all += std::pow(double{expected[i]}, 2);
  }
  return std::sqrt(off / all);
}

TEST_F(GpuExpertsTest, ProductsAreTheGoldens) {
  constexpr int64_t kExperts = 5, kMiddle = 96, kN = 72;
  awqd_checkpoint* checkpoint = nullptr;
  Check(awqd_checkpoint_open(DataPath("experts/moe").c_str(), &checkpoint));
  std::vector<awqd_stack*> stacks;
  for (const char* const projection : {"gate_proj", "up_proj", "down_proj"}) {
    std::vector<awqd_weight*> weights(kExperts);
    for (int64_t e = 0; e < kExperts; ++e) {
      Check(awqd_weight_load(mixture_->device, checkpoint,
                             absl::StrCat("moe.experts.", e, ".", projection).c_str(),
                             &weights[e]));
    }
    Check(awqd_stack_make(weights.data(), weights.size(), &stacks.emplace_back()));
    for (awqd_weight* weight : weights) awqd_weight_free(weight);
  }
  awqd_checkpoint_close(checkpoint);
  const auto there = [&](const char* name) {
    const std::string bytes = GoldenOfExperts(name).bytes;
    return Upload(std::vector<char>(bytes.begin(), bytes.end()));
  };
  const auto* const ids = reinterpret_cast<const int32_t*>(there("ids"));
  const auto* const router = reinterpret_cast<const float*>(there("router"));
  const void* const x = there("x");
  void* const y = Allocate(11 * 3 * kMiddle * 4);
  const auto expect_golden = [&](const std::string& name) {
    const testing::Npy golden = GoldenOfExperts(name);
    std::vector<float> expected;
    for (size_t i = 0; i < golden.bytes.size() / 8; ++i) {
      expected.push_back(static_cast<float>(golden.At<double>(static_cast<int64_t>(i))));
    }
    EXPECT_LE(Error(Fetch(y, static_cast<int64_t>(expected.size())), expected), 1e-3) << name;
  };
  for (const bool summed : {false, true}) {
    auto matmul = TokensOf<awqd_grouped_matmul_args>(11, x, ids, summed ? router : nullptr, y);
    matmul.top_k = 3;
    matmul.activation = AWQD_SILU;
    Check(awqd_grouped_matmul(stacks[0], &matmul, workspace_, stream_));
    expect_golden(summed ? "grouped_summed" : "grouped");
    auto mlp = TokensOf<awqd_grouped_mlp_args>(11, x, ids, summed ? router : nullptr, y);
    mlp.gate = stacks[0], mlp.up = stacks[1], mlp.down = stacks[2];
    mlp.top_k = 3;
    mlp.activation = AWQD_SILU;
    Check(awqd_grouped_mlp(&mlp, workspace_, stream_));
    expect_golden(summed ? "mlp_summed" : "mlp");
  }
  static_assert(kN < kMiddle);  // y has room for both
  for (awqd_stack* stack : stacks) awqd_stack_free(stack);
}

TEST_F(GpuExpertsTest, TheBitsOfTablesOfTheHost) {
  const Mixture fixed(name_, /*batch_invariant=*/true);
  for (const int64_t m : {1, 2, 9, 64, 300}) {
    const std::vector<int32_t> ids = RandomIds(m, static_cast<int>(m));
    const void* const x = Upload(RandomTokens(m));
    const float* const router = Upload(RandomRouter(m));
    void* const y = Allocate(m * Mixture::kMiddle * 4);
    const auto args = TokensOf<awqd_grouped_matmul_args>(m, x, Upload(ids), router, y);
    Multiply(fixed, args);
    EXPECT_EQ(Fetch(y, m * Mixture::kMiddle), ByTablesOfTheHost(fixed, x, m, ids, router)) << m;
    // Sums in another order, of other tiles.
    Multiply(*mixture_, args);
    EXPECT_LE(
        Error(Fetch(y, m * Mixture::kMiddle), ByTablesOfTheHost(*mixture_, x, m, ids, router)),
        1e-6)
        << m;
  }
}

TEST_F(GpuExpertsTest, MlpsAreThoseOfTheCpu) {
  const Mixture cpu("cpu");
  for (const int32_t how : {AWQD_UNQUANTIZED, AWQD_FP8_PER_TOKEN, AWQD_FP8_PER_BLOCK_128}) {
    // Some numbers that enter down are rounded to the other neighbour, 2^-4 away.
    const double tolerance = how == AWQD_UNQUANTIZED ? 2e-3 : 8e-3;
    for (const int64_t m : {1, 5, 40, 400}) {  // from 256 on sums between products have 16 bits
      const std::vector<int32_t> ids = RandomIds(m, 3);
      const std::vector<uint16_t> x = RandomTokens(m);
      const std::vector<float> router = RandomRouter(m);
      std::vector<float> expected(m * Mixture::kN);
      auto there = MlpOf(cpu, m, x.data(), ids.data(), router.data(), expected.data());
      there.quantization = how;
      int64_t bytes = 0;
      Check(awqd_grouped_mlp_workspace(&there, &bytes));
      void* const workspace = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
      Check(awqd_grouped_mlp(&there, {workspace, bytes}, nullptr));
      std::free(workspace);
      void* const y = Allocate(m * Mixture::kN * 4);
      auto here = MlpOf(*mixture_, m, Upload(x), Upload(ids), Upload(router), y);
      here.quantization = how;
      RunMlp(here);
      EXPECT_LE(Error(Fetch(y, m * Mixture::kN), expected), tolerance) << m << " how " << how;
    }
  }
}

TEST_F(GpuExpertsTest, AGraphTakesOtherIds) {
  constexpr int64_t kTokens = 48;
  const int64_t count = kTokens * Mixture::kN;
  int32_t* const ids = Upload(RandomIds(kTokens, 1));
  void* const y = Allocate(count * 4);
  const awqd_grouped_mlp_args args = MlpOf(*mixture_, kTokens, Upload(RandomTokens(kTokens)), ids,
                                           Upload(RandomRouter(kTokens)), y);
  RunMlp(args);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  Check(cudaStreamSynchronize(stream_));
  Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  RunMlp(args);
  Check(cudaStreamEndCapture(stream_, &graph));
  Check(cudaGraphInstantiate(&run, graph, 0));
  std::vector<float> before;
  for (int i = 0; i < 20; ++i) {
    // All experts, and then few or one.
    const std::vector<int32_t> now = RandomIds(kTokens, i, i % 3 == 0 ? Mixture::kExperts : i % 3);
    Check(cudaMemcpyAsync(ids, now.data(), now.size() * 4, cudaMemcpyHostToDevice, stream_));
    Check(cudaGraphLaunch(run, stream_));
    Check(cudaGraphLaunch(run, stream_));  // the next begins while the last ends
    const std::vector<float> replayed = Fetch(y, count);
    Check(cudaMemset(y, 0xff, count * 4));
    Check(cudaDeviceSynchronize());
    RunMlp(args);
    EXPECT_EQ(Fetch(y, count), replayed) << i;
    EXPECT_NE(replayed, before) << i;
    before = replayed;
  }
  Check(cudaGraphExecDestroy(run));
  Check(cudaGraphDestroy(graph));
}

TEST_F(GpuExpertsTest, IdsOfNoExpertGiveZeros) {
  constexpr int64_t kTokens = 33, kTopK = Mixture::kTopK, kN = Mixture::kMiddle;
  const void* const x = Upload(RandomTokens(kTokens));
  void* const y = Allocate(kTokens * kTopK * kN * 4);
  std::vector<int32_t> ids = RandomIds(kTokens, 2);
  const auto rows_of = [&] {
    Multiply(*mixture_, TokensOf<awqd_grouped_matmul_args>(kTokens, x, Upload(ids), nullptr, y));
    return Fetch(y, kTokens * kTopK * kN);
  };
  const std::vector<float> all = rows_of();
  constexpr int32_t kBad[] = {-1, Mixture::kExperts, 1 << 30, -(1 << 30)};
  for (size_t i = 0; i < ids.size(); i += 3) ids[i] = kBad[i % 4];
  const std::vector<float> some = rows_of();
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto begin = static_cast<int64_t>(i) * kN;
    const std::vector<float> got(some.begin() + begin, some.begin() + begin + kN);
    const std::vector<float> expected =
        i % 3 == 0 ? std::vector<float>(kN)
                   : std::vector<float>(all.begin() + begin, all.begin() + begin + kN);
    if (i % 3 == 0) {
      EXPECT_EQ(got, expected) << i;
    } else {
      EXPECT_LE(Error(got, expected), 1e-6) << i;
    }
  }
  std::fill(ids.begin(), ids.end(), -7);
  EXPECT_EQ(rows_of(), std::vector<float>(kTokens * kTopK * kN)) << "no choice has an expert";
  const float* const router = Upload(RandomRouter(kTokens));
  RunMlp(MlpOf(*mixture_, kTokens, x, Upload(ids), router, y));
  EXPECT_EQ(Fetch(y, kTokens * Mixture::kN), std::vector<float>(kTokens * Mixture::kN));
}

// Rows of x that are masked, beside the same rows sorted by expert.
class GpuMaskedTest : public GpuExpertsTest {
 protected:
  static constexpr int64_t kK = Mixture::kK, kN = Mixture::kMiddle, kExperts = Mixture::kExperts;
  static constexpr uint8_t kUntouched = 0xa5;

  // None, one, some and all rows. Numbers that are none count as 0 and as all.
  static std::vector<int32_t> Counts(int64_t max_rows, int seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> out;
    for (int64_t e = 0; e < kExperts; ++e) {
      const auto most = static_cast<int32_t>(max_rows);
      const int32_t some = static_cast<int32_t>(random() % (max_rows + 1));
      const int32_t of[] = {e == 4 ? -3 : 0, 1, some, e == 7 ? most + 5 : most};
      out.push_back(of[(e + seed) % 4]);
    }
    return out;
  }
  void SetCounts(const std::vector<int32_t>& counts) {
    Check(cudaMemcpyAsync(const_cast<int32_t*>(args_.counts), counts.data(), counts.size() * 4,
                          cudaMemcpyHostToDevice, stream_));
    Check(cudaStreamSynchronize(stream_));
  }
  bool IsValid(const std::vector<int32_t>& counts, int64_t row) const {
    return row % args_.max_rows < counts[row / args_.max_rows];
  }
  // NaNs in rows that are not valid.
  void SetRows(const std::vector<int32_t>& counts) {
    std::vector<uint16_t> x = RandomTokens(kExperts * args_.max_rows);
    for (size_t i = 0; i < x.size(); ++i) {
      if (!IsValid(counts, static_cast<int64_t>(i) / kK)) x[i] = 0x7e00;
    }
    Check(cudaMemcpyAsync(const_cast<void*>(args_.x), x.data(), x.size() * 2,
                          cudaMemcpyHostToDevice, stream_));
    Check(cudaMemsetAsync(args_.y, kUntouched, x.size() / kK * kN * 4, stream_));
    Check(cudaStreamSynchronize(stream_));
  }
  void Start(int64_t max_rows, int64_t expected_rows, int32_t y_dtype, int32_t quantization,
             int32_t activation) {
    const int64_t rows = kExperts * max_rows;
    args_ = AWQD_INIT(args_);
    args_.max_rows = max_rows, args_.expected_rows = expected_rows;
    args_.x = Allocate(rows * kK * 2), args_.y = Allocate(rows * kN * 4);
    args_.counts = static_cast<const int32_t*>(Allocate(kExperts * 4));
    args_.x_dtype = AWQD_FP16, args_.y_dtype = y_dtype;
    args_.activation = activation, args_.quantization = quantization;
  }
  void Run(const awqd_stack* stack) {
    int64_t bytes = 0;
    Check(awqd_masked_matmul_workspace(stack, &args_, &bytes));
    ASSERT_LE(bytes, kWorkspace);
    Check(awqd_masked_matmul(stack, &args_, workspace_, stream_));
  }
  std::vector<uint8_t> FetchRow(const void* y, int64_t row) {
    const int64_t bytes = kN * (args_.y_dtype == AWQD_FP32 ? 4 : 2);
    std::vector<uint8_t> out(bytes);
    Check(cudaMemcpy(out.data(), static_cast<const char*>(y) + row * bytes, bytes,
                     cudaMemcpyDeviceToHost));
    return out;
  }
  // By the bits, or as numbers where sums have another order.
  void ExpectSorted(const awqd_stack* stack, const std::vector<int32_t>& counts, bool bits) {
    const int64_t rows = kExperts * args_.max_rows;
    std::vector<int32_t> ids(rows, -1);
    for (int64_t row = 0; row < rows; ++row) {
      if (IsValid(counts, row)) ids[row] = static_cast<int32_t>(row / args_.max_rows);
    }
    void* const y = Allocate(rows * kN * 4);
    auto sorted = TokensOf<awqd_grouped_matmul_args>(rows, args_.x, Upload(ids), nullptr, y);
    sorted.top_k = 1, sorted.y_dtype = args_.y_dtype;
    sorted.activation = args_.activation, sorted.quantization = args_.quantization;
    Check(awqd_grouped_matmul(stack, &sorted, workspace_, stream_));
    Check(cudaStreamSynchronize(stream_));
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<uint8_t> got = FetchRow(args_.y, row);
      if (!IsValid(counts, row)) {
        ASSERT_EQ(got, std::vector<uint8_t>(got.size(), kUntouched)) << "row " << row;
      } else if (bits) {
        ASSERT_EQ(got, FetchRow(y, row)) << "row " << row;
      } else {
        const auto numbers = [](const std::vector<uint8_t>& bytes) {
          std::vector<float> out(bytes.size() / 4);
          std::memcpy(out.data(), bytes.data(), bytes.size());
          return out;
        };
        // Tensor cores of E4M3 keep fewer bits of sums; rows of 16 bits round scale times code.
        const double most = args_.quantization == AWQD_UNQUANTIZED ? 1e-6 : 3e-4;
        ASSERT_LE(Error(numbers(got), numbers(FetchRow(y, row))), most) << "row " << row;
      }
    }
  }

  awqd_masked_matmul_args args_ = {};
};

TEST_F(GpuMaskedTest, RowsAreThoseOfSortedOnes) {
  const Mixture fixed(name_, /*batch_invariant=*/true);
  awqd_stack* const float8 = mixture_->MakeFloat8();
  int seed = 0;
  for (const int64_t max_rows : {1, 24, 200}) {
    for (const int32_t how : {AWQD_UNQUANTIZED, AWQD_FP8_PER_TOKEN, AWQD_FP8_PER_BLOCK_128}) {
      for (const int32_t y_dtype : {AWQD_FP32, AWQD_BF16}) {
        const int32_t activation = seed % 2 == 0 ? AWQD_NONE : AWQD_SILU;
        Start(max_rows, seed % 3 == 0 ? 0 : (max_rows + 3) / 4, y_dtype, how, activation);
        const std::vector<int32_t> counts = Counts(max_rows, ++seed);
        SetCounts(counts);
        for (const awqd_stack* stack : {fixed.gate, mixture_->gate, float8}) {
          const bool bits = stack == fixed.gate;
          if (!bits && y_dtype != AWQD_FP32) continue;
          SCOPED_TRACE(absl::StrCat("max_rows ", max_rows, " quantization ", how, " y ", y_dtype,
                                    bits              ? " batch-invariant"
                                    : stack == float8 ? " E4M3"
                                                      : ""));
          SetRows(counts);
          Run(stack);
          ExpectSorted(stack, counts, bits);
        }
      }
    }
  }
  awqd_stack_free(float8);
}

TEST_F(GpuMaskedTest, AGraphTakesOtherCounts) {
  awqd_stack* const float8 = mixture_->MakeFloat8();
  for (const int32_t how : {AWQD_UNQUANTIZED, AWQD_FP8_PER_BLOCK_128}) {
    Start(48, 16, AWQD_FP32, how, AWQD_NONE);
    SetCounts(Counts(48, 1));
    Run(float8);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t run = nullptr;
    Check(cudaStreamSynchronize(stream_));
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    Run(float8);
    Check(cudaStreamEndCapture(stream_, &graph));
    Check(cudaGraphInstantiate(&run, graph, 0));
    for (int i = 2; i < 12; ++i) {
      // The last of these has no rows.
      const std::vector<int32_t> counts = i < 11 ? Counts(48, i) : std::vector<int32_t>(kExperts);
      SetCounts(counts);
      SetRows(counts);
      Check(cudaGraphLaunch(run, stream_));
      Check(cudaGraphLaunch(run, stream_));  // the next begins while the last ends
      ExpectSorted(float8, counts, /*bits=*/false);
    }
    Check(cudaGraphExecDestroy(run));
    Check(cudaGraphDestroy(graph));
  }
  awqd_stack_free(float8);
}

}  // namespace
}  // namespace awqd
