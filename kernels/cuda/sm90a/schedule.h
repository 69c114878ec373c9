// Who computes what in the persistent product: tiles of the output, cut along K where they would
// not fill the device evenly.
//
// A tile is what one cluster accumulates at a time, `k_blocks` steps long. The first `split` tiles
// are laid end to end and cut into equal runs of steps, one per cluster, wherever the cut falls;
// the other tiles are dealt out whole, one per cluster and round. A tile that was cut is finished
// by the cluster that has its last step: it adds the sums of the earlier ones in the order of K. So
// every sum has a fixed order and every cluster equal work.
//
// A cluster takes its run backwards. The piece whose tile ends in somebody else's run comes first,
// and the piece that needs the sums of others comes last, when these have long been written. Nobody
// waits for a cluster of a higher number; blocks are started in ascending order, so that a cluster
// that is waited for is always running.
//
// Where the order of sums must be that of common/chains.h, tiles that are fewer than clusters are
// cut between chains into parts, one per cluster, instead of anywhere. Where they are not fewer, no
// tile is cut more than once, and the second cluster goes on from the sums of the first.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define AWQD_SCHEDULE_FN __host__ __device__ __forceinline__
#else
#define AWQD_SCHEDULE_FN inline
#endif

namespace awqd::cuda {

struct Schedule {
  int clusters = 1;
  int k_blocks = 1;
  int split = 0;       // tiles that are cut
  int rounds = 0;      // whole tiles per cluster
  int parts = 0;       // of each cut tile, 0: cuts are anywhere
  int part_steps = 0;  // of each part; the last may be shorter

  int tiles() const { return split + rounds * clusters; }
};

// Steps [begin, end) of a tile.
struct Piece {
  int tile = 0;
  int begin = 0;
  int end = 0;
};

// Whole rounds as long as what remains fills every cluster at least once and less than twice, so
// that cuts are few and short of nobody.
inline Schedule MakeSchedule(int tiles, int k_blocks, int clusters) {
  Schedule s{clusters, k_blocks, tiles, 0};
  if (tiles % clusters == 0) {
    s.rounds = tiles / clusters;
  } else if (tiles > 2 * clusters) {
    s.rounds = tiles / clusters - 1;
  }
  s.split = tiles - s.rounds * clusters;
  return s;
}

// The largest k_blocks: with it the products below, of fewer than 2 * clusters cut tiles and at
// most 256 clusters, fit 32 bits. A 64-bit division is a call that needs more registers than a
// producer keeps.
inline constexpr int kMostKBlocks = 1 << 15;

// Every tile in `parts` parts.
inline Schedule MakeParts(int tiles, int k_blocks, int parts, int part_steps) {
  return {tiles * parts, k_blocks, tiles, 0, parts, part_steps};
}

// First step of a cluster's run over the cut tiles.
AWQD_SCHEDULE_FN int RunBegin(const Schedule& s, int cluster) {
  if (s.parts > 0) {
    const int tile = cluster / s.parts;
    return tile * s.k_blocks + (cluster - tile * s.parts) * s.part_steps;
  }
  return static_cast<uint32_t>(s.split) * s.k_blocks * cluster / s.clusters;
}

// The cluster whose run holds `step`: the last one whose run begins at or before it. Not for parts.
AWQD_SCHEDULE_FN int RunOf(const Schedule& s, int step) {
  const uint32_t steps = static_cast<uint32_t>(s.split) * s.k_blocks;
  return ((static_cast<uint32_t>(step) + 1) * s.clusters - 1) / steps;
}

// A cluster's pieces in the order in which it takes them.
class Pieces {
 public:
  AWQD_SCHEDULE_FN Pieces(const Schedule& s, int cluster)
      : s_(s), cluster_(cluster), begin_(RunBegin(s, cluster)), end_(RunBegin(s, cluster + 1)) {}

  // False after the last one.
  AWQD_SCHEDULE_FN bool Next(Piece* piece) {
    if (begin_ < end_) {
      const int tile = (end_ - 1) / s_.k_blocks, first = tile * s_.k_blocks;
      *piece = {tile, begin_ > first ? begin_ - first : 0, end_ - first};
      end_ = first + piece->begin;
      return true;
    }
    if (round_ == s_.rounds) return false;
    *piece = {s_.split + round_++ * s_.clusters + cluster_, 0, s_.k_blocks};
    return true;
  }

 private:
  const Schedule& s_;
  int cluster_;
  int begin_;
  int end_;
  int round_ = 0;
};

}  // namespace awqd::cuda
