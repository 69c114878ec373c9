// Composition fuzzer: random batches of works that may merge must have the answers of each work
// alone.
//
// The works of a round are similar, so that most may merge: none, one or many tokens; ragged, empty
// and all-to-one experts; with and without router weights, bias and activation function; every
// output type; odd shapes; activations and results in memory of a device; some of them cancelled or
// expired. On a batch-invariant device the bits must be equal; on others the values are within the
// tolerance of a product.
//
// Environment: AWQD_TEST_DEVICE; AWQD_TEST_COMPOSITION_SECONDS for all cases together, default 20;
// AWQD_TEST_COMPOSITION_SEED.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <random>
#include <type_traits>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "kernels/base/mutex.h"
#include "kernels/kernels.h"
#include "server/engine/engine.h"
#include "server/engine/experts_work.h"
#include "server/engine/matmul_work.h"
#include "tests/testing/matchers.h"
#include "tests/testing/places.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::engine {
namespace {

constexpr int64_t kK = 64, kI = 72, kN = 40;
constexpr int64_t kExperts = 5;
constexpr int kCases = 6;  // for TEST_P below

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  int64_t number = 0;
  return text != nullptr && absl::SimpleAtoi(text, &number) ? number : otherwise;
}

struct Answer {
  absl::Status status;
  std::vector<uint8_t> bytes;
  ExecutionReport report;
};

// A work that can be submitted repeatedly, and its scheme for messages.
struct Request {
  // `on_device`: activations and result are in memory of a device, where the work takes that.
  std::function<std::unique_ptr<Work>(bool on_device)> make;
  DType out_dtype = DType::kFp16;
  DType x_dtype = DType::kFp16;
  std::string text;
  Answer alone;
};

struct Setup {
  bool shared_memory = true;
  bool batch_invariant = false;
  bool spread = false;  // expert parallel: the experts of a stack are on two devices in turns
};

class CompositionTest : public ::testing::TestWithParam<Setup> {
 protected:
  // One engine answers each work alone, the other one batches. Both run on the same devices.
  void SetUp() override {
    const std::string name = TestDeviceName();
    while (devices_.size() < (GetParam().spread ? 2u : 1u)) {
      auto device =
          OpenDevice(name, {.cpu_threads = 2, .batch_invariant = GetParam().batch_invariant});
      ASSERT_TRUE(device.ok()) << device.status();
      if (!(*device)->host_addressable() && GetParam().shared_memory) {
        GTEST_SKIP() << name << " shares no memory with the host";
      }
      const bool pretend = (*device)->host_addressable() != GetParam().shared_memory;
      devices_.push_back(pretend
                             ? std::make_unique<testing::WrappedDevice>(*std::move(device), false)
                             : *std::move(device));
    }
    // Batches close long before this delay: most rounds are submitted within a tenth of it.
    EngineOptions options;
    options.batching.max_queue_delay = absl::Milliseconds(2);
    options.batching.max_batch_tokens = 48;
    together_ = MakeEngine(options);
    options.batching.max_queue_delay = absl::ZeroDuration();
    alone_ = MakeEngine(options);
    MakeWeights();
  }
  std::unique_ptr<Engine> MakeEngine(const EngineOptions& options) {
    if (!GetParam().spread) return *MakeLocalEngine(devices_[0].get(), options);
    std::vector<std::unique_ptr<Engine>> engines;
    for (const auto& device : devices_) {
      engines.push_back(*MakeLocalEngine(device.get(), options));
    }
    return MakeRoutingEngine(std::move(engines));
  }
  // Works are destroyed before the engines, and these before the device.
  void TearDown() override {
    together_.reset();
    alone_.reset();
    weights_.clear();
    gate_ = up_ = down_ = dense_gate_ = dense_up_ = dense_down_ = nullptr;
  }

