// The prologue of a weight with an order.
//
// A row is read into shared memory as it lies and gathered from there: 32 lanes that gather 16 bits
// each from global memory take 32 sectors, from shared memory three or four turns. A block takes
// several rows where there are many, so that the order is read once for all of them, and a share of
// the columns where there are few, so that one long row is as quick as many. The order belongs to
// the weight: it is read while the kernel before still runs.
#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 8;  // elements that a thread writes at a time

struct Work {
  OrderedRows rows;
  int64_t padded;  // elements from one row to the next in shared memory
  int runs;        // of a block
  bool wide;       // rows of x lie on 16 bytes
};

// Where the elements of a run come from; those from k on from nowhere.
struct Places {
  int32_t at[kRun];
};

__device__ __forceinline__ Places ReadPlaces(const OrderedRows& rows, int64_t first) {
  Places out;
  if (first + kRun <= rows.k) {
    const int4* const from = reinterpret_cast<const int4*>(rows.order + first);
    const int4 a = __ldg(from), b = __ldg(from + 1);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    out.at[i] = first + i < rows.k ? __ldg(rows.order + first + i) : -1;
  }
  return out;
}

// All that lies on 16 bytes is on its way before any of it is waited for.
template <int kRows>
__device__ __forceinline__ void ReadRows(const Work& work, int64_t row, uint16_t* to) {
  const OrderedRows& rows = work.rows;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (row + r >= rows.rows) break;
    const uint16_t* const x = rows.x + (row + r) * rows.k;
    uint16_t* const own = to + r * work.padded;
    if (work.wide) {
      for (int64_t i = threadIdx.x * kRun; i < rows.k; i += kThreads * kRun) {
        CopyAsync16(SharedAddress(own + i), x + i);
      }
    } else {
      for (int64_t i = threadIdx.x; i < rows.k; i += kThreads) own[i] = x[i];
    }
  }
  CommitGroup();
  WaitGroup<0>();
}

template <int kRows>
__device__ __forceinline__ void WriteRuns(const Work& work, int64_t row, int64_t first,
                                          const Places& places, const uint16_t* from) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (row + r >= work.rows.rows) return;
    uint32_t v[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      v[i] = places.at[i] < 0 ? 0 : from[r * work.padded + places.at[i]];
    }
    *reinterpret_cast<uint4*>(work.rows.out + (row + r) * work.rows.stride + first) = {
        v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16};
  }
}

// blockIdx.x = kRows rows, blockIdx.y = work.runs runs of them.
template <int kRows>
__global__ __launch_bounds__(kThreads) void PrologueOrderedKernel(
    const __grid_constant__ Work work) {
  extern __shared__ __align__(16) uint16_t shared[];
  LaunchDependents();
  const int64_t row = int64_t{blockIdx.x} * kRows;
  const int64_t begin = int64_t{blockIdx.y} * work.runs;
  const int64_t end = min(begin + work.runs, work.rows.stride / kRun);
  int64_t run = begin + threadIdx.x;
  Places places;
  if (run < end) places = ReadPlaces(work.rows, run * kRun);
  WaitForEarlierKernels();
  ReadRows<kRows>(work, row, shared);
  __syncthreads();
  while (run < end) {
    WriteRuns<kRows>(work, row, run * kRun, places, shared);
    run += kThreads;
    if (run < end) places = ReadPlaces(work.rows, run * kRun);
  }
}

int64_t SharedBytes(int64_t k, int rows) { return rows * RoundUp(k, int64_t{kRun}) * 2; }

template <int kRows>
absl::Status LaunchRows(const OrderedRows& rows, const DeviceInfo& device, StreamView stream) {
  const int64_t blocks = CeilDiv(rows.rows, int64_t{kRows}), runs = rows.stride / kRun;
  // Two blocks for each multiprocessor, each with at least one run for every thread.
  const int64_t parts = std::clamp<int64_t>(CeilDiv(int64_t{2} * device.sm_count, blocks), 1,
                                            CeilDiv(runs, int64_t{kThreads}));
  const Work work = {.rows = rows,
                     .padded = RoundUp(rows.k, int64_t{kRun}),
                     .runs = static_cast<int>(CeilDiv(runs, parts)),
                     .wide = rows.k % kRun == 0 && reinterpret_cast<uintptr_t>(rows.x) % 16 == 0};
  const LaunchConfig config{.grid = {static_cast<unsigned>(blocks), static_cast<unsigned>(parts)},
                            .block = kThreads,
                            .shared_bytes = SharedBytes(rows.k, kRows),
                            .stream = stream,
                            .attributes = OverlappedLaunch(device)};
  return Launch<PrologueOrderedKernel<kRows>>("common/prologue_ordered", config, work);
}

}  // namespace

bool CanRunPrologueOrdered(const OrderedRows& rows, const DeviceInfo& device) {
  return SharedBytes(rows.k, 1) <= device.shared_bytes_per_block;
}

absl::Status PrologueOrdered(const OrderedRows& rows, const DeviceInfo& device, StreamView stream) {
  constexpr int kManyRows = 4;
  const bool fills = rows.rows >= int64_t{2} * kManyRows * device.sm_count;
  // Two blocks on a multiprocessor: one reads while the other writes.
  if (fills && SharedBytes(rows.k, kManyRows) <= device.shared_bytes_per_block / 2) {
    return LaunchRows<kManyRows>(rows, device, stream);
  }
  return LaunchRows<1>(rows, device, stream);
}

}  // namespace awqd::cuda
