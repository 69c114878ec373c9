// compressed-tensors "pack-quantized": every error in a linear is named.
#include <string>
#include <vector>

#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

// 4 bits, N = 8, K = 64 in groups of 16, with zero points of 0 and groups in their order.
Linear MakeLinear() {
  Linear out = {.format = &kPackQuantizedFormat};
  out.Set("num_bits", 4);
  out.Set("group_size", 16);
  out.Set("strategy", Setting::Typed("group"));
  out.Add("weight_packed", "I32", {8, 8});
  out.Add("weight_scale", "F16", {8, 4});
  for (int i = 0; i < 32; ++i) out.Put<uint16_t>("weight_scale", i, 0x3c00);
  out.Add("weight_shape", "I64", {2});
  out.Put<int64_t>("weight_shape", 0, 8);
  out.Put<int64_t>("weight_shape", 1, 64);
  out.Add("weight_zero_point", "I32", {1, 4});
  for (int i = 0; i < 4; ++i) out.Put<uint32_t>("weight_zero_point", i, 0x88888888);
  out.Add("weight_g_idx", "I32", {64});
  for (int i = 0; i < 64; ++i) out.Put<int32_t>("weight_g_idx", i, i / 16);
  return out;
}

std::function<void(Linear*)> Shape(int index, int64_t value) {
  return [=](Linear* l) { l->Put<int64_t>("weight_shape", index, value); };
}

std::function<void(Linear*)> Group(int index, int32_t value) {
  return [=](Linear* l) { l->Put<int32_t>("weight_g_idx", index, value); };
}

std::function<void(Linear*)> Both(std::function<void(Linear*)> one,
                                  std::function<void(Linear*)> other) {
  return [=](Linear* l) {
    one(l);
    other(l);
  };
}

std::vector<Refusal> Tensors() {
  return {
      {"NoCodes", Without("weight_packed"), {"\"weight_packed\": got nothing, expected I32"}},
      {"NoScale", Without("weight_scale"), {"\"weight_scale\": got nothing"}},
      {"NoShape", Without("weight_shape"), {"\"weight_shape\": got nothing, expected I64 [2]"}},
      {"CodesDtype", WithDtype("weight_packed", "F32"), {"\"weight_packed\": got dtype F32"}},
      {"CodesRank", WithShape("weight_packed", {8, 8, 1}), {"got shape [8, 8, 1]"}},
      {"NoRows", WithShape("weight_packed", {0, 8}), {"got shape [0, 8]", "at least 1"}},
      {"CodesShort", Short("weight_packed"), {"\"weight_packed\": got 255 bytes, expected 256"}},
      {"Words", WithShape("weight_packed", {8, 9}), {"got shape [8, 9], expected 8 words a row"}},
      {"Rows", WithShape("weight_packed", {9, 8}), {"\"weight_shape\": got N = 8, expected 9"}},
      {"ScaleDtype", WithDtype("weight_scale", "I32"), {"\"weight_scale\": got dtype I32"}},
      {"ScaleRank", WithShape("weight_scale", {32}), {"\"weight_scale\": got shape [32]"}},
      {"ScaleRows", WithShape("weight_scale", {7, 4}), {"got shape [7, 4], expected [8, 4]"}},
      {"ScaleShort", Short("weight_scale"), {"\"weight_scale\": got 63 bytes, expected 64"}},
      {"ScaleEmpty", WithShape("weight_scale", {8, 0}), {"\"weight_scale\": got shape [8, 0]"}},
      {"ScaleIsNan",
       [](Linear* l) { l->Put<uint16_t>("weight_scale", 3, 0x7e00); },
       {"\"weight_scale\": got NaN at element 3"}},
      {"ZerosDtype", WithDtype("weight_zero_point", "F16"), {"got dtype F16, expected I32 or I8"}},
      {"ZerosRank", WithShape("weight_zero_point", {4}), {"\"weight_zero_point\": got shape [4]"}},
      {"ZerosShort", Short("weight_zero_point"), {"\"weight_zero_point\": got 15 bytes"}},
      {"ZerosRows",
       WithShape("weight_zero_point", {2, 4}),
       {"\"weight_zero_point\": got shape [2, 4], expected 1 rows of words for N = 8"}},
      {"ZerosGroups",
       WithShape("weight_zero_point", {1, 3}),
       {"\"weight_zero_point\": got shape [1, 3], expected [1, 4]"}},
      {"ZerosOfBytesShape",
       [](Linear* l) {
         l->Add("weight_zero_point", "I8", {4, 8});
       },
       {"\"weight_zero_point\": got shape [4, 8], expected [8, 4], as weight_scale"}},
      {"ZeroOutOfRange",
       [](Linear* l) {
         l->Add("weight_zero_point", "I8", {8, 4});
         l->Put<int8_t>("weight_zero_point", 9, 8);
       },
       {"\"weight_zero_point\": got 8 at element 9, expected -8 to 7 for 4 bits"}},
      {"BiasShape", [](Linear* l) { l->Add("bias", "F16", {7}); }, {"\"bias\": got shape [7]"}},
      {"InputScaleMissing",
       With("activations", Setting::Typed("static")),
       {"\"input_scale\": got nothing"}},
  };
}

