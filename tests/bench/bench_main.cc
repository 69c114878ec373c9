// Walks the registry on one device: a table and one JSON line per case.
//
//   awqd_bench [--device=cpu] [--shapes=4096x4096,4096x14336] [--m=1,8,256] [--rows=substring,...]
//              [--isa=portable|avx2|avx512] [--x=fp16|bf16] [--served] [--floors=none]
//
// --served: only the rows, and the tokens for each, that a server would choose.
// Each case is checked before it is timed; a wrong result ends the run with status 1.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/reference.h"
#include "kernels/kernels.h"
#include "tests/bench/bench.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/test_device.h"

namespace awqd::bench {
namespace {

using ::awqd::testing::GetElement;
using ::awqd::testing::RandomMatrix;

struct Flags {
  std::string device = "cpu";
  std::vector<std::pair<int64_t, int64_t>> shapes = {{4096, 4096}, {4096, 14336}};
  std::vector<int64_t> m = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  std::string rows;
  std::string isa;  // of the CPU rows; empty: the machine's best
  bool floors = true;
  bool served = false;  // only what a server's plan takes
  DType x = DType::kFp16;
};

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "awqd_bench: %s\n", why.c_str());
  std::exit(1);
}

int64_t Number(absl::string_view text) {
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < 1) {
    Fail(absl::StrCat("got \"", text, "\", expected a positive number"));
  }
  return value;
}

Flags Parse(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    absl::string_view arg = argv[i];
    if (absl::ConsumePrefix(&arg, "--device=")) {
      flags.device = std::string(arg);
    } else if (absl::ConsumePrefix(&arg, "--rows=")) {
      flags.rows = std::string(arg);
    } else if (absl::ConsumePrefix(&arg, "--isa=")) {
      flags.isa = std::string(arg);
    } else if (arg == "--floors=none") {
      flags.floors = false;
    } else if (arg == "--served") {
      flags.served = true;
    } else if (arg == "--x=fp16" || arg == "--x=bf16") {
      flags.x = arg == "--x=fp16" ? DType::kFp16 : DType::kBf16;
    } else if (absl::ConsumePrefix(&arg, "--m=")) {
      flags.m.clear();
      for (absl::string_view m : absl::StrSplit(arg, ',')) flags.m.push_back(Number(m));
    } else if (absl::ConsumePrefix(&arg, "--shapes=")) {
      flags.shapes.clear();
      for (absl::string_view shape : absl::StrSplit(arg, ',')) {
        const std::pair<absl::string_view, absl::string_view> kn = absl::StrSplit(shape, 'x');
        flags.shapes.push_back({Number(kn.first), Number(kn.second)});
      }
    } else {
      Fail(absl::StrCat("unknown flag ", argv[i],
                        ", expected --device --shapes --m --rows --isa --x=fp16|bf16 --served "
                        "--floors=none"));
    }
  }
  return flags;
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

// Whether a row's name holds one of the substrings asked for; every name without any.
bool IsAsked(absl::string_view name, const std::string& asked) {
  for (absl::string_view part : absl::StrSplit(asked, ',')) {
    if (absl::StrContains(name, part)) return true;
  }
  return false;
}

// Enough copies of one weight that each call meets memory, not a cache.
struct Copies {
  CanonicalWeight canonical;
  std::vector<std::shared_ptr<const DeviceWeight>> weights;
};

Copies Prepare(const KernelRow& row, int64_t k, int64_t n, Machine& machine) {
  Copies out;
  testing::WeightSpec spec;
  spec.k = k;
  spec.n = n;
  out.canonical = testing::RandomWeight(spec);
  do {
    auto weight = testing::PrepareFor(row, out.canonical, machine.device());
    if (!weight.ok()) Fail(weight.status().ToString());
    out.weights.push_back(*weight);
  } while (out.weights.size() < 2 ||
           out.weights[0]->bytes() * static_cast<int64_t>(out.weights.size()) <
               machine.cold_bytes());
  return out;
}

