// Every row of grouped products against the definition in double, expert by expert, on the device
// that AWQD_TEST_DEVICE names: counts of experts, rows of each, types, biases, activation
// functions, activations that are rounded to E4M3.
#include <cstring>
#include <functional>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/base/math.h"
#include "kernels/cpu/reference.h"
#include "kernels/exact.h"
#include "kernels/plan/plan.h"
#include "kernels/steps.h"
#include "tests/conformance/cases.h"
#include "tests/conformance/float8_oracle.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"

namespace awqd::testing {
namespace {

// How rows are distributed over the experts.
enum class Deal { kEven, kRagged, kAllToOne, kNoneToMost };

std::vector<int64_t> Ends(Deal deal, int64_t experts, int64_t rows, std::mt19937_64* random) {
  std::vector<int64_t> counts(experts);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t e = row % experts;
    if (deal == Deal::kRagged) e = static_cast<int64_t>((*random)() % experts);
    if (deal == Deal::kAllToOne) e = experts / 2;
    if (deal == Deal::kNoneToMost) e = row % 2 == 0 ? 0 : experts - 1;
    ++counts[e];
  }
  for (int64_t e = 1; e < experts; ++e) counts[e] += counts[e - 1];
  return counts;
}

class GroupedTest : public ::testing::TestWithParam<std::tuple<const KernelRow*, const char*>> {
 protected:
  static constexpr int64_t kN = 200;

  const KernelRow& row() const { return *std::get<0>(GetParam()); }

  void SetUp() override {
    WeightShape shape = {400, kN, ParseScheme(std::get<1>(GetParam())).value()};
    if (shape.scheme.code == CodeKind::kVector) shape.k = 2 * kVectorBlock;
    k_ = shape.k;
    const std::string why = WhyNot(row(), shape, TestDevice().info());
    if (!why.empty()) GTEST_SKIP() << why;
  }
  // Whether the row serves experts with these rows.
  bool Takes(absl::Span<const int64_t> ends) const {
    const GroupedArgs args = {.ends = ends};
    return Serves(row(), CeilDiv(args.rows(), args.active()));
  }

  // Experts of a few weights in turns, because many experts need not be many weights.
  void MakeExperts(int64_t count) {
    const auto scheme = ParseScheme(std::get<1>(GetParam())).value();
    weights_.clear();
    experts_.clear();
    for (uint64_t seed = 0; seed < 3; ++seed) {
      hosts_[seed] =
          RandomWeight({.k = k_, .n = kN, .scheme = scheme, .bias = true, .seed = 60 + seed});
      weights_.push_back(PrepareWeight(hosts_[seed], TestDevice(), OnlyRow(row())).value());
    }
    for (int64_t e = 0; e < count; ++e) experts_.push_back(weights_[e % 3].get());
  }

  GuardedBuffer Filled(const std::vector<uint8_t>& bytes) {
    auto out = GuardedBuffer::Create(TestDevice(), static_cast<int64_t>(bytes.size())).value();
    EXPECT_TRUE(out.Fill(bytes).ok());
    return out;
  }

  std::vector<uint8_t> Run(const std::vector<uint8_t>& x, DType in, DType out,
                           absl::Span<const int64_t> ends, ActivationFunction activation,
                           const float* bias = nullptr, const Quantized& quantized = {},
                           const std::function<void(GroupedArgs*)>& change = nullptr) {
    const int64_t rows = ends.back();
    const auto stacks = static_cast<int64_t>(experts_.size() / ends.size());
    const GuardedBuffer tokens = Filled(x);
    const GuardedBuffer y =
        GuardedBuffer::Create(TestDevice(), stacks * rows * kN * SizeOf(out)).value();
    GroupedArgs args = {.experts = experts_,
                        .ends = ends,
                        .x = {tokens.data(), in, rows, k_},
                        .y = {y.data(), out, stacks * rows, kN},
                        .bias = bias,
                        .activation = activation};
    std::optional<GuardedBuffer> scales;
    args.quantization = quantized.how;
    if (!quantized.scales.empty()) {
      const auto* const bytes = reinterpret_cast<const uint8_t*>(quantized.scales.data());
      scales.emplace(Filled({bytes, bytes + quantized.scales.size() * sizeof(float)}));
      args.scales = static_cast<const float*>(scales->data());
    }
    if (change != nullptr) change(&args);
    EXPECT_EQ(GroupedRow(args), &row());
    const std::string table = row().grouped_table(args);
    const GuardedBuffer there = Filled({table.begin(), table.end()});
    const GuardedBuffer workspace =
        GuardedBuffer::CreateScratch(TestDevice(), GroupedWorkspaceBytes(args, row())).value();
    args.table = there.data();
    args.workspace = workspace.data();
    EXPECT_THAT(GroupedMatmul(args, row(), stream_->view()), IsOk());
    EXPECT_THAT(stream_->Synchronize(), IsOk());
    EXPECT_THAT(y.CheckBands(), IsOk());
    EXPECT_THAT(workspace.CheckBands(), IsOk());
    return y.Read().value();
  }

