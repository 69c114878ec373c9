// Walks the registry on one device: a table and one JSON line per case.
//
//   awqd_bench [--device=cpu] [--shapes=4096x4096,4096x14336] [--m=1,8,256] [--rows=substring,...]
//              [--isa=portable|avx2|avxvnni|avx512|avx512vnni|amx] [--x=fp16|bf16|int8|e4m3|e4m3_blocks] [--served]
//              [--library] [--floors=none]
//              [--in_turn] [--tiles] [--hot] [--batch_invariant] [--weight=w4g128z] [--order]
//              [--experts=8x2 [--one_by_one]] [--kv4=8192x8x128]
//
// --weight: the scheme of the weights, as kernels/scheme.h prints it. Of one without a
// scale, such as w4cz+1, the rows of INT8 activations run too.
// --order: weights have an order of rows, as those of desc_act; staging reorders the activations.
// --served: only the rows, and the tokens for each, that a server would choose.
// --library: as --served, and each case by libawqd too, through awqd.h and with weights of its own, in
// turns with the row; its lines say "libawqd:" before the row's name. With --experts
// awqd_grouped_mlp beside the steps of the server.
// --in_turn: the fused products that a server would choose, of all shapes one after the other, as
// the layers of a model are, beside the sum of their times alone.
// --tiles: every tile that the choice of sm90a/qmatmul_a16 finds within a quarter of the fastest,
// beside what it expected; with --x=int8 those of sm90a/qmatmul_a8, with --x=e4m3 those of
// sm90a/qmatmul_float8, whose FP16 activations get a scale for each token, or each block of 128.
// --x=e4m3, --x=e4m3_blocks: FP16 activations, rounded like that before the product.
// --experts: experts x choices of a token. Mixtures of these experts, whose sizes are the shapes,
// for each of the counts of tokens; --one_by_one: without kernels that take several experts.
// --kv4: tokens x heads x elements of a head, stored and loaded.
// --hot: the same weight again and again. One that fits the last-level cache is read from there, so
// that what is timed is what the cores, or multiprocessors, take by themselves.
// --batch_invariant: opens the device as a server with this flag does.
// Each case is checked before it is timed; a wrong result ends the run with status 1.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/kernels.h"
#include "tests/bench/bench.h"
#include "tests/bench/cases.h"
#include "tests/bench/layers.h"
#include "tests/bench/library.h"
#ifdef AWQD_CUDA
#include "tests/bench/gpu_tiles.h"
#endif