// Some columns of the first, a middle and the last row against double.
double ProductError(const CanonicalWeight& w, const std::vector<uint8_t>& x,
                    const std::vector<uint8_t>& y, int64_t m, DType dtype) {
  double error = 0, norm = 0;
  for (int64_t row : {int64_t{0}, m / 2, m - 1}) {
    for (int64_t n = 3; n < w.n; n += w.n / 7) {
      double want = 0;
      for (int64_t k = 0; k < w.k; ++k) {
        want += static_cast<double>(GetElement(x, dtype, row * w.k + k)) * ProductWeight(w, k, n);
      }
      const double got = GetElement(y, dtype, row * w.n + n);
      error += (got - want) * (got - want);
      norm += want * want;
    }
  }
  return std::sqrt(error / norm);
}

void Check(const absl::Status& status) {
  if (!status.ok()) Fail(status.ToString());
}

Result RunMatmul(const Case& spec, const Copies& copies, bool floors, Machine& machine) {
  Device& device = machine.device();
  const std::vector<uint8_t> host_x = RandomMatrix(spec.m, spec.k, spec.dtype, 5);
  const Buffer x = Upload(device, host_x);
  const Buffer y = Upload(device, std::vector<uint8_t>(spec.m * spec.n * 2, 0xff));
  const Buffer workspace =
      device
          .Allocate(MemoryKind::kDevice, WorkspaceBytes(*copies.weights[0], spec.row->path, spec.m))
          .value();
  const Call call = [&](int i, StreamView stream) {
    const MatmulArgs args = {copies.weights[i].get(),
                             {x.data(), spec.dtype, spec.m, spec.k},
                             {y.data(), spec.dtype, spec.m, spec.n},
                             nullptr,
                             workspace.data()};
    Check(QuantizedMatmul(args, spec.row->path, stream));
  };
  auto stream = device.CreateStream().value();
  call(0, stream->view());
  Check(stream->Synchronize());
  Result result{
      spec, 0, ProductError(copies.canonical, host_x, Download(device, y), spec.m, spec.dtype), {}};
  // The one rounding of y: half a unit in the last place of FP16, of BF16.
  if (!(result.error <= (spec.dtype == DType::kFp16 ? 1e-3 : 4e-3)))
    Fail(absl::StrCat(spec.row->name, ": error ", result.error));
  result.microseconds = machine.Time(static_cast<int>(copies.weights.size()), call);
  if (floors)
    result.floors = machine.Floors(spec, copies.weights[0]->storage.size(), copies.weights[0]);
  return result;
}

Result RunDequantize(const Case& spec, const Copies& copies, bool floors, Machine& machine) {
  Device& device = machine.device();
  const Buffer out =
      Upload(device, std::vector<uint8_t>(spec.k * spec.n * SizeOf(spec.dtype), 0xff));
  const Call call = [&](int i, StreamView stream) {
    Check(Dequantize({copies.weights[i].get(), {out.data(), spec.dtype, spec.k, spec.n}}, stream));
  };
  auto stream = device.CreateStream().value();
  call(0, stream->view());
  Check(stream->Synchronize());
  const std::vector<uint8_t> got = Download(device, out);
  for (int64_t i = 0; i < spec.k * spec.n; i += 97) {
    std::vector<uint8_t> want(SizeOf(spec.dtype));
    StoreElement(want.data(), spec.dtype, 0, ExactWeight(copies.canonical, i / spec.n, i % spec.n));
    if (!std::equal(want.begin(), want.end(), got.begin() + i * SizeOf(spec.dtype))) {
      Fail(absl::StrCat(spec.row->name, ": wrong bits at element ", i));
    }
  }
  Result result{spec, machine.Time(static_cast<int>(copies.weights.size()), call), 0, {}};
  if (floors)
    result.floors = machine.Floors(spec, copies.weights[0]->storage.size(), copies.weights[0]);
  return result;
}