  std::shared_ptr<const model::PlacedWeight> Place(absl::Span<Device* const> on, int64_t k,
                                                   int64_t n, QuantizationScheme what,
                                                   bool bias = false) {
    const HostWeight host = testing::RandomWeight(
        {.k = k, .n = n, .scheme = what, .bias = bias, .seed = ++weights_made_});
    auto weight = model::PlaceWeight(host, on, model::Placing::kWhole);
    EXPECT_TRUE(weight.ok()) << weight.status();
    return *std::move(weight);
  }
  std::vector<Device*> Devices() const {
    std::vector<Device*> out;
    for (const auto& device : devices_) out.push_back(device.get());
    return out;
  }
  std::shared_ptr<const model::WeightStack> Stack(int64_t experts, int64_t k, int64_t n) {
    const std::vector<Device*> all = Devices();
    std::map<int64_t, std::shared_ptr<const model::PlacedWeight>> placed;
    for (int64_t e = 0; e < experts; ++e) {
      Device* const one[] = {all[e % all.size()]};
      const absl::Span<Device* const> on = experts == 1 ? absl::MakeConstSpan(all) : one;
      placed.emplace(e, Place(on, k, n, Asymmetric(4, 32), true));
    }
    return *model::MakeStack("experts.*.proj", placed, GetParam().spread && experts > 1);
  }
  void MakeWeights() {
    QuantizationScheme integers = Symmetric(4, 0);
    integers.scale_dtype.reset();
    const std::vector<Device*> on = Devices();
    weights_ = {Place(on, kK, 24, Asymmetric(4, 32)), Place(on, 128, 136, Asymmetric(4, 128), true),
                Place(on, 96, 8, Symmetric(8, 0, DType::kFp32)), Place(on, kK, 40, integers)};
    gate_ = Stack(kExperts, kK, kI);
    up_ = Stack(kExperts, kK, kI);
    down_ = Stack(kExperts, kI, kN);
    dense_gate_ = Stack(1, kK, kI);
    dense_up_ = Stack(1, kK, kI);
    dense_down_ = Stack(1, kI, kN);
  }

  // --- Random requests ---

  int64_t Below(int64_t end) { return static_cast<int64_t>(random_() % end); }
  bool OneIn(int64_t n) { return Below(n) == 0; }
  template <typename T>
  T AnyOf(std::initializer_list<T> list) {
    return *(list.begin() + Below(static_cast<int64_t>(list.size())));
  }
  // Often none, one or a few; rarely more than a batch holds.
  int64_t Tokens() { return OneIn(4) ? 0 : OneIn(30) ? 70 : 1 + Below(OneIn(3) ? 17 : 3); }
  DType Floating() { return AnyOf({DType::kFp16, DType::kBf16, DType::kFp32}); }
  std::optional<Path> AnyPath() {
    const int64_t path = Below(4);
    if (path > 1) return std::nullopt;
    return path == 0 ? Path::kFused : Path::kDequantize;
  }
  ActivationFunction AnyActivation() {
    return AnyOf({ActivationFunction::kNone, ActivationFunction::kSilu, ActivationFunction::kGelu,
                  ActivationFunction::kGeluTanh});
  }
  std::vector<float> Floats(int64_t count) {
    std::vector<float> out(count);
    for (float& value : out) value = static_cast<float>(Below(2000) - 1000) / 500;
    return out;
  }
  std::vector<uint8_t> Rows(int64_t rows, int64_t k, DType dtype) {
    return testing::RandomMatrix(rows, k, dtype, random_());
  }

  template <typename AnyWork>
  Request Made(AnyWork work, std::vector<uint8_t> x, std::string text) {
    text += absl::StrCat(" ", Name(work.x_dtype), " to ", Name(work.out_dtype), ", ", work.rows,
                         " tokens, activation ", Name(work.activation), ", path ",
                         work.path ? static_cast<int>(*work.path) : -1);
    const DType in = work.x_dtype, out = work.out_dtype;
    auto make = [this, work = std::make_shared<AnyWork>(std::move(work)),
                 x = std::move(x)](bool on_device) -> std::unique_ptr<Work> {
      auto copy = std::make_unique<AnyWork>(*work);
      copy->x = *together_->staging().Get(static_cast<int64_t>(x.size()));
      if (!x.empty()) std::memcpy(copy->x.data(), x.data(), x.size());
      if (on_device && copy->accesses_devices()) {
        if (!OneIn(4)) copy->x = OnDevice(copy->x.view());
        SetOutput(copy.get());
      }
      return copy;
    };
    return {std::move(make), out, in, std::move(text), {}};
  }

