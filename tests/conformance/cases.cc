// Shapes, and a product in guarded memory.
#include "tests/conformance/cases.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"

namespace awqd::testing {

std::vector<Shape> Shapes() {
  std::vector<Shape> out = {{32, 8, "w4g16z", 4097},
                            {32, 64, "w4cs", 4097},
                            {64, 72, "w4cz", 4097},
                            {96, 128, "w4g32z", 4097},
                            {128, 192, "w4cz", 4097},
                            {128, 64, "w4g16z+bf16", 1024},
                            {70, 64, "w4g7z", 257},
                            {130, 72, "w4g10s", 257},
                            {264, 128, "w4g24z", 257},
                            {1, 8, "w4cz", 65},
                            {96, 64, "w3cz", 65},
                            {64, 64, "w2g32s", 65},
                            {64, 64, "w8g32z", 65},
                            {4096, 192, "w4g128z", 129},
                            {512, 4096, "w4g64z", 33},
                            {10944, 72, "w4g32z", 17},
                            {2048, 136, "w4cz", 33},
                            {256, 72, "w4g128z+fp32", 33},
                            {1024, 136, "w4g128z", 257},
                            {256, 128, "w4g32z", 257},
                            {200, 71, "w4g64z", 65},
                            {300, 1, "w4g128s", 33},
                            {384, 200, "w8cs", 257},
                            {384, 72, "w8cs+fp32", 65},
                            {256, 136, "w8g64s+bf16", 65},
                            {200, 67, "w8g128z", 33},
                            {256, 72, "w4cs+fp32", 33},
                            {512, 72, "w3g64z+bf16", 33},
                            {256, 136, "w2g16z", 65},
                            {384, 64, "w1g128s", 33},
                            {320, 64, "w1cz", 33},
                            {96, 40, "w5g32z", 17},
                            {96, 33, "w6g48s", 17},
                            {96, 40, "w7cz+bf16", 17},
                            {128, 48, "w4g32m3", 33},
                            {256, 24, "w5g128z", 33},
                            {96, 40, "w6g32s", 33},
                            {128, 40, "w7g64z", 33},
                            {128, 48, "w4g32z*c", 33},
                            {128, 40, "w8cs+1*c", 33},
                            {128, 24, "w4g32r", 17},
                            {128, 24, "w4g32r:fp32+bf16", 17},
                            {128, 24, "w4g32o+fp32", 17},
                            {128, 24, "w4g64z+int8*c", 17},
                            {600, 41, "w4g128z+int8*c", 65},
                            {640, 40, "w4g128z+bf16", 65},
                            {128, 24, "e2m1g16+e4m3*t", 17},
                            {128, 24, "e2m1g32+e8m0", 17},
                            {160, 72, "e4m3b128x32+fp32", 17},
                            {128, 24, "e4m3t+fp32", 17},
                            {128, 24, "t4g64+fp32", 17},
                            {192, 24, "e2m1g16+e4m3", 17},
                            {128, 24, "t4g32", 17},
                            {256, 24, "t4g32+fp32", 17},
                            {256, 24, "w2g16o:fp32+fp32", 17},
                            {256, 24, "w3g16s+fp32", 17},
                            {512, 24, "w2g256m1", 17},
                            {256, 24, "w1g128r+fp32", 17},
                            {256, 72, "w8cz+bf16", 33},
                            {400, 27, "w4g96s+fp32*t", 33},
                            {520, 40, "w3g72z", 65},
                            {1100, 19, "w2g48s+bf16", 33},
                            {768, 24, "w1g24z", 33},
                            {600, 13, "w3cs+fp32*c", 33},
                            {600, 27, "w8g200z+fp32", 65},
                            {4200, 24, "w8cz", 33},
                            {640, 40, "w8g128r", 17},
                            {640, 40, "w8co:bf16+fp32*c", 17},
                            {640, 40, "w2g64o", 17},
                            {640, 136, "w4g64r+bf16", 129},
                            {352, 72, "w4g32o+fp32", 65},
                            {520, 71, "w4g96r:fp32*c", 33},
                            {384, 72, "w3g64r", 65},
                            {384, 40, "w1g128o", 33},
                            {384, 136, "w8g64o:fp32+fp32", 65},
                            {1100, 40, "w4co:bf16+fp32", 65},
                            {300, 40, "e4m3g64+bf16*t", 33},
                            {4200, 24, "e4m3c+fp32", 33},
                            {640, 200, "e4m3c+fp32", 257},
                            {160, 72, "e4m3b0x32+fp32", 33},
                            {128, 40, "w4b64x16r", 33},
                            {384, 456, "e2m1g16+e4m3*t", 257},
                            {4096, 136, "t4g64+fp32", 33},
                            {512, 136, "e2m1g32+e8m0", 129},
                            {640, 72, "t4g64+fp32", 129},
                            {384, 136, "e4m3b128x128+fp32", 257},
                            {640, 200, "w6g16s+fp32", 257},
                            {640, 200, "w5g32o:fp32+fp32", 257},
                            {512, 136, "w6g128z", 129},
                            {384, 136, "w7g64r:bf16+bf16", 65},
                            {384, 136, "w8b128x128s+fp32", 129},
                            {96, 40, "e4m3g32r+1", 17},
                            {96, 40, "e2m1c+fp32*c", 17},
                            {96, 40, "t4g32o+bf16", 17},
                            {96, 40, "w4cm200", 17},
                            {48, 40, "w4b1x16o", 33},
                            {60, 24, "w8b4x0z+e8m0", 33},
                            {130, 24, "w8g64s+e8m0", 17},
                            {130, 24, "w4b32x16z+e4m3*c", 17},
                            {200, 71, "w4g64z+1", 65},
                            {384, 136, "w8c+1", 65},
                            {4096, 72, "w4cm7+1", 33},
                            {1100, 457, "w4g128z+1", 257},
                            {384, 457, "w8cs+1", 257},
                            {300, 40, "w8g128z+1", 33},
                            {600, 67, "w3g16z+1", 17},
                            {520, 40, "w2cs+1", 17},
                            {256, 24, "w1g32z+1", 17},
                            {96, 40, "w5g32z+1", 17},
                            {512, 40, "iq2_xxs", 129},
                            {256, 37, "iq2_xs*c", 33},
                            {768, 24, "iq2_s", 33},
                            {512, 136, "iq3_xxs*t", 65},
                            {2048, 72, "iq3_s", 129},
                            {256, 3, "iq1_s", 17},
                            {1280, 40, "iq1_m", 33},
                            {4352, 136, "iq2_xs", 65},
                            {10240, 40, "iq1_s*c", 20},
                            {16, 128, "trellis1", 17},
                            {144, 128, "trellis2mcg*t", 17},
                            {256, 384, "trellis3*c", 129},
                            {272, 128, "trellis4mcg", 33},
                            {128, 256, "trellis5mul1*c", 17},
                            {48, 128, "trellis6", 17},
                            {128, 128, "trellis7mcg", 17},
                            {80, 256, "trellis8mul1", 33},
                            {96, 40, "w6cs+1", 17},
                            {100, 40, "w7g10z+1", 17},
                            {96, 40, "w7g32z+1", 17},
                            {60, 24, "w4b12x0z+1", 17}};
  if (FullRun()) {
    for (const Shape& more : std::initializer_list<Shape>{{4096, 4096, "w4g128z", 257},
                                                          {14336, 4096, "w4g128z", 65},
                                                          {4096, 28672, "w4g128z", 17},
                                                          {29568, 192, "w4g64s", 257},
                                                          {10944, 4096, "w4g16z+bf16", 33},
                                                          {4096, 4096, "w8cs", 257},
                                                          {14336, 4096, "w8g128s", 65}}) {
      out.push_back(more);
    }
  }
  return out;
}

std::vector<Shape> Float8Shapes() {
  return {{256, 72, "e4m3c+fp32", 33},
          {384, 136, "e4m3b128x128+fp32", 130},
          {1024, 264, "e4m3b128x128+bf16", 300},
          {4096, 72, "e4m3t+fp32", 130},
          {200, 43, "e4m3c+bf16", 64},
          {200, 139, "e4m3b128x128+e8m0", 64},
          {384, 72, "e4m3c", 64},
          {384, 43, "e4m3g128+fp32*t", 64},
          {300, 71, "w4g64z", 33},
          {128, 40, "e2m1g32+e8m0", 33},
          {416, 200, "e2m1g32+e8m0", 300},
          {520, 40, "w4g128z", 130},
          {1024, 136, "w4g128s", 64},
          {512, 72, "w4cs+bf16", 33}};
}

std::vector<int64_t> TokenCounts(int64_t max_m) {
  std::vector<int64_t> out;
  for (int64_t m : {0,  1,  2,  3,  4,  5,   6,   7,   8,   9,   15,  16,  17,   31,
                    32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 1024, 4097}) {
    if (m <= max_m) out.push_back(m);
  }
  return out;
}

HostWeight MakeWeight(const Shape& shape, Scales scales, bool bias, uint64_t seed) {
  WeightSpec spec;
  spec.k = shape.k;
  spec.n = shape.n;
  spec.scheme = ParseScheme(shape.scheme).value();
  spec.scales = scales;
  spec.bias = bias;
  spec.seed = seed;
  return RandomWeight(spec);
}

// Name of a test: letters, digits and underscores.
std::string Plain(std::string text) {
  for (char& c : text) {
    if (!absl::ascii_isalnum(c)) c = '_';
  }
  return text;
}

std::string ParamName(const ::testing::TestParamInfo<Param>& info) {
  const auto& [row, shape] = info.param;
  return Plain(absl::StrCat(TestName(*row), "_k", shape.k, "_n", shape.n, "_", shape.scheme));
}

std::vector<const KernelRow*> RowsOf(Op op) {
  std::vector<const KernelRow*> out;
  for (const KernelRow* row : AllKernels()) {
    if (row->op == op) out.push_back(row);
  }
  return out;
}

std::vector<const KernelRow*> BatchInvariantRows() {
  std::vector<const KernelRow*> out;
  for (const KernelRow* row : RowsOf(Op::kMatmul)) {
    if (row->batch_invariant) out.push_back(row);
  }
  return out;
}

bool Serves(const KernelRow& row, int64_t m) {
  m = std::max<int64_t>(m, 1);
  return m >= row.min_m && (row.max_m < 0 || m <= row.max_m);
}

Product Bench::Run(const std::vector<uint8_t>& x, DType in, DType out, int64_t m, int repeats,
                   ActivationFunction activation, const Quantized& quantized) {
  Device& device = TestDevice();
  const WeightShape& shape = weight_->shape;
  auto guarded_x = GuardedBuffer::Create(device, m * shape.k * SizeOf(in)).value();
  auto y = GuardedBuffer::Create(device, m * shape.n * SizeOf(out)).value();
  auto scales = GuardedBuffer::Create(device, quantized.scales.size() * sizeof(float)).value();
  const auto* const first = reinterpret_cast<const uint8_t*>(quantized.scales.data());
  EXPECT_THAT(scales.Fill({first, first + scales.size()}), IsOk());
  EXPECT_THAT(guarded_x.Fill({x.begin(), x.begin() + guarded_x.size()}), IsOk());
  auto stream = device.CreateStream().value();
  MatmulArgs args = {.weight = weight_.get(),
                     .x = {guarded_x.data(), in, m, shape.k},
                     .y = {y.data(), out, m, shape.n},
                     .bias = weight_->bias(),
                     .activation = activation,
                     .quantization = quantized.how};
  if (!quantized.scales.empty()) args.scales = static_cast<const float*>(scales.data());
  auto workspace = GuardedBuffer::CreateScratch(
                       device, WorkspaceBytes(*weight_, row_.path, std::max<int64_t>(m, 1),
                                              activation, ProductOf(args)))
                       .value();
  args.workspace = workspace.data();
  Product product;
  for (int i = 0; i < repeats; ++i) {
    EXPECT_THAT(y.Poison(), IsOk());
    EXPECT_THAT(workspace.Poison(), IsOk());
    EXPECT_THAT(QuantizedMatmul(args, row_.path, stream->view(), &product.ran), IsOk());
    EXPECT_THAT(stream->Synchronize(), IsOk());
    std::vector<uint8_t> got = y.Read().value();
    if (i > 0) {
      EXPECT_EQ(FirstDifference(got, product.y), -1) << "repeat " << i;
    }
    product.y = std::move(got);
  }
  for (const GuardedBuffer* buffer : {&guarded_x, &scales, &y, &workspace}) {
    EXPECT_THAT(buffer->CheckBands(), IsOk());
  }
  return product;
}

std::string Conformance::Prepare(const HostWeight& weight) {
  std::string why = WhyNot(row(), ShapeOf(weight), TestDevice().info());
  if (!why.empty()) return absl::StrCat(row().name, ": ", why);
  auto prepared = PrepareFor(row(), weight, TestDevice());
  EXPECT_THAT(prepared.status(), IsOk());
  if (prepared.ok()) prepared_ = *prepared;
  return prepared.ok() ? "" : "not prepared";
}

}  // namespace awqd::testing
