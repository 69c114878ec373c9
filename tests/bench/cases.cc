// Prepares, checks and times cases.
#include "tests/bench/cases.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/exact.h"
#include "kernels/kernels.h"
#include "tests/bench/library.h"
#include "tests/testing/test_device.h"

namespace awqd::bench {
namespace {

using ::awqd::testing::GetElement;
using ::awqd::testing::RandomMatrix;

// The in-feature of row k.
int64_t InFeature(const HostWeight& w, int64_t k) { return w.order.empty() ? k : w.order[k]; }

// The error of some columns of the first, a middle and the last token against double.
double ProductError(const HostWeight& w, const std::vector<uint8_t>& x,
                    const std::vector<uint8_t>& y, int64_t m, DType dtype) {
  double error = 0, norm = 0;
  for (int64_t token : {int64_t{0}, m / 2, m - 1}) {
    for (int64_t n = 3; n < w.n; n += std::max<int64_t>(1, w.n / 23)) {
      double want = 0;
      for (int64_t k = 0; k < w.k; ++k) {
        want += static_cast<double>(GetElement(x, dtype, token * w.k + InFeature(w, k))) *
                WeightValue(w, k, n);
      }
      const double got = GetElement(y, dtype, token * w.n + n);
      error += (got - want) * (got - want);
      norm += want * want;
    }
  }
  return std::sqrt(error / norm);
}

// The same columns and tokens must be exact.
bool AreExact(const HostWeight& w, const std::vector<uint8_t>& x, const std::vector<uint8_t>& y,
              int64_t m) {
  for (int64_t token : {int64_t{0}, m / 2, m - 1}) {
    for (int64_t n = 3; n < w.n; n += std::max<int64_t>(1, w.n / 7)) {
      int64_t want = 0;
      for (int64_t k = 0; k < w.k; ++k) {
        want += static_cast<int8_t>(x[token * w.k + InFeature(w, k)]) *
                (w.Code(k, n) - w.Zero(k / w.group_rows(), n));
      }
      int32_t got;
      std::memcpy(&got, y.data() + (token * w.n + n) * 4, sizeof(got));
      if (got != want) return false;
    }
  }
  return true;
}

// The type of y, as a server answers.
DType Answer(DType activations) {
  return activations == DType::kInt8 ? DType::kInt32 : activations;
}

}  // namespace

std::string NameOf(const Case& spec) {
  return absl::StrCat(spec.libawqd == nullptr ? "" : "libawqd:", spec.row->name);
}

Buffer Upload(Device& device, const std::vector<uint8_t>& bytes) {
  Buffer out = device.Allocate(MemoryKind::kDevice, bytes.size()).value();
  auto stream = device.CreateStream().value();
  if (!device.CopyToDevice(out.data(), bytes.data(), bytes.size(), stream->view()).ok() ||
      !stream->Synchronize().ok()) {
    Fail("copy to the device failed");
  }
  return out;
}

std::vector<uint8_t> Download(Device& device, const Buffer& buffer) {
  std::vector<uint8_t> out(buffer.size());
  auto stream = device.CreateStream().value();
  if (!device.CopyToHost(out.data(), buffer.data(), out.size(), stream->view()).ok() ||
      !stream->Synchronize().ok()) {
    Fail("copy from the device failed");
  }
  return out;
}

void Check(const absl::Status& status) {
  if (!status.ok()) Fail(status.ToString());
}

void Fail(const std::string& why) {
  std::fprintf(stderr, "awqd_bench: %s\n", why.c_str());
  std::exit(1);
}

Copies Prepare(const KernelRow& row, const WeightShape& shape, int64_t bytes, Machine& machine,
               bool order) {
  constexpr int kHotCalls = 16;  // of a round
  Copies out;
  out.canonical =
      testing::RandomWeight({.k = shape.k, .n = shape.n, .scheme = shape.scheme, .order = order});
  do {
    auto weight = testing::PrepareFor(row, out.canonical, machine.device());
    if (!weight.ok()) Fail(weight.status().ToString());
    out.weights.push_back(*weight);
  } while (out.weights.size() < 2 ||
           out.weights[0]->bytes() * static_cast<int64_t>(out.weights.size()) < bytes);
  if (bytes == 0) out.weights.assign(kHotCalls, out.weights[0]);
  return out;
}

Product::Product(const Case& spec, const Copies& copies, Machine& machine)
    : spec_(spec), copies_(copies) {
  Device& device = machine.device();
  const bool decodes = spec.m == 0;
  const DType y_dtype = decodes ? spec.dtype : Answer(spec.dtype);
  const int64_t rows = decodes ? spec.k : spec.m;
  std::vector<uint8_t> x;
  y_ = Upload(device, std::vector<uint8_t>(rows * spec.n * SizeOf(y_dtype), 0xff));
  if (!decodes) {
    x = RandomMatrix(spec.m, spec.k, spec.dtype, 5);
    x_ = Upload(device, x);
    const int64_t scratch =
        WorkspaceBytes(*copies.weights[0], spec.row->path, spec.m, ActivationFunction::kNone,
                       IsFloat8(spec.float8) ? Op::kFloat8Activations : spec.row->op);
    workspace_ = device.Allocate(MemoryKind::kDevice, scratch).value();
  }
  auto stream = device.CreateStream().value();
  Run(0, stream->view());
  Check(stream->Synchronize());
  if (decodes) {
    CheckDecoded(Download(device, y_));
  } else {
    CheckProduct(x, Download(device, y_));
  }
}

void Product::CheckProduct(const std::vector<uint8_t>& x, const std::vector<uint8_t>& y) {
  if (spec_.dtype == DType::kInt8) {
    if (AreExact(copies_.canonical, x, y, spec_.m)) return;
    Fail(absl::StrCat(NameOf(spec_), ": wrong integers"));
  }
  error_ = ProductError(copies_.canonical, x, y, spec_.m, spec_.dtype);
  // Allows the roundings of y and of the weight, half a unit in the last place of FP16 or BF16; and
  // of activations to INT8, whose error is 1 / sqrt(12) of 1/127 of the largest of some thousand.
  const double allowed = IsFloat8(spec_.float8)                       ? 5e-2
                         : spec_.row->op == Op::kQuantizedActivations ? 2e-2
                         : spec_.dtype == DType::kFp16                ? 1e-3
                                                                      : 4e-3;
  if (!(error_ <= allowed)) {
    Fail(absl::StrCat(NameOf(spec_), ": error ", error_));
  }
}

void Product::CheckDecoded(const std::vector<uint8_t>& decoded) const {
  for (int64_t i = 0; i < spec_.k * spec_.n; i += 97) {
    std::vector<uint8_t> want(SizeOf(spec_.dtype));
    StoreElement(want.data(), spec_.dtype, 0,
                 WeightValue(copies_.canonical, i / spec_.n, i % spec_.n));
    if (!std::equal(want.begin(), want.end(), decoded.begin() + i * SizeOf(spec_.dtype))) {
      Fail(absl::StrCat(NameOf(spec_), ": wrong bits at element ", i));
    }
  }
}

void Product::Run(int i, StreamView stream) const {
  const DeviceWeight* const weight = copies_.weights[i].get();
  if (spec_.m == 0) {
    const DequantizeArgs args = {weight, {y_.data(), spec_.dtype, spec_.k, spec_.n}};
    if (spec_.libawqd != nullptr) return spec_.libawqd->Decode(i, args, stream);
    return Check(Dequantize(args, nullptr, stream));
  }
  MatmulArgs args = {weight,
                     {x_.data(), spec_.dtype, spec_.m, spec_.k},
                     {y_.data(), Answer(spec_.dtype), spec_.m, spec_.n},
                     nullptr,
                     workspace_.data()};
  if (spec_.row->op == Op::kQuantizedActivations) {
    args.quantization = ActivationQuantization::kPerToken;
  }
  if (IsFloat8(spec_.float8)) args.quantization = spec_.float8;
  if (spec_.libawqd != nullptr) return spec_.libawqd->Multiply(i, args, spec_.row->path, stream);
  Check(spec_.product ? spec_.product(args, stream)
                      : QuantizedMatmul(args, spec_.row->path, stream));
}

Result Time(const Case& spec, const Copies& copies, Machine& machine) {
  const Product product(spec, copies, machine);
  const double microseconds =
      machine.Time(static_cast<int>(copies.weights.size()),
                   [&](int i, StreamView stream) { product.Run(i, stream); });
  return {spec, microseconds, product.error(), {}};
}

std::pair<Result, Result> TimeBesideLibrary(const Case& spec, const Copies& copies,
                                            LibraryWeights& library, Machine& machine) {
  constexpr int kTurns = 3;
  Case by_library = spec;
  by_library.libawqd = &library;
  const Product products[] = {{spec, copies, machine}, {by_library, copies, machine}};
  std::pair<Result, Result> out = {{spec, HUGE_VAL, products[0].error(), {}},
                                   {by_library, HUGE_VAL, products[1].error(), {}}};
  for (int turn = 0; turn < 2 * kTurns; ++turn) {
    const bool second = turn % 4 == 1 || turn % 4 == 2;  // a b b a a b
    Result& result = second ? out.second : out.first;
    result.microseconds =
        std::min(result.microseconds,
                 machine.Time(static_cast<int>(copies.weights.size()),
                              [&](int i, StreamView stream) { products[second].Run(i, stream); }));
  }
  out.second.floors.push_back({"row", out.first.microseconds});
  return out;
}

}  // namespace awqd::bench