namespace awqd::bench {
namespace {

struct Flags {
  std::string device = "cpu";
  std::vector<std::pair<int64_t, int64_t>> shapes = {{4096, 4096}, {4096, 14336}};
  std::vector<int64_t> m = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  std::string rows;
  std::string isa;  // of the CPU rows; empty: the machine's best
  bool floors = true;
  bool served = false;   // only rows that a server's plan chooses
  bool libawqd = false;  // beside each
  bool order = false;    // weights have an order
  bool in_turn = false;  // the shapes one after the other
  bool tiles = false;    // of the persistent product, beside the model of their costs
  bool hot = false;      // weights stay in the last-level cache, if it holds them
  bool batch_invariant = false;
  int64_t experts = 0, top_k = 0;  // of a mixture, whose layers the shapes are
  bool one_by_one = false;         // its experts
  std::vector<int64_t> kv4;        // tokens, heads, elements of a head
  DType x = DType::kFp16;
  ActivationQuantization float8 = ActivationQuantization::kFloat8PerToken;
  QuantizationScheme scheme = Asymmetric(4, 128);
};

int64_t Number(absl::string_view text) {
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < 1) {
    Fail(absl::StrCat("got \"", text, "\", expected a positive number"));
  }
  return value;
}

// "8x2", so many numbers.
std::vector<int64_t> Numbers(absl::string_view text, size_t count) {
  std::vector<int64_t> out;
  for (absl::string_view part : absl::StrSplit(text, 'x')) out.push_back(Number(part));
  if (out.size() != count) Fail(absl::StrCat("got \"", text, "\", expected ", count, " numbers"));
  return out;
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
    } else if (absl::ConsumePrefix(&arg, "--weight=")) {
      auto scheme = ParseScheme(arg);
      if (!scheme.ok()) Fail(std::string(scheme.status().message()));
      flags.scheme = *scheme;
    } else if (arg == "--floors=none") {
      flags.floors = false;
    } else if (arg == "--order") {
      flags.order = true;
    } else if (arg == "--served") {
      flags.served = true;
    } else if (arg == "--library") {
      flags.libawqd = flags.served = true;
    } else if (arg == "--in_turn") {
      flags.in_turn = true;
    } else if (arg == "--tiles") {
      flags.tiles = true;
    } else if (arg == "--hot") {
      flags.hot = true;
    } else if (arg == "--batch_invariant") {
      flags.batch_invariant = true;
    } else if (arg == "--one_by_one") {
      flags.one_by_one = true;
    } else if (absl::ConsumePrefix(&arg, "--experts=")) {
      const std::vector<int64_t> numbers = Numbers(arg, 2);
      flags.experts = numbers[0], flags.top_k = numbers[1];
    } else if (absl::ConsumePrefix(&arg, "--kv4=")) {
      flags.kv4 = Numbers(arg, 3);
    } else if (arg == "--x=e4m3" || arg == "--x=e4m3_blocks") {
      flags.x = DType::kE4m3;
      if (arg == "--x=e4m3_blocks") flags.float8 = ActivationQuantization::kFloat8PerBlock;
    } else if (arg == "--x=fp16" || arg == "--x=bf16" || arg == "--x=int8") {
      flags.x = arg == "--x=fp16" ? DType::kFp16 : arg == "--x=bf16" ? DType::kBf16 : DType::kInt8;
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
      Fail(
          absl::StrCat("unknown flag ", argv[i],
                       ", expected --device --shapes --m --rows --isa "
                       "--x=fp16|bf16|int8|e4m3|e4m3_blocks --served --library "
                       "--floors=none --in_turn --tiles --hot --batch_invariant --weight --experts "
                       "--one_by_one --kv4 --order"));
    }
  }
  return flags;
}

int64_t BytesOfRound(const Flags& flags, const Machine& machine) {
  return flags.hot ? 0 : machine.cold_bytes();
}

// Whether a row's name contains one of the requested substrings; any name does if there are none.
bool IsAsked(absl::string_view name, const std::string& asked) {
  for (absl::string_view part : absl::StrSplit(asked, ',')) {
    if (absl::StrContains(name, part)) return true;
  }
  return false;
}

void Print(const Result& r, const std::string& weight, Machine& machine) {
  std::string floors, json;
  const std::string name = NameOf(r.spec);
  if (machine.device().info().batch_invariant) json = ",\"batch_invariant\":true";
  for (const Floor& floor : r.floors) {
    absl::StrAppendFormat(&floors, "  %s %.2f us (time/floor %.2f)", floor.name, floor.microseconds,
                          r.microseconds / floor.microseconds);
    absl::StrAppendFormat(&json, ",\"%s_us\":%.2f", floor.name, floor.microseconds);
  }
  std::printf("%-30s %-9s %6d x %-6d M %-5d %-5s %10.2f us%s\n", name.c_str(), weight.c_str(),
              static_cast<int>(r.spec.k), static_cast<int>(r.spec.n), static_cast<int>(r.spec.m),
              std::string(Name(r.spec.dtype)).c_str(), r.microseconds, floors.c_str());
  std::printf(
      "{\"row\":\"%s\",\"weight\":\"%s\",\"k\":%d,\"n\":%d,\"m\":%d,\"dtype\":\"%s\",\"us\":%.2f,"
      "\"error\":%.2e%s}\n",
      name.c_str(), weight.c_str(), static_cast<int>(r.spec.k), static_cast<int>(r.spec.n),
      static_cast<int>(r.spec.m), std::string(Name(r.spec.dtype)).c_str(), r.microseconds, r.error,
      json.c_str());
  std::fflush(stdout);
}

