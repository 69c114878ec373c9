// The work units of the stream-K products: sm90a's persistent kernel, and sm80/stream_k.cuh, where
// a cluster is one block. Stream-K splits tiles along K where whole tiles would leave clusters
// idle.
//
// A tile has `k_blocks` steps. The first `stream_k_tiles` tiles are laid end to end and divided
// into equal k-ranges, one for each cluster; a k-range may begin within a tile. The other tiles are
// data parallel: each cluster computes one of them in each round. The fix-up of a stream-K tile is
// done by the cluster that has its last step: it adds the partials of the earlier clusters in the
// order of K. So a sum has the same order in every call, and every cluster has equal work.
//
// The steps that a cluster has of one tile are a work unit. A cluster computes its work units
// backwards. The first is the one whose tile a later cluster fixes up. The last is the one that
// needs the partials of earlier clusters, which have written them by then. A cluster waits for
// clusters of lower numbers only. Blocks start in ascending order, so these are running.
//
// Where the order of sums must be that of common/fixed_order.h, tiles are split between its
// k-ranges only. If there are fewer tiles than clusters, each cluster computes one split of a tile.
// Otherwise no tile is split more than once, and the second cluster continues from the partials of
// the first.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define AWQD_SCHEDULE_FN __host__ __device__ __forceinline__
#else
#define AWQD_SCHEDULE_FN inline
#endif

namespace awqd::cuda {

struct StreamKSchedule {
  int clusters = 1;
  int k_blocks = 1;
  int stream_k_tiles = 0;  // tiles that are split along K
  int rounds = 0;          // whole tiles of each cluster
  int splits = 0;          // splits of each stream-K tile; 0: of any length
  int split_steps = 0;     // steps of each split; the last may be shorter

  int tiles() const { return stream_k_tiles + rounds * clusters; }
};

// Steps [begin, end) of a tile, computed by one cluster.
struct WorkUnit {
  int tile = 0;
  int begin = 0;
  int end = 0;
};

// If the tiles divide evenly among the clusters, all are data parallel. Otherwise as many whole
// rounds are data parallel as leave at least one tile for each cluster; the rest is stream-K. So
// few tiles are split, and they give every cluster equal work.
inline StreamKSchedule MakeStreamKSchedule(int tiles, int k_blocks, int clusters) {
  StreamKSchedule s{clusters, k_blocks, tiles, 0};
  if (tiles % clusters == 0) {
    s.rounds = tiles / clusters;
  } else if (tiles > 2 * clusters) {
    s.rounds = tiles / clusters - 1;
  }
  s.stream_k_tiles = tiles - s.rounds * clusters;
  return s;
}

// The largest k_blocks. Fewer than 2 * clusters tiles are cut and there are at most 256 clusters,
// so the products below fit 32 bits. A 64-bit division would be a call that needs more registers
// than a producer keeps.
inline constexpr int kMostKBlocks = 1 << 15;

// Every tile in `parts` parts.
inline StreamKSchedule MakeSplitKSchedule(int tiles, int k_blocks, int splits, int split_steps) {
  return {tiles * splits, k_blocks, tiles, 0, splits, split_steps};
}

// The first step of a cluster's run, counted over all cut tiles.
AWQD_SCHEDULE_FN int FirstStep(const StreamKSchedule& s, int cluster) {
  if (s.splits > 0) {
    const int tile = cluster / s.splits;
    return tile * s.k_blocks + (cluster - tile * s.splits) * s.split_steps;
  }
  return static_cast<uint32_t>(s.stream_k_tiles) * s.k_blocks * cluster / s.clusters;
}

// The cluster whose run holds `step`. Not for tiles in parts.
AWQD_SCHEDULE_FN int ClusterOfStep(const StreamKSchedule& s, int step) {
  const uint32_t steps = static_cast<uint32_t>(s.stream_k_tiles) * s.k_blocks;
  return ((static_cast<uint32_t>(step) + 1) * s.clusters - 1) / steps;
}

// The work units of a cluster in the order in which it computes them.
class WorkUnits {
 public:
  AWQD_SCHEDULE_FN WorkUnits(const StreamKSchedule& s, int cluster)
      : s_(s), cluster_(cluster), begin_(FirstStep(s, cluster)), end_(FirstStep(s, cluster + 1)) {}

  // False after the last one.
  AWQD_SCHEDULE_FN bool Next(WorkUnit* work) {
    if (begin_ < end_) {
      const int tile = (end_ - 1) / s_.k_blocks, first = tile * s_.k_blocks;
      *work = {tile, begin_ > first ? begin_ - first : 0, end_ - first};
      end_ = first + work->begin;
      return true;
    }
    if (round_ == s_.rounds) return false;
    *work = {s_.stream_k_tiles + round_++ * s_.clusters + cluster_, 0, s_.k_blocks};
    return true;
  }

 private:
  const StreamKSchedule& s_;
  int cluster_;
  int begin_;
  int end_;
  int round_ = 0;
};

}  // namespace awqd::cuda