std::vector<Refusal> Lies() {
  return {
      {"ShapeDtype", WithDtype("weight_shape", "F32"), {"\"weight_shape\": got dtype F32"}},
      {"ShapeCount", WithShape("weight_shape", {1}), {"\"weight_shape\": got shape [1]"}},
      {"ShapeShort", Short("weight_shape"), {"\"weight_shape\": got 15 bytes, expected 16"}},
      {"ShapeOfZero", Shape(1, 0), {"\"weight_shape\": got 0 at element 1, expected numbers from"}},
      {"ShapeNegative", Shape(0, -8), {"\"weight_shape\": got -8 at element 0"}},
      {"ShapeHuge", Shape(1, int64_t{1} << 62), {"\"weight_shape\": got 4611686018427387904"}},
      {"ShapeTurned",
       Both(Shape(0, 64), Shape(1, 8)),
       {"\"weight_shape\": got N = 64, expected 8, the rows of \"weight_packed\""}},
      {"ShapeLarger", Shape(1, 65), {"\"weight_packed\": got shape [8, 8], expected 9 words"}},
      {"ShapeSmaller", Shape(1, 56), {"\"weight_packed\": got shape [8, 8], expected 7 words"}},
      {"ShapeWithinAWord",
       Both(Shape(1, 61), [](Linear* l) { l->Put<uint32_t>("weight_packed", 15, 0x90000000); }),
       {"\"weight_shape\": got K = 61, expected more: row 1 of \"weight_packed\""}},
      {"GroupIndexLength",
       WithShape("weight_g_idx", {63}),
       {"\"weight_g_idx\": got shape [63], expected [64]"}},
      {"GroupIndexDtype", WithDtype("weight_g_idx", "I8"), {"\"weight_g_idx\": got dtype I8"}},
      {"GroupIndexShort", Short("weight_g_idx"), {"\"weight_g_idx\": got 255 bytes"}},
      {"GroupNegative", Group(9, -1), {"\"weight_g_idx\": got -1 at index 9, expected 0 to 3"}},
      {"GroupOutOfRange", Group(9, 4), {"\"weight_g_idx\": got 4 at index 9, expected 0 to 3"}},
      {"UnevenGroups", Group(9, 3), {"\"weight_g_idx\": got 15 in-features of group 0"}},
      {"OrderThatIsNone",
       Both(Group(9, 3), With("actorder", Setting::Typed("weight"))),
       {"got 3 at index 9, expected 0, index / group_size, as actorder is not \"group\""}},
      {"OrderMissing",
       Both(Without("weight_g_idx"), With("actorder", Setting::Typed("group"))),
       {"\"weight_g_idx\": got nothing, expected I32 [K], as actorder is \"group\""}},
      {"ZerosMissing",
       Both(Without("weight_zero_point"), With("symmetric", Setting::Literal(false))),
       {"\"weight_zero_point\": got nothing", "as symmetric is false"}},
      {"ZerosOfSymmetric",
       Both([](Linear* l) { l->Put<uint32_t>("weight_zero_point", 1, 0x88888889); },
            With("symmetric", Setting::Literal(true))),
       {"\"weight_zero_point\": got zero point 1, expected 0, as symmetric is true"}},
  };
}

std::vector<Refusal> Settings() {
  return {
      {"NoBits",
       [](Linear* l) { l->settings.members.erase("num_bits"); },
       {"num_bits: got nothing, expected 1 to 8"}},
      {"NineBits", With("num_bits", 9), {"num_bits: got 9, expected 1 to 8"}},
      {"OtherBits", With("num_bits", 8), {"\"weight_packed\": got shape [8, 8], expected 16"}},
      {"ThreeBits", With("num_bits", 3), {"got shape [8, 8], expected 6 or 7 words a row"}},
      {"NoBitsAtAll", With("num_bits", 0), {"num_bits: got 0"}},
      {"GroupSize", With("group_size", 32), {"\"weight_scale\": got 4 groups, expected 2"}},
      {"GroupAboveK", With("group_size", 65), {"group_size: got 65, expected -1 or 1 to K = 64"}},
      {"GroupOfZero", With("group_size", 0), {"group_size: got 0"}},
      {"GroupWithoutSize",
       [](Linear* l) { l->settings.members.erase("group_size"); },
       {"group_size: got nothing"}},
      {"Channel",
       With("strategy", Setting::Typed("channel")),
       {"\"weight_scale\": got 4 groups, expected 1"}},
      {"Tensor", With("strategy", Setting::Typed("tensor")), {"expected rank 1"}},
      {"Block", With("strategy", Setting::Typed("block")), {"strategy: got \"block\""}},
      {"Actorder", With("actorder", Setting::Typed("some")), {"actorder: got \"some\""}},
      {"Packing", With("packing", Setting::Typed("some")), {"packing: got \"some\""}},
      {"Symmetric", With("symmetric", Setting::Typed("some")), {"symmetric: got \"some\""}},
      {"Activations", With("activations", Setting::Typed("some")), {"activations: got \"some\""}},
  };
}

class PackQuantizedRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(PackQuantizedRefusal, NamesThePart) { ExpectRefused(MakeLinear(), GetParam()); }

const auto kName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Tensors, PackQuantizedRefusal, ::testing::ValuesIn(Tensors()), kName);
INSTANTIATE_TEST_SUITE_P(Lies, PackQuantizedRefusal, ::testing::ValuesIn(Lies()), kName);
INSTANTIATE_TEST_SUITE_P(Settings, PackQuantizedRefusal, ::testing::ValuesIn(Settings()), kName);

// One scale for all has one zero point, of a byte.
TEST(PackQuantizedFormat, WordsOfZeroPointsForATensor) {
  Linear linear = MakeLinear();
  linear.Set("strategy", Setting::Typed("tensor"));
  linear.settings.members.erase("group_size");
  linear.tensors.erase("weight_g_idx");
  linear.Add("weight_scale", "F32", {1});
  linear.Add("weight_zero_point", "I8", {1});
  ExpectRefused(linear, {"words",
                         [](Linear* l) {
                           l->Add("weight_zero_point", "I32", {1, 1});
                         },
                         {"\"weight_zero_point\": got dtype I32, expected I8 for strategy"}});
}

}  // namespace
}  // namespace awqd