  Request Product(std::shared_ptr<const model::PlacedWeight> weight, DType x, DType out) {
    MatmulWork work;
    work.weight = std::move(weight);
    work.x_dtype = x;
    work.out_dtype = out;
    work.rows = Tokens();
    work.activation = theme_activation_;
    work.path = theme_path_;
    const int64_t n = work.here().shape.n;
    const bool integers = out == DType::kInt32;
    if (integers) {
      work.activation = ActivationFunction::kNone;
    } else if (x == DType::kInt8) {
      work.scales = Floats(OneIn(2) ? 1 : work.rows);
    } else {
      work.quantization = theme_quantization_;
      if (HasGivenScales(work.quantization)) {
        work.scales = Floats(OneIn(2) ? 1 : work.rows);
        for (float& scale : work.scales) scale = 0.01f + std::abs(scale) / 50;
      }
    }
    if (!integers && OneIn(8)) work.bias = Floats(n);
    std::vector<uint8_t> rows = Rows(work.rows, work.here().shape.k, x);
    return Made(std::move(work), std::move(rows),
                absl::StrCat("product with [", weight_text_, ", ", n, "]"));
  }
  Request AnyProduct(size_t which) {
    weight_text_ = absl::StrCat("weight ", which);
    const bool has_bias = which == 1;
    if (which == 3 && OneIn(2)) return Product(weights_[3], DType::kInt8, DType::kInt32);
    const bool quantized_in = which != 2 && !has_bias && OneIn(4);
    const DType out = OneIn(5) ? Floating() : theme_out_;
    return Product(weights_[which], quantized_in ? DType::kInt8 : theme_x_, out);
  }

