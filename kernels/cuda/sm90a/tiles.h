// The tiles of the persistent product and the choice among them: host arithmetic over a problem and
// a device, so that it is tested with invented devices.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/sm90a/schedule.h"
#include "kernels/layouts/mma16.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd::cuda {

// A block accumulates 64 * groups out features x `tokens` tokens; the `cluster` blocks side by
// side along N share the tokens that they read.
struct PersistentTile {
  int tokens = 256;
  int groups = 2;  // of consumers, by features
  int cluster = 2;
  // Blocks of a cluster that share a tile's steps instead: each takes a part of K and stores a
  // share of the tokens.
  int parts = 1;
  // Chains that each slice of a part keeps apart in registers, where the order of sums is kept: of
  // a weight with parts * slices * sets of them. 0: of any weight with more than one for each part,
  // all but the last in global memory.
  int sets = 1;
  // Consumers of a block that share a part's steps instead of features: each takes a slice of K
  // and stores a share of the tokens. Where tiles are narrow, one group alone cannot keep up.
  int slices = 1;

  friend bool operator==(const PersistentTile&, const PersistentTile&) = default;
};

// What is compiled.
std::vector<PersistentTile> PersistentTiles();

// One step of the ring: 128 k of the tokens and of the weights.
constexpr int PersistentStageBytes(int tokens, int groups, bool fine_groups) {
  return tokens * mma16::kBlockK * 2 + groups * mma16::RecordBytes(fine_groups ? 8 : 2);
}

// As deep as the shared memory of sm_90 (228 KB, of which each block takes 1 KB for itself) allows
// with two barriers of 8 bytes per step, and two more; more than 16 gain nothing. Every slice has
// as many.
constexpr int PersistentStages(int tokens, int groups, int slices, bool fine_groups) {
  constexpr int room = 227 * 1024 - 16;
  const int stages = room / (PersistentStageBytes(tokens, groups, fine_groups) + 16);
  return (stages < 16 ? stages : 16) / slices * slices;
}

constexpr int PersistentSharedBytes(int tokens, int groups, int slices, bool fine_groups) {
  const int stages = PersistentStages(tokens, groups, slices, fine_groups);
  return stages * (PersistentStageBytes(tokens, groups, fine_groups) + 16) + 16;
}

// Whether a consumer that keeps the order of sums has registers for one chain alone, and parks the
// total of those before it in global memory. With 176 and 192 tokens a part of the total lies in
// local memory between chains, which the compiler sees to.
constexpr bool PersistentParks(int tokens) { return tokens > 192; }

// Whether the first part of a tile has registers for the sum of its chains beside the one under
// way, where chains are put down. Three groups have not.
constexpr bool PersistentFirstAddsUp(int groups) { return groups <= 2; }

// Floats that a block hands over when its tile was cut.
constexpr int64_t PersistentSlotFloats(const PersistentTile& tile) {
  return int64_t{tile.tokens} * tile.groups * mma16::kTileN;
}

// Fewer clusters than fit where that makes their shares even.
Schedule PersistentSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                            const DeviceInfo& device);

// Rows of tokens that a block copies for a full tile, and for the last one.
constexpr int TokenRows(const PersistentTile& tile) { return tile.tokens / tile.cluster; }
int LastTokenRows(int64_t m, const PersistentTile& tile);

// Room for the sums of cut tiles, whatever tile is chosen; a multiple of 256.
int64_t PersistentSumsBytes(const DeviceInfo& device);

// The tile that a model of its cost, fitted to measurements, finds fastest for activations of dtype
// `x`.
PersistentTile ChoosePersistentTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                    DType x = DType::kFp16);

// Every tile among which that is chosen, with what the model gives for it: what awqd_bench --tiles
// compares with measurements.
struct RatedTile {
  PersistentTile tile;
  double microseconds = 0;
  double steps_us = 0;  // of these, what is in proportion to a step
};
std::vector<RatedTile> RatePersistentTiles(const WeightShape& shape, int64_t m,
                                           const DeviceInfo& device, DType x);

// The same for tiles that keep the order of sums of common/chains.h. `slots`: for the sums that a
// cluster puts down.
std::vector<PersistentTile> ChainedTiles();
Schedule ChainedSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                         const DeviceInfo& device);
int ChainedSlots(const Schedule& schedule, int chain, const PersistentTile& tile);
int64_t ChainedSumsBytes(const WeightShape& shape, const DeviceInfo& device);
PersistentTile ChooseChainedTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                 DType x = DType::kFp16);
std::vector<RatedTile> RateChainedTiles(const WeightShape& shape, int64_t m,
                                        const DeviceInfo& device, DType x);

}  // namespace awqd::cuda
