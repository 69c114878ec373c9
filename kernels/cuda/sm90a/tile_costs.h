// The cost model: how long a product takes with a given tile. tiles.cc chooses by it.
//
// Time is the number of steps times the cost of a step, plus the cost around the steps. The cost of
// a step is in tile_list.h. The cost around the steps depends on how large tiles are and how they
// are split; the constants below were fitted to 2359 timings with FP16 and 4 bits: 227 tiles, one
// to four tiles of tokens, eight layer shapes from 4096 x 4096 to 8192 x 57344; H100, 2026-11-23.
// The chosen tile takes on average 0.2 % longer than the fastest that was timed.
#pragma once

#include <algorithm>
#include <numeric>

#include "kernels/cuda/common/stream_k_schedule.h"
#include "kernels/cuda/sm90a/tile_list.h"
#include "kernels/types.h"

namespace awqd::cuda {

// ---- The cost around the steps, in microseconds ------------------------------------------------
// `size` is that of a block's tile: 1 for 128 tokens x 64 columns.
constexpr double TileSize(const PersistentTile& tile) { return tile.tokens * tile.records / 128.0; }

// A step is faster while some multiprocessors are idle, because the others have more power and L2
// bandwidth each: by this factor times the idle fraction.
inline constexpr double kIdleGain = 0.3;
// A consumer that is alone in its block waits for itself, however idle the others are.
inline constexpr double kIdleGainAlone = 0.15;

// Split-K tiles: to start, to exchange sums in the cluster, to store; more with slices.
constexpr double SplitKUs(double size) { return 3.1 + size; }
inline constexpr double kSlicesUs = 0.45;

// Other tiles: to start; what pairs of blocks take more to start; to store each tile.
inline constexpr double kStartUs = 1.2;
inline constexpr double kPairUs = 1.0;
constexpr double StoreUs(double size) { return size; }

// Stream-K tiles: to store partials; to load those of an earlier cluster.
constexpr double StorePartialsUs(double size) { return 1.2 * size; }
constexpr double LoadPartialsUs(double size) { return 0.9 + 0.2 * size; }

// In fixed order.
// To continue from the partials of the cluster before.
inline constexpr double kGoOnUs = 6.0;
// To wait for the other splits of a tile; to load the partials of each, and each of its k-ranges.
inline constexpr double kMeetSplitsUs = 0.9;
inline constexpr double kLoadSplitUs = 0.6;
constexpr double LoadKRangeUs(double size) { return 0.5 * size; }
// To store a k-range that is not the split's last. All blocks do it at once.
constexpr double StoreKRangeUs(double size) { return 0.2 * size * size; }
// The same for each record, where the splits are blocks of one cluster.
inline constexpr double kStoreKRangeOfRecordUs = 0.8;

// To add a k-range to the total of those before. The total is in global memory (PersistentParks),
// or with 176 and 192 tokens partly in local memory.
constexpr double JoinUs(int tokens) {
  return PersistentParks(tokens) ? 2.3 : tokens > 160 ? 0.4 : 0;
}

// The most clusters that compute one stream-K tile. Divided by their common divisor, `runs` equal
// k-ranges are as long as `tiles` tiles; a tile may begin at any multiple of 1 / tiles of a range.
inline int MostClustersOfTile(const StreamKSchedule& s) {
  const int common = std::gcd(s.stream_k_tiles, s.clusters);
  const int tiles = s.stream_k_tiles / common, runs = s.clusters / common;
  if (tiles == 1) return runs;
  return runs / tiles + (runs % tiles == 1 ? 1 : 2);
}

// ---- The GPU -----------------------------------------------------------------------------------
// The costs of tile_list.h are those of an H100 with these peaks. Of another GPU two things are
// known: its multiprocessors take as long as its clock is slower, and reading takes as long as its
// memory is. Where its memory is faster, nothing is gained: even {32, 1}, which reads most, takes
// 0.197 us for a step of which reading is 0.186.
inline constexpr double kFittedClockKhz = 1'980'000;
inline constexpr double kFittedBytesPerUs = 3'352'000;
// The part of it that a kernel which only reads reaches.
inline constexpr double kReached = 0.9;

struct GpuSpeed {
  int sm_count = 1;
  double clock = 1;   // the fitted clock by its own
  double memory = 1;  // the fitted bandwidth by its own
};

inline GpuSpeed SpeedOf(const DeviceInfo& device) {
  GpuSpeed out{.sm_count = device.sm_count};
  if (device.sm_clock_khz > 0) out.clock = kFittedClockKhz / device.sm_clock_khz;
  if (device.memory_bytes_per_s > 0) {
    out.memory = kFittedBytesPerUs * 1e6 / static_cast<double>(device.memory_bytes_per_s);
  }
  return out;
}

// The time of a step, for a weight with records of so many bytes.
inline double StepUs(const StreamKSchedule& s, const TileCost& cost, DType x, int record_bytes,
                     const GpuSpeed& speed) {
  const int blocks = s.clusters * cost.tile.cluster;
  const double busy = static_cast<double>(blocks) / speed.sm_count;
  const double gain = StaysWhole(cost.tile) ? kIdleGainAlone : kIdleGain;
  const double fitted = (x == DType::kBf16 ? cost.bf16_us : cost.fp16_us) * (1 - gain * (1 - busy));
  const double bytes = static_cast<double>(record_bytes) * cost.tile.records * blocks;
  const double reading = std::min(fitted, bytes / (kReached * kFittedBytesPerUs));
  return std::max(fitted * speed.clock, reading * speed.memory);
}

inline double SplitKMicroseconds(const PersistentTile& tile, double steps_us) {
  return steps_us + SplitKUs(TileSize(tile)) + (tile.slices > 1 ? kSlicesUs : 0);
}

// Time of `tiles` whole tiles for each cluster, without any fix-up.
inline double TilesMicroseconds(const PersistentTile& tile, double steps_us, double tiles) {
  return steps_us + kStartUs + (tile.cluster > 1 ? kPairUs : 0) + tiles * StoreUs(TileSize(tile));
}

// Time of a product with this schedule and tile, with activations of dtype `x`.
inline double Microseconds(const StreamKSchedule& s, const TileCost& cost, DType x,
                           int record_bytes, const GpuSpeed& speed) {
  const PersistentTile& tile = cost.tile;
  const double step_us = StepUs(s, cost, x, record_bytes, speed), size = TileSize(tile);
  if (tile.splits > 1) return SplitKMicroseconds(tile, s.split_steps * step_us);
  const double tiles = static_cast<double>(s.tiles()) / s.clusters;
  const double whole = TilesMicroseconds(tile, tiles * s.k_blocks * step_us, tiles);
  if (s.stream_k_tiles == 0) return whole;
  return whole + StorePartialsUs(size) + (MostClustersOfTile(s) - 1) * LoadPartialsUs(size);
}

// The same in fixed order; the weight has `k_ranges` k-ranges of `length` steps.
inline double FixedOrderMicroseconds(const StreamKSchedule& s, const TileCost& cost, DType x,
                                     int k_ranges, int length, int record_bytes,
                                     const GpuSpeed& speed) {
  const PersistentTile& tile = cost.tile;
  const double step_us = StepUs(s, cost, x, record_bytes, speed), size = TileSize(tile);
  const int split_k_ranges = s.split_steps / length;
  if (tile.splits > 1) {
    const int stored = tile.accumulators == 0 ? tile.records * (split_k_ranges - 1) : 0;
    return SplitKMicroseconds(tile, s.split_steps * step_us) + stored * kStoreKRangeOfRecordUs;
  }
  if (s.splits > 0) {
    return TilesMicroseconds(tile, s.split_steps * step_us, 1) +
           (split_k_ranges - 1) * StoreKRangeUs(size) + kMeetSplitsUs +
           (s.splits - 1) * (kLoadSplitUs + split_k_ranges * LoadKRangeUs(size));
  }
  const double tiles = static_cast<double>(s.tiles()) / s.clusters;
  return TilesMicroseconds(tile, tiles * s.k_blocks * step_us, tiles) +
         (s.stream_k_tiles > 0 ? kGoOnUs : 0) + tiles * (k_ranges - 1) * JoinUs(tile.tokens);
}

}  // namespace awqd::cuda