  template <typename Routed>
  Request RoutedRequest(Routed work, std::string text, bool of_experts, int64_t experts,
                        bool must_sum = false) {
    work.rows = Tokens();
    work.x_dtype = theme_x_;
    if (theme_codes_.how != ActivationQuantization::kNone) {
      work.x_dtype = DType::kE4m3;
      for (float scale : Floats(work.rows)) work.token_scales.push_back(0.1f + std::abs(scale));
    }
    work.out_dtype = OneIn(6) ? Floating() : theme_out_;
    work.activation = theme_activation_;
    work.path = theme_path_;
    work.of_experts = of_experts;
    if (of_experts) {
      work.top_k = OneIn(6) ? 1 + Below(4) : theme_top_k_;
      work.summed = must_sum || (OneIn(6) ? !theme_summed_ : theme_summed_);
      const bool all_to_one = OneIn(4);
      const int64_t one = Below(experts), used = 1 + Below(experts);
      for (int64_t i = 0; i < work.rows * work.top_k; ++i) {
        work.ids.push_back(static_cast<int32_t>(all_to_one ? one : Below(used)));
      }
      if (work.summed) work.router_weights = Floats(work.rows * work.top_k);
    }
    if constexpr (std::is_same_v<Routed, GatedMlpWork>) {
      if (theme_gate_) {
        work.activation = *theme_gate_;
        work.parameters = {
            .limit = theme_limit_, .alpha = 1.7f, .beta = 4, .linear_beta = theme_limit_};
      }
      if (OneIn(8)) work.gate_up_bias = Floats(2 * experts * kI);
      if (OneIn(8)) work.down_bias = Floats(experts * kN);
      if (!work.shared_expert_gate.empty()) text += ", gated";
    }
    text += absl::StrCat(of_experts ? " of experts" : "", work.summed ? ", summed" : "", ", top ",
                         work.top_k);
    std::vector<uint8_t> rows = Rows(work.rows, kK, work.x_dtype);
    return Made(std::move(work), std::move(rows), std::move(text));
  }
  Request Grouped() {
    GroupedMatmulWork work;
    work.stack = OneIn(5) ? up_ : gate_;
    work.rounding = theme_codes_;
    if (OneIn(8)) work.bias = Floats(kExperts * kI);
    return RoutedRequest(std::move(work), "grouped product", true, kExperts);
  }
  using StackPtr = std::shared_ptr<const model::WeightStack>;
  GatedMlpWork::Stacks Rounded(StackPtr gate, StackPtr up, StackPtr down) const {
    return {std::move(gate), std::move(up), std::move(down), theme_codes_, theme_codes_};
  }
  Request Mlp() {
    const GatedMlpWork::Stacks experts = Rounded(gate_, OneIn(6) ? gate_ : up_, down_);
    if (!theme_shared_) return RoutedRequest(GatedMlpWork(experts, {}), "mlp", true, kExperts);
    GatedMlpWork work(experts, Rounded(dense_gate_, dense_up_, dense_down_));
    if (OneIn(2)) work.shared_expert_gate = OneIn(2) ? Floats(kK) : std::vector<float>(kK, 0.1f);
    return RoutedRequest(std::move(work), "mlp with a shared expert", true, kExperts, true);
  }
  // One weight each: as experts, or dense.
  Request DenseMlp() {
    const bool of_experts = OneIn(3);
    return RoutedRequest(GatedMlpWork(Rounded(dense_gate_, dense_up_, dense_down_), {}),
                         "dense mlp", of_experts, 1);
  }
  Request Dequantized() {
    auto work = std::make_shared<DequantizeWork>();
    work->weight = weights_[0];
    work->out_dtype = Floating();
    work->row_begin = Below(kK);
    work->rows = Below(kK - work->row_begin + 1);
    work->col_begin = Below(24);
    work->cols = Below(24 - work->col_begin + 1);
    return {[this, work](bool on_device) {
              auto copy = std::make_unique<DequantizeWork>(*work);
              if (on_device && copy->accesses_devices()) SetOutput(copy.get());
              return copy;
            },
            work->out_dtype,
            work->out_dtype,
            "dequantize",
            {}};
  }

  Request AnyRequest(int64_t kind) {
    switch (OneIn(5) ? Below(7) : kind) {
      case 0:
        return Grouped();
      case 1:
        return Mlp();
      case 2:
        return DenseMlp();
      case 3:
        return OneIn(10) ? Dequantized() : AnyProduct(3);
      default:
        return AnyProduct(kind % 3);
    }
  }

  std::vector<Request> Round() {
    theme_x_ = Floating();
    theme_out_ = OneIn(2) ? theme_x_ : Floating();
    theme_activation_ = AnyActivation();
    theme_path_ = AnyPath();
    theme_gate_.reset();
    if (OneIn(2)) {
      theme_gate_ = AnyOf(
          {ActivationFunction::kSwigluOai, ActivationFunction::kSitu, ActivationFunction::kSilu});
    }
    theme_limit_ = OneIn(2) ? 2.0f : 7.0f;
    theme_shared_ = OneIn(2);
    theme_quantization_ =
        AnyOf({ActivationQuantization::kNone, ActivationQuantization::kNone,
               ActivationQuantization::kPerToken, ActivationQuantization::kStatic,
               ActivationQuantization::kFloat8PerToken, ActivationQuantization::kFloat8PerBlock,
               ActivationQuantization::kFloat8Static});
    theme_codes_.how =
        AnyOf({ActivationQuantization::kNone, ActivationQuantization::kNone,
               ActivationQuantization::kFloat8Static, ActivationQuantization::kFloat8PerBlock});
    theme_top_k_ = 1 + Below(4);
    theme_summed_ = OneIn(2);
    const int64_t kind = Below(7);
    std::vector<Request> out;
    for (int64_t i = 2 + Below(9); i > 0; --i) out.push_back(AnyRequest(kind));
    return out;
  }

  // --- Memory of devices, as callers share it ---

