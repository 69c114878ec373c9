// Times compiled tiles, and compares them with the cost model.
#include "tests/bench/gpu_tiles.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/backends.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/steps.h"
#include "tests/bench/cases.h"

namespace awqd::bench {
namespace {

using cuda::PersistentTile;
using cuda::RatedTile;

// The spelling of tile_list.h, without trailing values of 1.
std::string Text(const PersistentTile& tile) {
  const int fields[] = {tile.tokens, tile.records,      tile.cluster,
                        tile.splits, tile.accumulators, tile.slices};
  int last = std::size(fields);
  while (last > 3 && fields[last - 1] == 1) --last;
  std::string out = absl::StrCat("{", fields[0]);
  for (int i = 1; i < last; ++i) absl::StrAppend(&out, ", ", fields[i]);
  return out + "}";
}

// Compares the chosen tiles with the fastest, over all products.
class Summary {
 public:
  void Add(double chosen_us, double fastest_us) {
    const double ratio = chosen_us / fastest_us;
    ++products_;
    sum_ += ratio;
    worst_ = std::max(worst_, ratio);
  }
  void AddTile(double us, double model_us) {
    ++tiles_;
    squares_ += std::pow(model_us / us - 1, 2);
  }
  void Print() const {
    if (products_ == 0) return;
    std::printf("%d products: chosen / fastest %.3f, worst %.3f; model %.1f %% off (rms, %d)\n",
                products_, sum_ / products_, worst_, 100 * std::sqrt(squares_ / tiles_), tiles_);
  }

 private:
  int products_ = 0, tiles_ = 0;
  double sum_ = 0, worst_ = 0, squares_ = 0;
};

// Tiles of one row, for activations of one type.
class Tiles {
 public:
  Tiles(DType x, ActivationQuantization float8, Machine& machine)
      : x_(x),
        float8_(x == DType::kE4m3 ? float8 : ActivationQuantization::kNone),
        machine_(machine),
        fixed_order_(machine.device().info().batch_invariant),
        row_(x == DType::kInt8   ? cuda::PersistentA8Row()
             : x == DType::kE4m3 ? cuda::PersistentFloat8Row()
             : fixed_order_      ? cuda::FixedOrderA16Row()
                                 : cuda::PersistentA16Row()) {}

  const KernelRow& row() const { return row_; }
  const Summary& summary() const { return summary_; }

  void TimeAll(int64_t m, const Copies& copies) {
    constexpr double kWithin = 1.25;
    const WeightShape& shape = copies.weights[0]->shape;
    const auto rate = fixed_order_ ? cuda::RateFixedOrderTiles : cuda::RatePersistentTiles;
    std::vector<RatedTile> rated = rate(shape, m, machine_.device().info(), x_);
    std::stable_sort(rated.begin(), rated.end(), [](const RatedTile& a, const RatedTile& b) {
      return a.microseconds < b.microseconds;
    });
    double chosen = 0, fastest = 0;
    for (const RatedTile& tile : rated) {
      if (tile.microseconds > kWithin * rated[0].microseconds) break;
      const Result result =
          Time({&row_, shape.k, shape.n, m, x_ == DType::kE4m3 ? DType::kFp16 : x_, float8_},
               tile.tile, copies);
      Print(result, tile, ToString(shape.scheme));
      summary_.AddTile(result.microseconds, tile.microseconds);
      if (chosen == 0) chosen = fastest = result.microseconds;
      fastest = std::min(fastest, result.microseconds);
    }
    summary_.Add(chosen, fastest);
  }

 private:
  Result Time(Case spec, const PersistentTile& tile, const Copies& copies) {
    const int64_t sums =
        row_.workspace_bytes(copies.weights[0]->shape, machine_.device().info(), 0);
    spec.product = [this, tile, sums](MatmulArgs args, StreamView stream) {
      if (SizeOf(x_) == 1) {  // always has a prologue
        PrologueResult x;
        PrologueArgs prologue = {
            .x = args.x, .form = row_.input_form, .out = static_cast<char*>(args.workspace) + sums};
        prologue.quantization = float8_;
        const absl::Status status =
            CudaSteps().run_prologue(prologue, &x, machine_.device(), stream);
        if (!status.ok()) return status;
        args.x = x.x, args.x_stride = x.stride;
        args.x_scale = x.scale, args.x_scale_stride = x.scale_stride;
      }
      return cuda::RunTile(args, tile, fixed_order_, stream);
    };
    return bench::Time(spec, copies, machine_);
  }

  static void Print(const Result& r, const RatedTile& tile, const std::string& weight) {
    const Case& spec = r.spec;
    const std::string text = Text(tile.tile), dtype(Name(spec.dtype));
    const int k = static_cast<int>(spec.k), n = static_cast<int>(spec.n),
              m = static_cast<int>(spec.m);
    std::printf("%6d x %-6d M %-5d %-5s %-22s %10.2f us  model %.2f us (model/time %.2f)\n", k, n,
                m, dtype.c_str(), text.c_str(), r.microseconds, tile.microseconds,
                tile.microseconds / r.microseconds);
    std::printf(
        "{\"row\":\"%s\",\"weight\":\"%s\",\"tile\":\"%s\",\"k\":%d,\"n\":%d,\"m\":%d,\"dtype\":\"%"
        "s\","
        "\"us\":%.2f,\"model_us\":%.2f,\"model_steps_us\":%.2f}\n",
        std::string(spec.row->name).c_str(), weight.c_str(), text.c_str(), k, n, m, dtype.c_str(),
        r.microseconds, tile.microseconds, tile.steps_us);
    std::fflush(stdout);
  }

  const DType x_;
  const ActivationQuantization float8_;
  Machine& machine_;
  const bool fixed_order_;
  const KernelRow& row_;
  Summary summary_;
};

}  // namespace

void TimeTiles(const std::vector<std::pair<int64_t, int64_t>>& shapes,
               const QuantizationScheme& scheme, const std::vector<int64_t>& tokens, DType x,
               ActivationQuantization float8, int64_t bytes_of_round, Machine& machine) {
  Tiles tiles(x, float8, machine);
  if (const int arch = machine.device().info().arch; arch != tiles.row().min_arch) {
    Fail(absl::StrCat("--tiles: got a device of arch ", arch, ", expected ", tiles.row().min_arch));
  }
  for (const auto& [k, n] : shapes) {
    const Copies copies = Prepare(tiles.row(), {k, n, scheme}, bytes_of_round, machine);
    for (int64_t m : tokens) {
      if (m >= tiles.row().min_m) tiles.TimeAll(m, copies);
    }
  }
  tiles.summary().Print();
}

}  // namespace awqd::bench