void Print(const Result& r) {
  std::string floors, json;
  for (const Floor& floor : r.floors) {
    absl::StrAppendFormat(&floors, "  %s %.2f us (time/floor %.2f)", floor.name, floor.microseconds,
                          r.microseconds / floor.microseconds);
    absl::StrAppendFormat(&json, ",\"%s_us\":%.2f", floor.name, floor.microseconds);
  }
  std::printf("%-22s %6d x %-6d M %-5d %-5s %10.2f us%s\n", std::string(r.spec.row->name).c_str(),
              static_cast<int>(r.spec.k), static_cast<int>(r.spec.n), static_cast<int>(r.spec.m),
              std::string(Name(r.spec.dtype)).c_str(), r.microseconds, floors.c_str());
  std::printf(
      "{\"row\":\"%s\",\"k\":%d,\"n\":%d,\"m\":%d,\"dtype\":\"%s\",\"us\":%.2f,"
      "\"error\":%.2e%s}\n",
      std::string(r.spec.row->name).c_str(), static_cast<int>(r.spec.k), static_cast<int>(r.spec.n),
      static_cast<int>(r.spec.m), std::string(Name(r.spec.dtype)).c_str(), r.microseconds, r.error,
      json.c_str());
  std::fflush(stdout);
}

bool Serves(const Plan& plan, const KernelRow& row) {
  return plan.rows.dequantize == &row ||
         std::any_of(plan.rows.matmul.begin(), plan.rows.matmul.end(),
                     [&](const PlanEntry& entry) { return entry.row == &row; });
}

void RunRow(const KernelRow& row, const Flags& flags, Machine& machine) {
  for (const auto& [k, n] : flags.shapes) {
    QuantScheme scheme;
    scheme.group_size = std::min<int64_t>(128, k);
    if (std::string why = WhyNot(row, {k, n, scheme}, machine.device().info()); !why.empty()) {
      std::printf("%s: skipped: %s\n", std::string(row.name).c_str(), why.c_str());
      continue;
    }
    Plan plan;
    if (flags.served) {
      plan = Select({k, n, scheme}, machine.device().info(), AllKernels()).value();
      if (!Serves(plan, row)) continue;
    }
    const Copies copies = Prepare(row, k, n, machine);
    if (row.op == Op::kDequantize) {
      for (DType dtype : {DType::kFp16, DType::kBf16, DType::kFp32}) {
        if (row.outputs & MaskOf(dtype))
          Print(RunDequantize({&row, k, n, 0, dtype}, copies, flags.floors, machine));
      }
      continue;
    }
    for (int64_t m : flags.m) {
      if (m < row.min_m || (row.max_m >= 0 && m > row.max_m)) continue;
      if (flags.served && plan.rows.Matmul(row.path, m) != &row) continue;
      Print(RunMatmul({&row, k, n, m, flags.x}, copies, flags.floors, machine));
    }
  }
}

int Main(int argc, char** argv) {
  const Flags flags = Parse(argc, argv);
  // The device reads it when it opens.
  if (!flags.isa.empty()) setenv("AWQD_CPU_ISA", flags.isa.c_str(), 1);
  auto device = OpenDevice(flags.device, {});
  if (!device.ok()) Fail(device.status().ToString());
  if (!flags.isa.empty() && Name((*device)->info().isa) != flags.isa) {
    Fail(absl::StrCat("--isa: got \"", flags.isa,
                      "\", expected one of portable, avx2, avx512 that ", (*device)->info().name,
                      " has"));
  }
  std::unique_ptr<Machine> machine = MakeCpuMachine(**device);
#ifdef AWQD_CUDA
  if (machine == nullptr) machine = MakeCudaMachine(**device);
#endif
  if (machine == nullptr) Fail(absl::StrCat("no timing for ", flags.device));
  std::printf("%s\n", machine->Facts().c_str());
  for (const KernelRow* row : AllKernels()) {
    // The oracle is not for speed.
    if (row->priority < 0 || !IsAsked(row->name, flags.rows)) continue;
    if (row->device == (*device)->info().kind) RunRow(*row, flags, *machine);
  }
  return 0;
}

}  // namespace
}  // namespace awqd::bench

int main(int argc, char** argv) { return awqd::bench::Main(argc, argv); }