  // Bytes that begin at any element of a buffer of one of the devices.
  Payload AllocateOnDevice(int64_t bytes) {
    Device* const device = devices_[Below(static_cast<int64_t>(devices_.size()))].get();
    const int64_t offset = OneIn(2) ? 0 : 4 * Below(64);
    auto buffer = std::make_shared<Buffer>(*device->Allocate(MemoryKind::kDevice, offset + bytes));
    char* const data = static_cast<char*>(buffer->data()) + offset;
    return Payload(std::move(buffer), data, bytes, device);
  }
  Payload OnDevice(absl::string_view bytes) {
    Payload out = AllocateOnDevice(static_cast<int64_t>(bytes.size()));
    const Payload staged = *together_->staging().Get(out.size());
    bytes.copy(staged.data(), bytes.size());
    CopyAndWait({out.data(), staged.data(), out.size()});
    return out;
  }
  void SetOutput(Work* work) { work->output = AllocateOnDevice(work->result_bytes()); }
  void CopyAndWait(const CopyPiece& piece) {
    MutexLock lock(&copy_mu_);
    if (copies_ == nullptr) copies_ = *devices_[0]->CreateCopyStream();
    const absl::Status copied = devices_[0]->CopyPieces({&piece, 1}, copies_->view());
    EXPECT_TRUE(copied.ok() && copies_->Synchronize().ok()) << copied;
  }
  std::vector<uint8_t> Read(const Payload& bytes) {
    if (bytes.device() == nullptr) return {bytes.view().begin(), bytes.view().end()};
    const Payload host = *together_->staging().Get(bytes.size());
    CopyAndWait({host.data(), bytes.data(), bytes.size()});
    ++on_device_;
    return {host.view().begin(), host.view().end()};
  }

  // --- Running them ---

  std::future<Answer> Submit(Engine& engine, std::unique_ptr<Work> work,
                             const SubmitOptions& options, TaskHandle* handle = nullptr) {
    auto promise = std::make_shared<std::promise<Answer>>();
    auto submitted = engine.Submit(std::move(work), options,
                                   [this, promise](const absl::Status& status, const Payload& bytes,
                                                   const ExecutionReport& report) {
                                     promise->set_value({status, Read(bytes), report});
                                   });
    if (!submitted.ok()) {
      promise->set_value({submitted.status(), {}, {}});
    } else if (handle != nullptr) {
      *handle = *submitted;
    }
    return promise->get_future();
  }

  void ExpectAlike(const Request& request, const Answer& got) {
    const Answer& alone = request.alone;
    ASSERT_EQ(got.status, alone.status);
    ASSERT_EQ(got.bytes.size(), alone.bytes.size());
    if (GetParam().batch_invariant || request.out_dtype == DType::kInt32) {
      ASSERT_EQ(testing::FirstDifference(got.bytes, alone.bytes), -1) << "byte that differs";
      return;
    }
    std::vector<double> want;
    const int64_t count = static_cast<int64_t>(alone.bytes.size()) / SizeOf(request.out_dtype);
    for (int64_t i = 0; i < count; ++i) {
      want.push_back(testing::GetElement(alone.bytes, request.out_dtype, i));
    }
    // Each answer is within the tolerance of the exact one; a gated MLP has two products.
    const double tolerance = 4 * testing::ProductTolerance(request.out_dtype, request.x_dtype);
    ASSERT_LE(testing::FrobeniusError(got.bytes, request.out_dtype, want), tolerance);
  }

