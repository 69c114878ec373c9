// Every row of grouped products against the definition in double, expert by expert, on the device
// that AWQD_TEST_DEVICE names: counts of experts, rows of each, types, biases, activation
// functions.
#include <random>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/base/math.h"
#include "kernels/cpu/reference.h"
#include "kernels/plan/plan.h"
#include "tests/conformance/cases.h"
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
                           const float* bias = nullptr) {
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

}  // namespace
}  // namespace awqd::testing
