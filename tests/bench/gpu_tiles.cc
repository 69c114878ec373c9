// Times compiled tiles beside what the model of their costs gives.
#include "tests/bench/gpu_tiles.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/sm90a/rows.h"
#include "tests/bench/cases.h"

namespace awqd::bench {
namespace {

using cuda::PersistentTile;
using cuda::RatedTile;

// As in tile_costs.h: without what is 1 at the end.
std::string Text(const PersistentTile& tile) {
  const int fields[] = {tile.tokens, tile.groups, tile.cluster, tile.parts, tile.sets, tile.slices};
  int last = std::size(fields);
  while (last > 3 && fields[last - 1] == 1) --last;
  std::string out = absl::StrCat("{", fields[0]);
  for (int i = 1; i < last; ++i) absl::StrAppend(&out, ", ", fields[i]);
  return out + "}";
}

// What is chosen beside the fastest, over all products.
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

class Tiles {
 public:
  Tiles(DType x, double factor, Machine& machine)
      : x_(x),
        factor_(factor),
        machine_(machine),
        chained_(machine.device().info().batch_invariant),
        row_(chained_ ? cuda::ChainedA16W4Row() : cuda::PersistentA16W4Row()) {}

  const KernelRow& row() const { return row_; }
  const Summary& summary() const { return summary_; }

  void TimeAll(int64_t k, int64_t n, int64_t m, const Copies& copies) {
    const auto rate = chained_ ? cuda::RateChainedTiles : cuda::RatePersistentTiles;
    std::vector<RatedTile> rated = rate(copies.weights[0]->shape, m, machine_.device().info(), x_);
    std::stable_sort(rated.begin(), rated.end(), [](const RatedTile& a, const RatedTile& b) {
      return a.microseconds < b.microseconds;
    });
    double chosen = 0, fastest = 0;
    for (const RatedTile& tile : rated) {
      if (tile.microseconds > factor_ * rated[0].microseconds) break;
      const double us = Time({k, n, m, tile.tile}, copies);
      Print(k, n, m, tile, us);
      summary_.AddTile(us, tile.microseconds);
      if (chosen == 0) chosen = fastest = us;
      fastest = std::min(fastest, us);
    }
    summary_.Add(chosen, fastest);
  }

 private:
  struct Product {
    int64_t k, n, m;
    PersistentTile tile;
  };

  double Time(const Product& product, const Copies& copies) {
    const auto run = chained_ ? cuda::RunChainedTile : cuda::RunPersistentTile;
    Case spec{&row_, product.k, product.n, product.m, x_};
    spec.product = [run, tile = product.tile](const MatmulArgs& args, StreamView stream) {
      return run(args, tile, stream);
    };
    return TimeProduct(spec, copies, machine_).microseconds;
  }

  void Print(int64_t k, int64_t n, int64_t m, const RatedTile& tile, double us) const {
    const std::string text = Text(tile.tile), dtype(Name(x_));
    std::printf("%6d x %-6d M %-5d %-5s %-22s %10.2f us  model %.2f us (model/time %.2f)\n",
                static_cast<int>(k), static_cast<int>(n), static_cast<int>(m), dtype.c_str(),
                text.c_str(), us, tile.microseconds, tile.microseconds / us);
    std::printf(
        "{\"row\":\"%s\",\"tile\":\"%s\",\"k\":%d,\"n\":%d,\"m\":%d,\"dtype\":\"%s\","
        "\"us\":%.2f,\"model_us\":%.2f,\"model_steps_us\":%.2f}\n",
        std::string(row_.name).c_str(), text.c_str(), static_cast<int>(k), static_cast<int>(n),
        static_cast<int>(m), dtype.c_str(), us, tile.microseconds, tile.steps_us);
    std::fflush(stdout);
  }

  const DType x_;
  const double factor_;
  Machine& machine_;
  const bool chained_;
  const KernelRow& row_;
  Summary summary_;
};

}  // namespace

void TimeTiles(const std::vector<std::pair<int64_t, int64_t>>& shapes,
               const std::vector<int64_t>& tokens, DType x, double factor, Machine& machine) {
  Tiles tiles(x, factor, machine);
  if (const int arch = machine.device().info().arch; arch != tiles.row().min_arch) {
    Fail(absl::StrCat("--tiles: got a device of arch ", arch, ", expected ", tiles.row().min_arch));
  }
  for (const auto& [k, n] : shapes) {
    const Copies copies = Prepare(tiles.row(), k, n, machine.cold_bytes(), machine);
    for (int64_t m : tokens) {
      if (m >= tiles.row().min_m) tiles.TimeAll(k, n, m, copies);
    }
  }
  tiles.summary().Print();
}

}  // namespace awqd::bench