bool HasRow(const std::vector<PlanEntry>& entries, const KernelRow& row) {
  return std::any_of(entries.begin(), entries.end(),
                     [&](const PlanEntry& entry) { return entry.row == &row; });
}

bool Serves(const Plan& plan, const KernelRow& row) {
  return plan.rows.dequantize == &row || HasRow(plan.rows.integer, row) ||
         HasRow(plan.rows.quantized, row) || HasRow(plan.rows.float8, row) ||
         HasRow(plan.rows.matmul, row);
}

// `library`: null without --library.
void RunRow(const KernelRow& row, const Flags& flags, const Library* library, Machine& machine) {
  if (row.grouped != nullptr) return;  // takes a stack of weights
  for (const auto& [k, n] : flags.shapes) {
    const WeightShape shape = {k, n, flags.scheme};
    if (std::string why = WhyNot(row, shape, machine.device().info()); !why.empty()) {
      std::printf("%s: skipped: %s\n", std::string(row.name).c_str(), why.c_str());
      continue;
    }
    Plan plan;
    if (flags.served) {
      plan = Select(shape, machine.device().info(), AllKernels()).value();
      if (!Serves(plan, row)) continue;
    }
    const Copies copies = Prepare(row, shape, BytesOfRound(flags, machine), machine, flags.order);
    std::unique_ptr<LibraryWeights> weights;
    if (library != nullptr) {
      weights = std::make_unique<LibraryWeights>(*library, copies.canonical,
                                                 flags.hot ? 1 : copies.weights.size());
    }
    std::vector<Result> results;
    const auto time = [&](const Case& spec) {
      if (weights == nullptr) {
        results.push_back(Time(spec, copies, machine));
        return;
      }
      auto [by_row, by_library] = TimeBesideLibrary(spec, copies, *weights, machine);
      results.push_back(std::move(by_row));
      results.push_back(std::move(by_library));
    };
    if (row.op == Op::kDequantize) {
      for (DType dtype : {DType::kFp16, DType::kBf16, DType::kFp32}) {
        if (row.outputs & MaskOf(dtype)) {
          time({&row, k, n, 0, dtype});
        }
      }
    } else {
      // Where no row has E4M3 activations, one of 16-bit activations multiplies them.
      const bool rounds =
          row.op == Op::kFloat8Activations || (row.op == Op::kMatmul && flags.x == DType::kE4m3);
      const DType x = row.op == Op::kIntegerMatmul ? DType::kInt8 : rounds ? DType::kFp16 : flags.x;
      for (int64_t m : flags.m) {
        if (m < row.min_m || (row.max_m >= 0 && m > row.max_m)) continue;
        const KernelRow* const float8 = rounds ? plan.rows.Float8(m) : nullptr;
        const KernelRow* const chosen = row.op == Op::kIntegerMatmul ? plan.rows.Integer(m)
                                        : row.op == Op::kQuantizedActivations
                                            ? plan.rows.Quantized(m)
                                        : float8 != nullptr ? float8
                                                            : plan.rows.Matmul(row.path, m);
        if (flags.served && chosen != &row) continue;
        time({&row, k, n, m, x, rounds ? flags.float8 : ActivationQuantization::kNone});
      }
    }
    // Floors come after all of a shape's cases, because a measurement right after cuBLASLt may be
    // slow.
    for (Result& result : results) {
      if (flags.floors && result.spec.libawqd == nullptr) {
        result.floors =
            machine.Floors(result.spec, copies.weights[0]->storage.size(), copies.weights[0]);
      }
      Print(result, ToString(flags.scheme), machine);
    }
  }
}

