// The conformance tests reach every claim of a row: for each claim there is a shape that the row
// serves on a device made for it. Needs no such device.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "tests/conformance/cases.h"

namespace awqd::testing {
namespace {

// A device on which only the weight can exclude the row.
DeviceInfo DeviceFor(const KernelRow& row) {
  DeviceInfo out;
  out.kind = row.device;
  out.id = "test";
  out.isa = CpuIsa::kAmx;
  out.arch = row.max_arch != 0 ? row.max_arch : row.min_arch;
  out.sm_count = 132;
  out.l2_bytes = int64_t{50} << 20;
  out.shared_bytes_per_block = 232448;
  return out;
}

struct Claimed {
  std::string what;
  bool (*holds)(const WeightShape& shape, int value);
  int value;
};

std::vector<Claimed> ClaimsOf(const KernelRow& row) {
  std::vector<Claimed> out;
  const Claims& claims = row.claims;
  for (int bits = 1; bits <= 8; ++bits) {
    if ((claims.bits >> bits & 1) == 0) continue;
    out.push_back({absl::StrCat(bits, "-bit codes"),
                   [](const WeightShape& s, int value) {
                     return s.scheme.is_integer() && s.scheme.bits == value;
                   },
                   bits});
  }
  for (CodeKind code : {CodeKind::kUnsigned, CodeKind::kE2m1, CodeKind::kE4m3, CodeKind::kTable,
                        CodeKind::kVector, CodeKind::kTrellis}) {
    if ((claims.codes & MaskOf(code)) == 0) continue;
    out.push_back(
        {absl::StrCat("codes of kind ", static_cast<int>(code)),
         [](const WeightShape& s, int value) { return static_cast<int>(s.scheme.code) == value; },
         static_cast<int>(code)});
  }
  for (ZeroKind zero :
       {ZeroKind::kConstant, ZeroKind::kStored, ZeroKind::kRealBefore, ZeroKind::kRealAfter}) {
    if ((claims.zeros & MaskOf(zero)) == 0) continue;
    out.push_back({absl::StrCat("zeros of kind ", static_cast<int>(zero)),
                   [](const WeightShape& s, int value) {
                     return static_cast<int>(s.scheme.zero_kind) == value;
                   },
                   static_cast<int>(zero)});
  }
  for (DType scale :
       {DType::kFp16, DType::kBf16, DType::kFp32, DType::kInt8, DType::kE4m3, DType::kE8m0}) {
    if ((claims.scales & MaskOf(scale)) == 0) continue;
    out.push_back({absl::StrCat(Name(scale), " scales"),
                   [](const WeightShape& s, int value) {
                     return s.scheme.scale_dtype == static_cast<DType>(value);
                   },
                   static_cast<int>(scale)});
  }
  if (claims.column_blocks) {
    out.push_back({"blocks of several columns",
                   [](const WeightShape& s, int) { return s.scheme.block_cols > 1; }, 0});
  }
  for (int64_t group : {claims.group_multiple, int64_t{0}}) {
    out.push_back({absl::StrCat("groups of ", group),
                   [](const WeightShape& s, int value) {
                     return value == 0 ? s.groups() == 1
                                       : s.groups() > 1 && s.group_rows() % value == 0;
                   },
                   static_cast<int>(group)});
  }
  // Shapes that every row must serve, but for codes that are whole blocks.
  if (claims.codes != MaskOf(CodeKind::kTrellis)) {
    out.push_back({"a ragged N", [](const WeightShape& s, int) { return s.n % 8 != 0; }, 0});
  }
  if ((claims.codes & kElementCodes.codes) != 0) {
    out.push_back({"a short last group",
                   [](const WeightShape& s, int) { return s.k % s.group_rows() != 0; }, 0});
  }
  if (row.op != Op::kIntegerMatmul) {
    out.push_back({"an outer scale",
                   [](const WeightShape& s, int) { return s.scheme.outer != OuterKind::kNone; },
                   0});
  }
  return out;
}

std::vector<const KernelRow*> AllRows() { return {AllKernels().begin(), AllKernels().end()}; }

class Claiming : public ::testing::TestWithParam<const KernelRow*> {};

TEST_P(Claiming, EveryClaimIsReached) {
  const KernelRow& row = *GetParam();
  const DeviceInfo device = DeviceFor(row);
  std::vector<WeightShape> served;
  const bool float8 = row.op == Op::kFloat8Activations || row.op == Op::kGroupedFloat8;
  for (const Shape& shape : float8 ? Float8Shapes() : Shapes()) {
    const WeightShape facts = ShapeOf(MakeWeight(shape, Scales::kOrdinary, false, 7));
    if (WhyNot(row, facts, device).empty()) served.push_back(facts);
  }
  std::vector<std::string> missing;
  for (const Claimed& claim : ClaimsOf(row)) {
    const bool reached = std::any_of(served.begin(), served.end(), [&](const WeightShape& shape) {
      return claim.holds(shape, claim.value);
    });
    if (!reached) missing.push_back(claim.what);
  }
  EXPECT_TRUE(missing.empty()) << row.name << " claims what no shape of conformance reaches: "
                               << absl::StrJoin(missing, ", ");
}

INSTANTIATE_TEST_SUITE_P(Rows, Claiming, ::testing::ValuesIn(AllRows()),
                         [](const ::testing::TestParamInfo<const KernelRow*>& info) {
                           return TestName(*info.param);
                         });

}  // namespace
}  // namespace awqd::testing