  void RunRound() {
    std::vector<Request> requests = Round();
    for (Request& request : requests) {
      request.alone = Submit(*alone_, request.make(false), {}).get();
      ASSERT_TRUE(request.alone.status.ok()) << request.text << ": " << request.alone.status;
    }
    std::shuffle(requests.begin(), requests.end(), random_);
    std::vector<std::future<Answer>> answers;
    std::vector<bool> must_come;
    for (Request& request : requests) {
      SubmitOptions options = {.priority = static_cast<int>(Below(2))};
      const bool expires = OneIn(12), cancelled = OneIn(12);
      if (expires) options.deadline = absl::Now() + absl::Microseconds(Below(2000));
      TaskHandle handle;
      const bool on_device = !GetParam().shared_memory && OneIn(3);
      answers.push_back(Submit(*together_, request.make(on_device), options, &handle));
      must_come.push_back(!expires && !cancelled);
      if (cancelled) handle.Cancel();
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      const Answer answer = answers[i].get();
      std::string round;
      for (const Request& other : requests) absl::StrAppend(&round, "\n  ", other.text);
      SCOPED_TRACE(absl::StrCat("seed ", seed_, ", round ", rounds_, ": ", requests[i].text,
                                " in a round of", round));
      merged_ += answer.report.batch_requests > 1 ? 1 : 0;
      ++answers_;
      if (!answer.status.ok() && !must_come[i]) {
        // A deadline that cannot be met is refused when it comes.
        ASSERT_THAT(answer.status.code(), ::testing::AnyOf(absl::StatusCode::kCancelled,
                                                           absl::StatusCode::kDeadlineExceeded,
                                                           absl::StatusCode::kResourceExhausted));
        continue;
      }
      ASSERT_NO_FATAL_FAILURE(ExpectAlike(requests[i], answer));
    }
  }

  const int64_t seed_ = FromEnvironment("AWQD_TEST_COMPOSITION_SEED", 42);
  std::mt19937_64 random_{static_cast<uint64_t>(seed_)};
  int64_t rounds_ = 0, answers_ = 0, merged_ = 0;
  std::atomic<int64_t> on_device_{0};  // answers
  uint64_t weights_made_ = 0;
  std::vector<std::unique_ptr<Device>> devices_;
  Mutex copy_mu_;
  std::unique_ptr<Stream> copies_ ABSL_GUARDED_BY(copy_mu_);
  std::unique_ptr<Engine> alone_, together_;
  std::vector<std::shared_ptr<const model::PlacedWeight>> weights_;
  std::shared_ptr<const model::WeightStack> gate_, up_, down_, dense_gate_, dense_up_, dense_down_;
  std::string weight_text_;
  DType theme_x_ = DType::kFp16, theme_out_ = DType::kFp16;
  ActivationFunction theme_activation_ = ActivationFunction::kNone;
  ActivationQuantization theme_quantization_ = ActivationQuantization::kNone;
  Rounding theme_codes_;  // of experts: E4M3 activations
  std::optional<Path> theme_path_;
  int64_t theme_top_k_ = 1;
  bool theme_summed_ = false, theme_shared_ = false;
  std::optional<ActivationFunction> theme_gate_;
  float theme_limit_ = 2;
};

TEST_P(CompositionTest, EveryAnswerIsWhatItIsAlone) {
  const auto until =
      std::chrono::steady_clock::now() +
      std::chrono::seconds(FromEnvironment("AWQD_TEST_COMPOSITION_SECONDS", 20)) / kCases;
  do {
    ASSERT_NO_FATAL_FAILURE(RunRound());
    ++rounds_;
  } while (std::chrono::steady_clock::now() < until);
  RecordProperty("answers", static_cast<int>(answers_));
  RecordProperty("merged", static_cast<int>(merged_));
  std::printf("%ld rounds, %ld answers, %ld of batches with others, %ld in memory of devices\n",
              rounds_, answers_, merged_, on_device_.load());
  EXPECT_GT(merged_, answers_ / 5) << "too few works merge for this to say anything";
  EXPECT_EQ(on_device_ > 0, !GetParam().shared_memory);
}

INSTANTIATE_TEST_SUITE_P(Memory, CompositionTest,
                         ::testing::Values(Setup{true, false}, Setup{true, true},
                                           Setup{false, false}, Setup{false, true},
                                           Setup{true, true, true}, Setup{false, true, true}),
                         [](const auto& info) {
                           return absl::StrCat(info.param.shared_memory ? "shared" : "copied",
                                               info.param.batch_invariant ? "_invariant" : "",
                                               info.param.spread ? "_spread" : "");
                         });

}  // namespace
}  // namespace awqd::engine
