// The producers of the persistent product: two threads that keep the ring full. Device code only.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90a/persistent.cuh"

namespace awqd::cuda {
namespace {

// One thread loads the weights, which depend on no earlier kernel; another loads the tokens.
// Addresses are advanced by addition: a producer has no time for more arithmetic.
template <class Config>
__device__ __forceinline__ void ProduceWeights(const PersistentParams& p, const Ring<Config>& ring,
                                               int cluster, int rank) {
  const int64_t row_bytes = int64_t{p.schedule.k_blocks} * ring.record_bytes;
  Cursor<Config> at;
  FilledWorkUnits<Config> units(p, cluster);
  for (WorkUnit work; units.Next(&work);) {
    const TilePlace place = PlaceOf(work.tile, p.token_tiles, ColumnTiles<Config>(p));
    const int first = (place.columns * Config::kCluster + rank) * Config::kRecords;
    const int slice_steps = SliceSteps<Config>(p, work);
    const uint8_t* records = p.records;
    if constexpr (Config::kGrouped) records = p.tiles[place.tokens].records;
    const uint8_t* record[Config::kSlices][Config::kRecords];
#pragma unroll
    for (int s = 0; s < Config::kSlices; ++s) {
#pragma unroll
      for (int g = 0; g < Config::kRecords; ++g) {
        // Past the last record of N the last one is read again; its results are never stored.
        record[s][g] = records + min(first + g, p.tiles_n - 1) * row_bytes +
                       int64_t{work.begin + s * slice_steps} * ring.record_bytes;
      }
    }
    for (int step = work.begin; step < work.begin + slice_steps; ++step) {
#pragma unroll
      for (int s = 0; s < Config::kSlices; ++s, at.Advance()) {
        if (s > 0 && step + s * slice_steps >= work.end) continue;
        BarrierWait(ring.Empty(at.slot), at.parity ^ 1);
        BarrierExpect(ring.Full(at.slot), Config::kRecords * ring.record_bytes);
#pragma unroll
        for (int g = 0; g < Config::kRecords; ++g) {
          BulkCopy(ring.Record(at.slot, g), record[s][g], ring.record_bytes, ring.Full(at.slot));
          record[s][g] += ring.record_bytes;
        }
      }
    }
  }
  // No block may end while others still arrive at its barriers. Waiting for its own slots is
  // enough; a barrier of the cluster would cost a fence of the whole GPU after the output.
  if (Config::kCluster > 1) {
    for (int slot = 0; slot < Config::kSlots; ++slot, at.Advance()) {
      BarrierWait(ring.Empty(at.slot), at.parity ^ 1);
    }
  }
}

// Loads this block's tokens for the whole cluster.
template <class Config>
__device__ __forceinline__ void ProduceTokens(const PersistentParams& p, const Ring<Config>& ring,
                                              int cluster, int rank) {
  WaitForEarlierKernels();
  Cursor<Config> at;
  FilledWorkUnits<Config> units(p, cluster);
  for (WorkUnit work; units.Next(&work);) {
    const TilePlace place = PlaceOf(work.tile, p.token_tiles, ColumnTiles<Config>(p));
    // Rows past the last token are not loaded. Filling one with zeros takes the copy engine longer
    // than loading it, and results of these rows are never stored.
    // Those past an expert's last row are the next one's.
    const bool last = !Config::kGrouped && place.tokens == p.token_tiles - 1;
    const CUtensorMap* const map = last ? &p.x_last : &p.x;
    const int rows = last ? p.last_rows : Config::kTokens / Config::kCluster;
    const int first = rank * (last ? p.last_stride : rows);
    int token = place.tokens * Config::kTokens + first;
    if constexpr (Config::kGrouped) token = p.tiles[place.tokens].first_token + first;
    // An expert's first token may lie within a vector of scales.
    constexpr int kScaleBytes = !Config::kTokenScales ? 0
                                : Config::kGrouped    ? TokenScalesBytes(Config::kTokens)
                                                      : Config::kTokens * 4;
    const int bytes = Config::kCluster * rows * Config::kXBytes * kTokenRowBytes + kScaleBytes;
    const int first_scale = Config::kGrouped ? (token - first) / 4 * 4 : token - first;
    const int slice_steps = SliceSteps<Config>(p, work);
    for (int step = work.begin; step < work.begin + slice_steps; ++step) {
#pragma unroll
      for (int s = 0; s < Config::kSlices; ++s, at.Advance()) {
        const int of_slice = step + s * slice_steps;
        if (s > 0 && of_slice >= work.end) continue;
        BarrierWait(ring.Empty(at.slot), at.parity ^ 1);
        BarrierExpect(ring.Full(at.slot), bytes);
        if constexpr (Config::kTokenScales) {
          const float* const scales =
              p.token_scales + of_slice * p.token_scales_stride + first_scale;
          BulkCopy(ring.TokenScales(at.slot), scales, kScaleBytes, ring.Full(at.slot));
        }
#pragma unroll
        for (int half = 0; half < Config::kXBytes; ++half) {
          const uint32_t to =
              ring.Tokens(at.slot) + (half * Config::kTokens + first) * kTokenRowBytes;
          const int k = (of_slice * Config::kXBytes + half) * kMapColumns;
          if (Config::kCluster == 1) {
            TensorCopy(to, map, k, token, ring.Full(at.slot));
          } else {
            TensorCopyMulticast(to, map, k, token, ring.Full(at.slot), (1 << Config::kCluster) - 1);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
