// Who computes what in the persistent product, and in sm80/stream_k.cuh, where a cluster is one block.
// Tiles are cut along K where whole tiles would not give every cluster equal work.
//
// A tile is `k_blocks` steps long. The first `split` tiles are laid end to end and cut into equal
// runs of steps, one for each cluster; a cut may fall within a tile. The other tiles are dealt out
// whole, one to each cluster in each round. The cluster that has the last step of a cut tile
// finishes it: it adds the sums of the earlier clusters in the order of K. So a sum has the same
// order in every call, and every cluster has equal work.
//
// A cluster's run touches at least one tile; the steps of one tile in it are a work unit. A cluster
// computes its work units backwards. First comes the work unit whose tile a later cluster finishes. Last
// comes the work unit that needs the sums of earlier clusters, which by then have written them. A
// cluster only waits for clusters of lower numbers. Blocks start in ascending order, so a cluster
// that is waited for is always running.
//
// Where the order of sums must be that of common/fixed_order.h, cuts fall between k-ranges: tiles that are
// fewer than the clusters are cut into parts of whole k-ranges, one for each cluster. Where tiles are
// as many as the clusters or more, no tile is cut more than once, and the second cluster goes on
// from the sums of the first.
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
  int stream_k_tiles = 0;  // tiles that are cut
  int rounds = 0;          // whole tiles for each cluster
  int splits = 0;          // parts of each cut tile; 0: cuts fall anywhere
  int split_steps = 0;     // steps of each part; the last may be shorter

  int tiles() const { return stream_k_tiles + rounds * clusters; }
};

// Steps [begin, end) of a tile, computed by one cluster.
struct WorkUnit {
  int tile = 0;
  int begin = 0;
  int end = 0;
};

// Tiles that divide evenly among the clusters are dealt out whole. Otherwise whole rounds are dealt
// out as long as at least one tile for each cluster remains afterwards; what remains is cut. So few
// tiles are cut, and the cut ones give every cluster work.
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