  std::vector<double> Want(const std::vector<uint8_t>& x, DType in, absl::Span<const int64_t> ends,
                           ActivationFunction activation) const {
    std::vector<double> out;
    int64_t begin = 0;
    for (size_t e = 0; e < ends.size(); begin = ends[e++]) {
      if (ends[e] == begin) continue;
      const HostWeight& weight = hosts_[e % 3];
      const auto y = ReferenceProduct(
          weight, {.x = {x.data() + begin * k_ * SizeOf(in), in, ends[e] - begin, k_},
                   .bias = weight.bias.data(),
                   .activation = activation});
      out.insert(out.end(), y.begin(), y.end());
    }
    return out;
  }

  static std::vector<double> Doubles(const std::vector<uint8_t>& y) {
    std::vector<double> out;
    for (size_t i = 0; i < y.size() / 4; ++i) {
      out.push_back(GetElement(y, DType::kFp32, static_cast<int64_t>(i)));
    }
    return out;
  }

  int64_t k_ = 0;
  HostWeight hosts_[3];
  std::vector<std::shared_ptr<const DeviceWeight>> weights_;
  std::vector<const DeviceWeight*> experts_;
  std::unique_ptr<Stream> stream_ = TestDevice().CreateStream().value();
  std::mt19937_64 random_{9};
};

TEST_P(GroupedTest, MatchesTheDefinition) {
  for (int64_t experts : {1, 2, 8, 64, 256}) {
    MakeExperts(experts);
    for (const auto& [deal, rows] : {std::pair{Deal::kEven, int64_t{1}},
                                     {Deal::kEven, 3 * experts},
                                     {Deal::kRagged, 5 * experts + 3},
                                     {Deal::kRagged, int64_t{300}},
                                     {Deal::kEven, 20 * experts},
                                     {Deal::kRagged, int64_t{900}},
                                     {Deal::kAllToOne, int64_t{37}},
                                     {Deal::kNoneToMost, int64_t{61}}}) {
      const std::vector<int64_t> ends = Ends(deal, experts, rows, &random_);
      if (!Takes(ends)) continue;
      SCOPED_TRACE(
          absl::StrCat(experts, " experts, ", rows, " rows, deal ", static_cast<int>(deal)));
      for (DType in : {DType::kFp16, DType::kBf16, DType::kFp32}) {
        const auto x = RandomMatrix(rows, k_, in, rows);
        const DType out = in == DType::kBf16 ? DType::kBf16 : DType::kFp32;
        const auto activation =
            in == DType::kFp16 ? ActivationFunction::kNone : ActivationFunction::kSilu;
        const auto y = Run(x, in, out, ends, activation);
        EXPECT_LE(FrobeniusError(y, out, Want(x, in, ends, activation)), ProductTolerance(out, in));
        EXPECT_EQ(FirstDifference(Run(x, in, out, ends, activation), y), -1) << "run again";
      }
    }
  }
}

// With vector codes 16 tokens of so many elements do not fit shared memory.
TEST_P(GroupedTest, LongTokensAreReadInParts) {
  if (ParseScheme(std::get<1>(GetParam())).value().code != CodeKind::kVector) {
    GTEST_SKIP() << "no vector codes";
  }
  k_ = 33 * kVectorBlock;
  MakeExperts(2);
  const std::vector<int64_t> ends = {3, 19};
  for (DType in : {DType::kFp16, DType::kBf16}) {
    const auto x = RandomMatrix(ends.back(), k_, in, 7);
    const auto y = Run(x, in, DType::kFp32, ends, ActivationFunction::kNone);
    EXPECT_LE(FrobeniusError(y, DType::kFp32, Want(x, in, ends, ActivationFunction::kNone)),
              ProductTolerance(DType::kFp32, in));
  }
}

// Gate and up of an MLP multiply the same rows, with the weights' biases or with those of the call.
TEST_P(GroupedTest, ResultsOfASecondStackFollow) {
  std::vector<uint8_t> bytes(6 * kN * 4);
  for (int64_t i = 0; i < 6 * kN; ++i) SetElement(&bytes, DType::kFp32, i, 0.25f * (i % 11));
  const GuardedBuffer biases = Filled(bytes);
  for (const float* bias :
       {static_cast<const float*>(nullptr), static_cast<const float*>(biases.data())}) {
    MakeExperts(3);
    const int64_t each = std::max<int64_t>(2, row().min_m);
    const std::vector<int64_t> ends = {each, each, 2 * each + 1};
    const auto x = RandomMatrix(ends.back(), k_, DType::kFp16, 6);
    const auto run = [&](const float* of_call) {
      return Run(x, DType::kFp16, DType::kFp32, ends, ActivationFunction::kNone, of_call);
    };
    const auto first = run(bias);
    std::vector<const DeviceWeight*> turned = {experts_[2], experts_[0], experts_[1]};
    experts_.swap(turned);
    const auto second = run(bias == nullptr ? nullptr : bias + 3 * kN);
    experts_.insert(experts_.begin(), turned.begin(), turned.end());
    auto both = run(bias);
    ASSERT_EQ(both.size(), first.size() + second.size());
    const std::vector<uint8_t> tail = {both.begin() + first.size(), both.end()};
    both.resize(first.size());
    const std::vector<double> of_first = Doubles(first), of_second = Doubles(second);
    EXPECT_LE(FrobeniusError(both, DType::kFp32, of_first), 1e-6);
    EXPECT_LE(FrobeniusError(tail, DType::kFp32, of_second), 1e-6);
  }
}

// Rows of the experts whose ends the device alone reads, and rows of none behind them.
TEST_P(GroupedTest, ATableOfTheDevice) {
  constexpr int64_t kExperts = 9, kSpare = 7;  // a multiple of 3: stacks have the same experts
  MakeExperts(2 * kExperts);
  std::vector<uint8_t> parts(experts_.size() * sizeof(ExpertParts));
  for (size_t e = 0; e < experts_.size(); ++e) {
    const ExpertParts own = {experts_[e]->codes(), experts_[e]->outer(), experts_[e]->bias()};
    std::memcpy(parts.data() + e * sizeof(own), &own, sizeof(own));
  }
  const GuardedBuffer parts_there = Filled(parts);
  const auto* const of_experts = static_cast<const ExpertParts*>(parts_there.data());
  const int64_t rows = std::max<int64_t>(5, row().min_m) * kExperts, all = rows + kSpare;
  const auto x = RandomMatrix(all, k_, DType::kFp16, 8);
  const GuardedBuffer tokens = Filled(x);
  for (const Deal deal : {Deal::kEven, Deal::kRagged, Deal::kAllToOne, Deal::kNoneToMost}) {
    for (const int64_t stacks : {1, 2}) {
      SCOPED_TRACE(absl::StrCat(stacks, " stacks, deal ", static_cast<int>(deal)));
      const std::vector<int64_t> ends = Ends(deal, kExperts, rows, &random_);
      std::vector<uint8_t> ends_bytes(kExperts * 4);
      for (int64_t e = 0; e < kExperts; ++e) {
        const auto end = static_cast<int32_t>(ends[e]);
        std::memcpy(ends_bytes.data() + 4 * e, &end, 4);
      }
      const GuardedBuffer ends_there = Filled(ends_bytes);
      const GuardedBuffer y = GuardedBuffer::Create(TestDevice(), stacks * all * kN * 4).value();
      GroupedArgs args = {.experts = absl::MakeConstSpan(experts_).first(stacks),
                          .x = {tokens.data(), DType::kFp16, all, k_},
                          .y = {y.data(), DType::kFp32, stacks * all, kN},
                          .device_experts = kExperts};
      ASSERT_EQ(GroupedRow(args), &row());
      const GuardedBuffer table =
          GuardedBuffer::Create(TestDevice(), GroupedTableBytes(args)).value();
      const GuardedBuffer workspace =
          GuardedBuffer::CreateScratch(TestDevice(), GroupedWorkspaceBytes(args, row())).value();
      ASSERT_THAT(MakeGroupedTable({.product = &args,
                                    .tile = row().grouped_tile(args),
                                    .ends = static_cast<const int32_t*>(ends_there.data()),
                                    .parts = {of_experts, of_experts + kExperts},
                                    .table = table.data()},
                                   TestDevice(), stream_->view()),
                  IsOk());
      ASSERT_THAT(stream_->Synchronize(), IsOk());  // products read tables early
      args.table = table.data();
      args.workspace = workspace.data();
      ASSERT_THAT(GroupedMatmul(args, row(), stream_->view()), IsOk());
      ASSERT_THAT(stream_->Synchronize(), IsOk());
      for (const GuardedBuffer* buffer : {&y, &table, &workspace}) {
        EXPECT_THAT(buffer->CheckBands(), IsOk());
      }
      const std::vector<uint8_t> got = y.Read().value();
      const auto want = Want(x, DType::kFp16, ends, ActivationFunction::kNone);
      for (int64_t stack = 0; stack < stacks; ++stack) {
        const auto begin = got.begin() + stack * all * kN * 4, end = begin + rows * kN * 4;
        EXPECT_LE(FrobeniusError({begin, end}, DType::kFp32, want),
                  ProductTolerance(DType::kFp32, DType::kFp16));
        const std::vector<uint8_t> spare(end, end + kSpare * kN * 4);
        EXPECT_EQ(spare, std::vector<uint8_t>(spare.size(), GuardedBuffer::kPoison));
      }
    }
  }
}

// Whatever the other rows and the tile are.
TEST_P(GroupedTest, ARowHasTheSameBitsAmongAnyOthers) {
  if (!row().batch_invariant) GTEST_SKIP() << "the row does not say so";
  MakeExperts(3);
  const int64_t each = row().max_m < 0 ? 50 : std::min<int64_t>(50, row().max_m);
  const auto x = RandomMatrix(3 * each, k_, DType::kFp16, 3);
  const auto all =
      Run(x, DType::kFp16, DType::kFp32, {each, 2 * each, 3 * each}, ActivationFunction::kNone);
  for (int64_t rows : {1, 7, 12, 30}) {
    if (rows > each) continue;
    const std::vector<uint8_t> some = {x.begin() + each * k_ * 2,
                                       x.begin() + (each + rows) * k_ * 2};
    const auto y =
        Run(some, DType::kFp16, DType::kFp32, {0, rows, rows}, ActivationFunction::kNone);
    EXPECT_EQ(
        FirstDifference(y, {all.begin() + each * kN * 4, all.begin() + (each + rows) * kN * 4}), -1)
        << rows << " rows";
  }
}

TEST_P(GroupedTest, BiasesOfTheCallReplaceTheWeights) {
  MakeExperts(2);
  std::vector<uint8_t> bytes(2 * kN * 4);
  for (int64_t i = 0; i < 2 * kN; ++i) SetElement(&bytes, DType::kFp32, i, 0.25f * (i % 11));
  const GuardedBuffer biases = Filled(bytes);
  const int64_t each = std::max<int64_t>(5, row().min_m);
  const std::vector<int64_t> ends = {each - 1, 2 * each};
  const auto x = RandomMatrix(2 * each, k_, DType::kFp16, 4);
  const auto y = Run(x, DType::kFp16, DType::kFp32, ends, ActivationFunction::kNone,
                     static_cast<const float*>(biases.data()));
  auto want = Want(x, DType::kFp16, ends, ActivationFunction::kNone);
  for (int64_t m = 0; m < 2 * each; ++m) {
    const int64_t e = m < ends[0] ? 0 : 1;
    for (int64_t n = 0; n < kN; ++n) {
      want[m * kN + n] += 0.25f * ((e * kN + n) % 11) - hosts_[e].bias[n];
    }
  }
  EXPECT_LE(FrobeniusError(y, DType::kFp32, want), ProductTolerance(DType::kFp32, DType::kFp16));
}

// Experts that differ in the kernel's parameters, or have too many rows, run one by one.
TEST_P(GroupedTest, WhatItDoesNotTake) {
  MakeExperts(2);
  const auto args = [&](absl::Span<const int64_t> ends) {
    return GroupedArgs{.experts = experts_,
                       .ends = ends,
                       .x = {nullptr, DType::kFp16, ends.back(), k_},
                       .y = {nullptr, DType::kFp16, ends.back(), kN}};
  };
  const int64_t each = std::max<int64_t>(1, row().min_m);
  const std::vector<int64_t> both = {each, 2 * each}, first = {each, each}, none = {0, 0};
  EXPECT_EQ(GroupedRow(args(both)), &row());
  EXPECT_EQ(GroupedRow(args(none)), nullptr);
  if (row().max_m > 0) {
    const std::vector<int64_t> many = {row().max_m + 1, 2 * row().max_m + 2};
    EXPECT_EQ(GroupedRow(args(many)), nullptr);
  }
  const auto ordered =
      PrepareWeight(RandomWeight({.k = k_, .n = kN, .scheme = hosts_[0].scheme, .order = true}),
                    TestDevice(), OnlyRow(row()));
  ASSERT_TRUE(ordered.ok()) << ordered.status();
  experts_[1] = ordered->get();
  EXPECT_EQ(GroupedRow(args(both)), nullptr);
  EXPECT_EQ(GroupedRow(args(first)), &row()) << "of an expert without rows nothing is asked";
}

// Rows of E4M3 activations, and those of floating ones, which multiply the rounded numbers.
class GroupedFloat8Test : public GroupedTest {};

TEST_P(GroupedFloat8Test, MatchesTheDefinition) {
  using enum ActivationQuantization;
  for (int64_t experts : {1, 8, 64}) {
    MakeExperts(experts);
    for (const auto& [deal, rows] : {std::pair{Deal::kRagged, 5 * experts + 3},
                                     {Deal::kRagged, int64_t{300}},
                                     {Deal::kEven, 20 * experts},
                                     {Deal::kRagged, int64_t{1900}},
                                     {Deal::kAllToOne, int64_t{37}},
                                     {Deal::kNoneToMost, int64_t{461}}}) {
      const std::vector<int64_t> ends = Ends(deal, experts, rows, &random_);
      if (!Takes(ends)) continue;
      for (DType in : {DType::kFp16, DType::kBf16, DType::kFp32}) {
        const auto x = RandomMatrix(rows, k_, in, rows);
        for (ActivationQuantization how : {kFloat8PerToken, kFloat8PerBlock, kFloat8Static}) {
          SCOPED_TRACE(absl::StrCat(experts, " experts, ", rows, " rows, ", Name(in), ", how ",
                                    static_cast<int>(how)));
          Quantized quantized = {.how = how, .scales = {}};
          for (int64_t m = 0; how == kFloat8Static && m < rows; ++m) {
            quantized.scales.push_back(0.005f * (1 + m % 3));
          }
          const auto run = [&] {
            return Run(x, in, DType::kFp32, ends, ActivationFunction::kNone, nullptr, quantized);
          };
          const auto y = run();
          const std::vector<float> rounded = RoundToE4m3(hosts_[0], x, in, rows, quantized);
          std::vector<double> want;
          int64_t begin = 0;
          for (size_t e = 0; e < ends.size(); begin = ends[e++]) {
            if (ends[e] == begin) continue;
            const auto part = ProductOfStaged(
                hosts_[e % 3], {rounded.begin() + begin * k_, rounded.begin() + ends[e] * k_},
                ActivationFunction::kNone);
            want.insert(want.end(), part.begin(), part.end());
          }
          EXPECT_LE(FrobeniusError(y, DType::kFp32, want),
                    Float8Tolerance(row(), DType::kFp32, in));
          EXPECT_EQ(FirstDifference(run(), y), -1) << "run again";
        }
      }
    }
  }
}

// E4M3 of the caller, with a scale for each row or for each block.
TEST_P(GroupedFloat8Test, WhatTheCallerHasRounded) {
  using enum ActivationQuantization;
  MakeExperts(3);
  const int64_t each = std::max<int64_t>(21, row().min_m), rows = 3 * each;
  const std::vector<int64_t> ends = {each - 2, 2 * each + 1, rows};
  const auto codes = RandomMatrix(rows, k_, DType::kE4m3, 11);
  for (ActivationQuantization how : {kFloat8Static, kFloat8PerBlock}) {
    const int64_t step = how == kFloat8PerBlock ? 128 : k_;
    Quantized quantized = {.how = how, .scales = {}};
    std::vector<float> numbers;
    for (int64_t i = 0; i < rows * k_; ++i) {
      if (i % k_ % step == 0) quantized.scales.push_back(0.01f * static_cast<float>(1 + i % 7));
      numbers.push_back(GetElement(codes, DType::kE4m3, i) * quantized.scales.back());
    }
    const auto y =
        Run(codes, DType::kE4m3, DType::kFp32, ends, ActivationFunction::kNone, nullptr, quantized);
    std::vector<double> want;
    for (int64_t e = 0, begin = 0; e < 3; begin = ends[e++]) {
      const auto part =
          ProductOfStaged(hosts_[e], {numbers.begin() + begin * k_, numbers.begin() + ends[e] * k_},
                          ActivationFunction::kNone);
      want.insert(want.end(), part.begin(), part.end());
    }
    EXPECT_LE(FrobeniusError(y, DType::kFp32, want),
              Float8Tolerance(row(), DType::kFp32, DType::kFp32));
  }
}

// The prologue gathers rows as a step of its own would.
TEST_P(GroupedFloat8Test, GathersRows) {
  MakeExperts(3);
  const int64_t each = std::max<int64_t>(21, row().min_m), rows = 3 * each, tokens = 40;
  const std::vector<int64_t> ends = {each - 2, 2 * each + 1, rows};
  const auto x = RandomMatrix(tokens, k_, DType::kFp16, 7);
  std::vector<uint8_t> gathered, indices(rows * 4);
  for (int64_t i = 0; i < rows; ++i) {
    const auto from = static_cast<int32_t>(i * 7 % tokens);
    std::memcpy(&indices[i * 4], &from, 4);
    gathered.insert(gathered.end(), x.begin() + from * k_ * 2, x.begin() + (from + 1) * k_ * 2);
  }
  const GuardedBuffer all = Filled(x), sources = Filled(indices);
  for (ActivationQuantization how :
       {ActivationQuantization::kFloat8PerToken, ActivationQuantization::kFloat8PerBlock}) {
    const auto run = [&](const std::function<void(GroupedArgs*)>& change) {
      return Run(gathered, DType::kFp16, DType::kFp32, ends, ActivationFunction::kNone, nullptr,
                 {.how = how, .scales = {}}, change);
    };
    const auto y = run([&](GroupedArgs* args) {
      args->x = {all.data(), DType::kFp16, tokens, k_};
      args->gather = static_cast<const int32_t*>(sources.data());
    });
    EXPECT_EQ(FirstDifference(y, run(nullptr)), -1);
  }
}

// The prologue computes the middle of a gated MLP from FP32, or from 16 bits times NarrowFactor.
TEST_P(GroupedFloat8Test, ComputesTheMiddleOfAGatedMlp) {
  MakeExperts(3);
  const int64_t each = std::max<int64_t>(21, row().min_m), rows = 3 * each;
  const std::vector<int64_t> ends = {each - 2, 2 * each + 1, rows};
  for (DType in : {DType::kFp32, DType::kFp16, DType::kBf16}) {
    const auto gate = RandomMatrix(rows, k_, in, 8), up = RandomMatrix(rows, k_, in, 9);
    std::vector<uint8_t> middle(rows * k_ * 4);
    for (int64_t i = 0; i < rows * k_; ++i) {
      const float whole = 1 / NarrowFactor(in);
      SetElement(&middle, DType::kFp32, i,
                 GateFloat(ActivationFunction::kSilu, {}, GetElement(gate, in, i) * whole,
                           GetElement(up, in, i) * whole));
    }
    const GuardedBuffer gates = Filled(gate), ups = Filled(up);
    const GateArgs step = {.gate = gates.data(),
                           .up = ups.data(),
                           .count = rows * k_,
                           .activation = ActivationFunction::kSilu,
                           .cols = k_,
                           .dtype = in};
    for (ActivationQuantization how :
         {ActivationQuantization::kFloat8PerToken, ActivationQuantization::kFloat8PerBlock}) {
      const auto run = [&](const std::function<void(GroupedArgs*)>& change) {
        return Run(middle, DType::kFp32, DType::kFp32, ends, ActivationFunction::kNone, nullptr,
                   {.how = how, .scales = {}}, change);
      };
      const auto y = run([&](GroupedArgs* args) {
        args->gate = &step;
        args->sums_factor = 0.25f;
      });
      std::vector<double> want = Doubles(run(nullptr));
      const auto& bias = [&](int64_t m) -> const std::vector<float>& {
        return hosts_[m < ends[0] ? 0 : m < ends[1] ? 1 : 2].bias;
      };
      for (int64_t i = 0; i < rows * kN; ++i) {
        const double b = bias(i / kN)[i % kN];
        want[i] = (want[i] - b) * 0.25 + b;
      }
      // exp differs by a last place from the host's, after which a code may round to the next.
      EXPECT_LE(FrobeniusError(y, DType::kFp32, want), 1e-3) << Name(in);
    }
  }
}

std::string NameOf(const ::testing::TestParamInfo<GroupedTest::ParamType>& info) {
  return absl::StrCat(TestName(*std::get<0>(info.param)), "_", Plain(std::get<1>(info.param)));
}

// The CPU has no such row: its experts run one by one.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GroupedTest);
INSTANTIATE_TEST_SUITE_P(
    Rows, GroupedTest,
    ::testing::Combine(::testing::ValuesIn(RowsOf(Op::kGroupedMatmul)),
                       ::testing::Values("w4g80z", "w4g128z", "w4g16s", "w4g64z", "w4cs+bf16",
                                         "w4cz", "w8cs", "w8g128z", "e2m1g32+e8m0",
                                         "e2m1g16+e4m3*t", "e4m3c+fp32", "e4m3b128x128+fp32",
                                         "w4g32o:fp32+fp32", "w5g32o:fp32+fp32", "w6g16s+fp32",
                                         "iq2_xxs", "iq2_s*t", "iq3_s", "iq1_m")),
    NameOf);

std::vector<const KernelRow*> RowsOfFloat8() {
  std::vector<const KernelRow*> out = RowsOf(Op::kGroupedFloat8);
  for (const KernelRow* row : RowsOf(Op::kGroupedMatmul)) out.push_back(row);
  return out;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GroupedFloat8Test);
INSTANTIATE_TEST_SUITE_P(Rows, GroupedFloat8Test,
                         ::testing::Combine(::testing::ValuesIn(RowsOfFloat8()),
                                            ::testing::Values("w4g128z", "e4m3c+fp32", "e4m3t+fp32",
                                                              "e4m3g128+bf16", "e4m3b128x128+fp32",
                                                              "e2m1g32+e8m0")),
                         NameOf);

}  // namespace
}  // namespace awqd::testing