void RunInTurn(const Flags& flags, Machine& machine) {
  const auto shapes = static_cast<int>(flags.shapes.size());
  for (int64_t m : flags.m) {
    std::vector<Copies> copies(shapes);
    std::vector<std::unique_ptr<Product>> products;
    double alone = 0;
    int rounds = std::numeric_limits<int>::max();
    for (int i = 0; i < shapes; ++i) {
      const auto [k, n] = flags.shapes[i];
      const Plan plan = Select({k, n, flags.scheme}, machine.device().info(), AllKernels()).value();
      const Case spec{plan.rows.Matmul(Path::kFused, m), k, n, m, flags.x};
      copies[i] = Prepare(*spec.row, {k, n, flags.scheme}, machine.cold_bytes(), machine);
      alone += Time(spec, copies[i], machine).microseconds;
      rounds = std::min(rounds, static_cast<int>(copies[i].weights.size()));
      products.push_back(std::make_unique<Product>(spec, copies[i], machine));
    }
    const double together = shapes * machine.Time(rounds * shapes, [&](int i, StreamView stream) {
      products[i % shapes]->Run(i / shapes, stream);
    });
    std::printf("in turn: M %-5d %-5s %10.2f us, the sum of each alone %.2f us (%.2f)\n",
                static_cast<int>(m), std::string(Name(flags.x)).c_str(), together, alone,
                together / alone);
    std::printf("{\"in_turn_of\":%d,\"m\":%d,\"dtype\":\"%s\",\"us\":%.2f,\"alone_us\":%.2f}\n",
                shapes, static_cast<int>(m), std::string(Name(flags.x)).c_str(), together, alone);
    std::fflush(stdout);
  }
}

void RunTiles(const Flags& flags, [[maybe_unused]] Machine& machine) {
#ifdef AWQD_CUDA
  TimeTiles(flags.shapes, flags.scheme, flags.m, flags.x, flags.float8,
            BytesOfRound(flags, machine), machine);
#else
  Fail(absl::StrCat("--tiles: got ", flags.device, ", expected a build with CUDA"));
#endif
}

int Main(int argc, char** argv) {
  const Flags flags = Parse(argc, argv);
  // The device reads it when it is opened.
  if (!flags.isa.empty()) setenv("AWQD_CPU_ISA", flags.isa.c_str(), 1);
  auto device = OpenDevice(flags.device, {.batch_invariant = flags.batch_invariant});
  if (!device.ok()) Fail(device.status().ToString());
  if (!flags.isa.empty() && Name((*device)->info().isa) != flags.isa) {
    Fail(absl::StrCat(
        "--isa: got \"", flags.isa,
        "\", expected one of portable, avx2, avxvnni, avx512, avx512vnni, amx, neon, neondot that ",
        (*device)->info().name, " has"));
  }
  std::unique_ptr<Machine> machine = MakeCpuMachine(**device);
#ifdef AWQD_CUDA
  if (machine == nullptr) machine = MakeCudaMachine(**device);
#endif
  if (machine == nullptr) Fail(absl::StrCat("no timing for ", flags.device));
  std::printf("%s\n", machine->Facts().c_str());
  if (flags.in_turn) {
    RunInTurn(flags, *machine);
    return 0;
  }
  if (flags.tiles) {
    RunTiles(flags, *machine);
    return 0;
  }
  if (!flags.kv4.empty()) {
    TimeKv4(flags.kv4[0], flags.kv4[1], flags.kv4[2], *machine);
    return 0;
  }
  std::unique_ptr<Library> library;
  if (flags.libawqd) {
    library = std::make_unique<Library>(flags.device, flags.batch_invariant, *machine);
  }
  if (flags.experts > 0) {
    for (const auto& [hidden, middle] : flags.shapes) {
      const bool float8 = flags.x == DType::kE4m3;
      TimeMixture({flags.experts, flags.top_k, hidden, middle, flags.scheme,
                   float8 ? DType::kFp16 : flags.x, flags.one_by_one,
                   float8 ? flags.float8 : ActivationQuantization::kNone},
                  flags.m, library.get(), *machine);
    }
    return 0;
  }
  for (const KernelRow* row : AllKernels()) {
    // The oracle is not fast.
    if (row->priority < 0 || !IsAsked(row->name, flags.rows)) continue;
    if (row->device == (*device)->info().kind) RunRow(*row, flags, library.get(), *machine);
  }
  return 0;
}

}  // namespace
}  // namespace awqd::bench

int main(int argc, char** argv) { return awqd::bench::Main(argc, argv); }
