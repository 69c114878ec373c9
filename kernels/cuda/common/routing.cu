// Sorts choices by expert, and makes the table of tiles of a grouped product: what the server does
// on the host.
//
// Both kernels are short and read little again and again, from L2: a block of SortKernel reads all
// choices, one of TableKernel all ends. So no block waits for another, and no result depends on
// timing. They start after earlier kernels, because the caller may have used the memory before.
#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/common/grouped.h"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int SumOfWarp(int value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// A block for each expert. Each warp has a run of choices: it counts those of the expert and those
// of earlier ones, and then knows the rows of its own.
__global__ __launch_bounds__(kThreads) void SortKernel(SortArgs a) {
  __shared__ int earlier_of[kWarps], own_of[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto expert = static_cast<int>(blockIdx.x);
  const auto top_k = static_cast<int>(a.top_k);
  const int64_t run = (a.choices + kWarps - 1) / kWarps;
  const int64_t begin = warp * run, end = min(begin + run, a.choices);
  int earlier = 0, own = 0;
#pragma unroll 4
  for (int64_t i = begin + lane; i < end; i += 32) {
    const int32_t id = a.ids[i];
    earlier += id >= 0 && id < expert;
    own += id == expert;
  }
  earlier = SumOfWarp(earlier), own = SumOfWarp(own);
  if (lane == 0) earlier_of[warp] = earlier, own_of[warp] = own;
  __syncthreads();
  int row = 0, last = 0;  // of this warp's first choice; past those of the expert
  for (int w = 0; w < kWarps; ++w) {
    last += earlier_of[w] + own_of[w];
    row += earlier_of[w] + (w < warp ? own_of[w] : 0);
  }
#pragma unroll 4
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t i = first + lane;
    const bool is_own = i < end && a.ids[i] == expert;
    const unsigned those = __ballot_sync(kAllLanes, is_own);
    if (is_own) {
      const int at = row + __popc(those & ((1u << lane) - 1));
      a.tokens[at] = static_cast<int>(i) / top_k;
      a.rows[i] = at;
    }
    row += __popc(those);
  }
  if (threadIdx.x == 0) a.ends[expert] = last;
  if (expert < a.experts - 1) return;
  for (int64_t i = threadIdx.x; i < a.choices; i += kThreads) {
    if (a.ids[i] < 0 || a.ids[i] >= a.experts) a.rows[i] = -1;
    if (i >= last) a.tokens[i] = 0;
  }
}

struct TableParams {
  const int32_t* ends;  // null with a mask
  RowMask mask;
  int experts;
  const ExpertParts* parts[2];
  int stacks;
  int rows;    // of y, of each stack
  int tokens;  // of a tile
  int tiles;   // of the table
  GroupedTile* table;
};

__device__ __forceinline__ int BeginOf(const TableParams& p, int expert) {
  if (p.ends == nullptr) return static_cast<int>(expert * p.mask.max_rows);
  return expert == 0 ? 0 : p.ends[expert - 1];
}
__device__ __forceinline__ int EndOf(const TableParams& p, int expert) {
  return p.ends == nullptr ? BeginOf(p, expert) + p.mask.CountOf(expert) : p.ends[expert];
}

// The number of each expert's first tile in `firsts`; returns how many tiles a stack has.
__device__ __forceinline__ int NumberTiles(const TableParams& p, int* firsts) {
  __shared__ int by_warp[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int before = 0;
  for (int base = 0; base < p.experts; base += kThreads) {
    const int expert = base + static_cast<int>(threadIdx.x);
    int count = 0;
    if (expert < p.experts) {
      count = (EndOf(p, expert) - BeginOf(p, expert) + p.tokens - 1) / p.tokens;
    }
    int sum = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) by_warp[warp] = sum;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) sum += by_warp[w];
      all += by_warp[w];
    }
    if (expert < p.experts) firsts[expert] = before + sum - count;
    before += all;
    __syncthreads();
  }
  return before;
}

// Tiles are in the order of GroupedTiles; empty ones follow.
__global__ __launch_bounds__(kThreads) void TableKernel(TableParams p) {
  extern __shared__ int firsts[];
  const int each = NumberTiles(p, firsts);
  for (int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); i < p.tiles;
       i += static_cast<int>(gridDim.x) * kThreads) {
    GroupedTile tile = {};
    if (i < each * p.stacks) {
      const int stack = i / each, number = i % each;
      // The last expert whose first tile is not after this one. It has tiles, unlike those before it
      // with the same first tile.
      int low = 0, high = p.experts;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (firsts[middle] <= number ? low : high) = middle;
      }
      const ExpertParts parts = p.parts[stack][low];
      const int first = BeginOf(p, low) + (number - firsts[low]) * p.tokens;
      tile = {parts.codes,   parts.outer, parts.bias, first, min(first + p.tokens, EndOf(p, low)),
              stack * p.rows};
    }
    p.table[i] = tile;
  }
}

// Comes between a table and a product that reads it as it begins, maybe before earlier kernels are
// done: they are done before this one.
__global__ void SeparateKernel() {}

}  // namespace

absl::Status SortChoices(const SortArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  return Launch<SortKernel>(
      "common/routing",
      {.grid = static_cast<unsigned>(args.experts), .block = kThreads, .stream = stream}, args);
}

absl::Status MakeGroupedTable(const GroupedTableArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  const GroupedArgs& product = *args.product;
  const int64_t tiles = GroupedTileCount(product, args.tile);
  constexpr int64_t kMostBlocks = 32;  // each numbers the tiles of all experts
  const LaunchConfig config{
      .grid = static_cast<unsigned>(std::min(CeilDiv(tiles, kThreads), kMostBlocks)),
      .block = kThreads,
      .shared_bytes = product.device_experts * int64_t{sizeof(int)},
      .stream = stream};
  const TableParams params = {.ends = args.ends,
                              .mask = product.mask,
                              .experts = static_cast<int>(product.device_experts),
                              .parts = {args.parts[0], args.parts[1]},
                              .stacks = static_cast<int>(product.stacks()),
                              .rows = static_cast<int>(product.rows()),
                              .tokens = static_cast<int>(args.tile),
                              .tiles = static_cast<int>(tiles),
                              .table = static_cast<GroupedTile*>(args.table)};
  AWQD_RETURN_IF_ERROR(Launch<TableKernel>("common/routing", config, params));
  if (product.mask.max_rows == 0) return absl::OkStatus();
  return Launch<SeparateKernel>("common/routing", {.grid = 1, .block = 1, .stream = stream});
}

}  // namespace awqd::cuda
